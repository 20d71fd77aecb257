"""Stand-ins for the packages of SGLang that exist for GPUs only, so that its cache code imports on a CPU.

What is replaced is what a CPU cannot run, and nothing else: Triton and CUTLASS compile GPU kernels,
``sgl_kernel`` is a library of them, ``torchaudio`` and ``quack`` are not used by the cache. Their
attributes can be named, subscripted and used as decorators, which is all that importing does; a kernel
that was really called would return a placeholder, and the first use of its result would fail.
Storage, host pools, controllers, hashing and queues are the code of the wheel, unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("triton", "sgl_kernel", "torchaudio", "torchvision", "cutlass", "quack")


class Anything:
    """An object that can be named, called, subscripted and used as a decorator."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_decorated = len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type))
        return args[0] if is_decorated else self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class AnyClass(type):
    """The type of names that look like a class: they stand in ``isinstance`` and as base classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{cls.__name__}.{name}")

    def __getitem__(cls, key: Any) -> Any:
        return cls


class PlaceholderModule(types.ModuleType):
    """A module that holds every name; submodules are found by the import system."""

    __path__: Sequence[str] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = AnyClass(name, (), {}) if name.lstrip("_")[:1].isupper() else Anything(full)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of :data:`PACKAGES` and all their submodules."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Make the placeholders importable, where the real package is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
