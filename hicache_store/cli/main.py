"""The ``hicache`` command: parse, run one command, and turn what went wrong into one line.

Exit codes: 0 done; 1 the store has faults or the work is incomplete; 2 a wrong argument, setting
or storage; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from hicache_store.cli.output import Output
from hicache_store.cli.parser import parse_arguments
from hicache_store.errors import HicacheError

EXIT_OK: Final = 0
EXIT_FAULTS: Final = 1
EXIT_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of ``argv`` (the process's arguments by default) and give its exit code.

    Wrong usage, ``--help`` and ``--version`` leave by ``SystemExit``, as argparse does.
    """
    args = parse_arguments(argv)
    package = logging.getLogger("hicache_store")
    if not package.handlers:
        # What matters of the package's warnings is part of a command's result; stderr is for one line.
        package.addHandler(logging.NullHandler())
    out = Output(as_json=args.json)
    try:
        # Imported by need: `hicache --version` should not wait for numpy.
        code: int = import_module(f"hicache_store.cli.{args.command}_command").run(args, out)
        sys.stdout.flush()
    except KeyboardInterrupt:
        out.note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (HicacheError, OSError) as error:
        out.note(str(error))
        return EXIT_ERROR
    return code


if __name__ == "__main__":
    sys.exit(main())
