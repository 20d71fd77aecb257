"""Where a command's words go: one JSON document, rich tables, or aligned plain text.

stdout holds the result alone. Notes, questions and progress go to stderr. Rich is used on a
terminal when it is installed, and never needed.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

from hicache_store.config import size_text as size_text  # noqa: PLC0414  (told to other modules from here)
from hicache_store.errors import ConfigurationError
from hicache_store.limits import LISTING_ROWS_MAX

DIGEST_DIGITS: Final = 16
"""Digits of a page hash that tables show on a terminal; a pipe gets all."""
NAMESPACE_DIGITS: Final = 12
"""Digits of a namespace in tables: enough to tell the namespaces of any store, and to be given back."""

Cell = str | int


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table; numbers stand on the right. A spare one is left out where a terminal is too
    narrow for all."""

    title: str
    is_number: bool = False
    is_spare: bool = False


class Progress(Protocol):
    """Something that shows how far a long piece of work is."""

    def advance(self, amount: int, text: str) -> None:
        """``amount`` more is done; ``text`` says what was found so far."""
        ...


class _Silent:
    def advance(self, amount: int, text: str) -> None:
        """Say nothing."""


class Output:
    """The two streams of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.is_terminal = sys.stdout.isatty()
        self._has_rich = find_spec("rich") is not None

    @property
    def shows_progress(self) -> bool:
        """Whether :meth:`progress` will be seen."""
        return self._has_rich and sys.stderr.isatty()

    @property
    def width(self) -> int:
        """Columns of the terminal, 100 for a pipe."""
        return shutil.get_terminal_size((100, 24)).columns if self.is_terminal else 100

    def line(self, text: str = "") -> None:
        """A line of the result; nothing with ``--json``."""
        if not self.as_json:
            print(text)

    def note(self, text: str) -> None:
        """A line beside the result."""
        print(f"hicache: {text}", file=sys.stderr)

    def document(self, value: object) -> None:
        """The JSON document; nothing without ``--json``."""
        if self.as_json:
            print(json.dumps(value, indent=2, ensure_ascii=False))

    def digest(self, text: str) -> str:
        """A digest as a table shows it."""
        return text[:DIGEST_DIGITS] if self.is_terminal else text

    def namespace(self, digest: str) -> str:
        """A namespace as a table shows it."""
        return digest[:NAMESPACE_DIGITS]

    @contextmanager
    def table(self, columns: Sequence[Column], title: str = "") -> Iterator[Callable[..., None]]:
        """A table whose rows are given one by one, a value a column; nothing with ``--json``."""
        room = self.width if self.is_terminal else None
        table = _Table(columns, title, room, is_rich=self.is_terminal and self._has_rich)
        yield (_ignore if self.as_json else table.row)
        if not self.as_json:
            table.end()

    @contextmanager
    def array(self, head: Mapping[str, object], name: str) -> Iterator[JsonArray]:
        """A JSON object of ``head``, then an array of items given one by one, then its ``tail``."""
        items = JsonArray(head, name, is_shown=self.as_json)
        yield items
        items.end()

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Progress]:
        """A progress bar on the terminal of stderr; silent elsewhere."""
        if not self.shows_progress:
            yield _Silent()
            return
        with _rich().progress(what, total) as bar:
            yield bar

    def confirm(self, question: str, *, is_agreed: bool) -> bool:
        """Whether to go on: agreed beforehand, or asked on a terminal.

        Raises :class:`ConfigurationError` where nobody can be asked.
        """
        if is_agreed:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigurationError(f"{question} Nobody can be asked here; give --yes to agree")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def _rich() -> Any:
    return import_module("hicache_store.cli.rich_output")


def _ignore(*_: object) -> None:
    """What takes the rows of the form that is not wanted."""


class _Table:
    """Rows are held back until they fit or are too many; then widths are fixed and rows pass through."""

    def __init__(self, columns: Sequence[Column], title: str, room: int | None, *, is_rich: bool) -> None:
        self._columns = list(columns)
        self._title = title
        self._room = room
        self._is_rich = is_rich
        self._rows: list[tuple[str, ...]] = []
        self._widths: list[int] | None = None

    def row(self, *cells: Cell) -> None:
        """Add one row."""
        texts = tuple(printable(str(cell)) for cell in cells)
        if self._widths is not None:
            self._print(texts)
            return
        self._rows.append(texts)
        if len(self._rows) > LISTING_ROWS_MAX:
            self._flush_plain()

    def end(self) -> None:
        """Print what is held back; nothing when there was no row."""
        if self._widths is not None or not self._rows:
            return
        columns = [(column.title, column.is_number) for column in self._columns]
        if not (self._is_rich and _rich().print_table(columns, self._rows, self._title)):
            self._narrow()
            self._flush_plain()

    def _narrow(self) -> None:
        """Leave out spare columns, the last ones first, until a line fits the terminal."""
        while self._room is not None and sum(self._measured()) + 2 * (len(self._columns) - 1) > self._room:
            spare = [index for index, column in enumerate(self._columns) if column.is_spare]
            if not spare:
                return
            del self._columns[spare[-1]]
            self._rows = [row[: spare[-1]] + row[spare[-1] + 1 :] for row in self._rows]

    def _measured(self) -> list[int]:
        titles = [column.title for column in self._columns]
        return [max(map(len, texts)) for texts in zip(titles, *self._rows, strict=True)]

    def _flush_plain(self) -> None:
        titles = tuple(column.title for column in self._columns)
        self._widths = self._measured()
        if self._title:
            print(self._title)
        for texts in (titles, *self._rows):
            self._print(texts)
        self._rows = []

    def _print(self, texts: Sequence[str]) -> None:
        assert self._widths is not None
        aligned = (
            text.rjust(width) if column.is_number else text.ljust(width)
            for text, width, column in zip(texts, self._widths, self._columns, strict=True)
        )
        print("  ".join(aligned).rstrip())


class JsonArray:
    """An array in a JSON object, written as it comes: a store of any size needs no memory.

    ``tail`` holds the members that follow the array, known only at the end.
    """

    def __init__(self, head: Mapping[str, object], name: str, *, is_shown: bool) -> None:
        self.tail: dict[str, object] = {}
        self._is_shown = is_shown
        self._lead = f"{{{_members(head)}{',' if head else ''}\n  {json.dumps(name)}: ["

    def add(self, item: object) -> None:
        """Write one item."""
        if self._is_shown:
            print(f"{self._lead}\n    {json.dumps(item, ensure_ascii=False)}", end="")
            self._lead = ","

    def end(self) -> None:
        """Close the array and the object."""
        if self._is_shown:
            lead = "\n  " if self._lead == "," else self._lead
            print(f"{lead}]{',' if self.tail else ''}{_members(self.tail)}\n}}")


def _members(values: Mapping[str, object]) -> str:
    texts = (f"\n  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items())
    return ",".join(texts)


def printable(text: str) -> str:
    """``text`` without what could steer a terminal: keys and model outputs are other people's bytes."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def age_text(last_used_s: float, now_s: float | None = None) -> str:
    """``12s``, ``3.4m``, ``5.6h`` or ``7.8d`` since then."""
    age_s = _age(last_used_s, now_s)
    return _in_unit(age_s, *_age_unit(age_s))


