"""How the running command is called, for commands that name others."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

_PROGRAM: Final = "hicache"


def invocation(*words: str) -> str:
    """A line for a shell that runs ``hicache`` with ``words`` as this process was run."""
    called = sys.argv[0]
    if Path(called).name == _PROGRAM:
        found = shutil.which(_PROGRAM)
        is_on_path = found is not None and Path(found).resolve() == Path(called).resolve()
        program = [_PROGRAM] if is_on_path else [called]
    else:
        program = [sys.executable, "-m", "hicache_store.cli.main"]
    return shlex.join([*program, *words])
