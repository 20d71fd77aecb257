from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from hicache_store.clock import Deadline
from hicache_store.connectors import registry
from hicache_store.connectors.memory import MemoryConnector
from hicache_store.connectors.registry import known_schemes, open_connector
from hicache_store.errors import ConfigurationError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

GOOD = """
from hicache_store.connectors.memory import MemoryConnector
opened = []
def connect(url):
    opened.append(url)
    return MemoryConnector()
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Installs a distribution that declares schemes, as a third party would."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)

    def install(name, entry_points, extras=(), **sources):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        lines = [f"Provides-Extra: {extra}\n" for extra in extras]
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        (info / "METADATA").write_text(head + "".join(lines))
        listed = "\n".join(f"{scheme} = {value}" for scheme, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[hicache_store.connectors]\n{listed}\n")
        for module, source in sources.items():
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))

    yield install
    for module in set(sys.modules) - modules:
        del sys.modules[module]


def test_own_schemes_open():
    connector = open_connector("memory:?quota=1MiB")
    assert isinstance(connector, MemoryConnector)
    connector.close()
    assert {"memory", "file"} <= set(known_schemes())


def test_the_scheme_is_not_case_sensitive():
    open_connector("MEMORY:").close()


def test_the_table_agrees_with_the_installed_entry_points():
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][registry.GROUP]
    assert declared == {scheme: point.value for scheme, point in registry._BUILT_IN.items()}


def test_a_third_party_scheme_is_found_and_given_the_parsed_url(distribution):
    distribution("their-store", {"theirs": "their_module:connect"}, their_module=GOOD)
    assert "theirs" in known_schemes()
    assert "their_module" not in sys.modules
    connector = open_connector("theirs://host:7/path?ttl=5s&name=a%20b")
    assert connector.sizes(["k"], Deadline.after(60.0)) == [None]
    url = sys.modules["their_module"].opened[0]
    assert (url.scheme, url.location) == ("theirs", "host:7/path")
    assert url.query == (("ttl", "5s"), ("name", "a b"))


def test_an_unknown_scheme_names_the_known_and_the_closest(distribution):
    distribution("their-store", {"theirs": "their_module:connect"}, their_module=GOOD)
    with pytest.raises(ConfigurationError) as caught:
        open_connector("memry://x")
    assert "'memry'" in str(caught.value)
    assert "did you mean memory?" in str(caught.value)
    assert "known: file, " in str(caught.value)
    assert "theirs" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        open_connector("zzz://x")
    assert "did you mean" not in str(caught.value)


def test_a_text_without_a_scheme_is_refused():
    for text in ("", "/absolute/path", "name", "?quota=1B"):
        with pytest.raises(ConfigurationError, match="has no scheme"):
            open_connector(text)


@pytest.mark.parametrize(
    ("value", "extras", "hint"),
    [
        ("their_module:connect", ["blob"], "; install 'their-store[blob]'"),
        ("their_module:connect [sdk]", ["sdk", "blob"], "; install 'their-store[sdk]'"),
        ("their_module:connect", ["other"], "which is not installed"),
    ],
)
def test_a_missing_sdk_names_the_extra(distribution, value, extras, hint):
    source = "import an_sdk_nobody_has\n"
    distribution("their-store", {"blob": value}, extras, their_module=source)
    with pytest.raises(ConfigurationError) as caught:
        open_connector("blob://bucket")
    assert "'blob' needs the module 'an_sdk_nobody_has', which is not installed" in str(caught.value)
    assert str(caught.value).endswith(hint)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("value", "source", "words"),
    [
        ("their_module:connect", "connect = 7", "is not callable"),
        ("their_module:connect", "", "does not load: .*has no attribute 'connect'"),
        ("their_module:connect", "from math import nothing_such", "does not load: cannot import name"),
    ],
)
def test_a_connector_that_does_not_load_is_a_configuration_error(distribution, value, source, words):
    distribution("their-store", {"theirs": value}, their_module=source)
    with pytest.raises(ConfigurationError, match=words):
        open_connector("theirs:")


def test_a_scheme_with_two_givers_is_refused(distribution):
    distribution("one-store", {"twice": "module_a:connect"}, module_a=GOOD)
    distribution("two-store", {"twice": "module_b:connect"}, module_b=GOOD)
    with pytest.raises(ConfigurationError) as caught:
        open_connector("twice:")
    assert "module_a:connect of one-store" in str(caught.value)
    assert "module_b:connect of two-store" in str(caught.value)


def test_own_schemes_cannot_be_taken_over(distribution):
    distribution("their-store", {"memory": "their_module:connect"}, their_module=GOOD)
    open_connector("memory:").close()
    assert "their_module" not in sys.modules


def test_errors_of_a_connector_pass_through():
    with pytest.raises(ConfigurationError, match="unknown option 'quotta'; did you mean quota"):
        open_connector("memory:?quotta=1")


def test_a_connector_is_imported_only_when_its_scheme_is_opened():
    code = (
        "import sys; from hicache_store.connectors.registry import open_connector; "
        "open_connector('memory:').close(); "
        "assert 'hicache_store.connectors.memory' in sys.modules; "
        "assert 'hicache_store.connectors.local' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
