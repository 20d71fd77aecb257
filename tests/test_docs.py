"""Every Python example of the README and the docs runs, and every example file too."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from hicache_store.connectors.registry import known_schemes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


def test_the_docs_hold_examples() -> None:
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "connectors").glob("*.md")), ids=lambda page: page.name
)
def test_each_connector_has_a_page_with_an_example(page: Path) -> None:
    assert "open_connector(" in "".join(BLOCK.findall(page.read_text(encoding="utf-8")))


def test_each_connector_has_a_page() -> None:
    listed = (ROOT / "docs" / "connectors" / "README.md").read_text(encoding="utf-8")
    pages = {page.stem for page in (ROOT / "docs" / "connectors").glob("*.md")}
    kin = {"rediss": "redis", "unix": "redis", "valkey": "redis", "valkeys": "redis"}
    for scheme in known_schemes():
        name = scheme.partition("+")[0]
        page = kin.get(name, name)
        assert page in pages
        assert f"]({page}.md)" in listed


@pytest.mark.parametrize("code", BLOCKS)
def test_python_blocks_run(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if "REDIS_URL" in code:
        server = request.getfixturevalue("redis_single")
        monkeypatch.setenv("REDIS_URL", f"redis://{server.address}")
    if "S3_ENDPOINT" in code:
        moto = request.getfixturevalue("moto_endpoint")
        moto.make_bucket("hicache")  # which moto takes again and again
        for name, value in {**moto.environment, "S3_ENDPOINT": moto.url}.items():
            monkeypatch.setenv(name, value)
    exec(compile(code.replace("/tmp/", f"{tmp_path}/"), "<docs>", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_files_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_compose_gives_what_the_docs_and_the_workflow_use() -> None:
    """Keys, bucket and ports are written in three places; they must be the same."""
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    tools = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")

    def value(name: str, text: str) -> set[str]:
        return set(re.findall(rf"\b{name}[:=] *(\S+)", text))

    for name, kin in (("ROOT_USER", "ACCESS_KEY_ID"), ("ROOT_PASSWORD", "SECRET_ACCESS_KEY")):
        keys = value(f"MINIO_{name}", compose)
        assert len(keys) == 1
        assert value(f"AWS_{kin}", tools) == value(f"AWS_{kin}", workflow) == keys
    assert value("HICACHE_TEST_S3_ACCESS_KEY", workflow) == value("MINIO_ROOT_USER", compose)
    assert value("HICACHE_TEST_S3_SECRET_KEY", workflow) == value("MINIO_ROOT_PASSWORD", compose)
    assert value("HICACHE_TEST_S3_BUCKET", workflow) == set(re.findall(r"mb .* local/(\S+)", compose))
    ports = re.findall(r"127\.0\.0\.1:(\d+):\1", compose)
    assert {"9000", "6379"} <= set(ports)
    for text in (tools, workflow):
        assert set(re.findall(r"127\.0\.0\.1:(\d+)", text)) == {"9000", "6379"}