def age_span_text(newest_s: float, oldest_s: float, now_s: float | None = None) -> str:
    """``1.9m to 2.2m`` since the two times, once where they read alike.

    Both in the unit of the longer, to be compared at a glance, unless the shorter would be nothing in it.
    """
    short_s, long_s = _age(newest_s, now_s), _age(oldest_s, now_s)
    unit = _age_unit(long_s)
    newest = _in_unit(short_s, *(unit if short_s >= unit[0] / 10 else _age_unit(short_s)))
    oldest = _in_unit(long_s, *unit)
    return newest if newest == oldest else f"{newest} to {oldest}"


def _age(then_s: float, now_s: float | None) -> float:
    return max(0.0, (time.time() if now_s is None else now_s) - then_s)


def _age_unit(age_s: float) -> tuple[float, str]:
    for limit, length, unit in ((120.0, 1.0, "s"), (7_200.0, 60.0, "m"), (172_800.0, 3_600.0, "h")):
        if age_s < limit:
            return length, unit
    return 86_400.0, "d"


def _in_unit(age_s: float, length: float, unit: str) -> str:
    return f"{age_s:.0f}s" if unit == "s" else f"{age_s / length:.1f}{unit}"


def count_text(number: int, singular: str, plural: str = "") -> str:
    """``1 object`` or ``1,234 objects``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
