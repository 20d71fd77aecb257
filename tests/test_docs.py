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
