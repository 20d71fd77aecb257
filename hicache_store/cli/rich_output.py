"""Tables and progress bars for terminals: the one module that imports rich, loaded when it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 100_000
"""Columns that no table needs: a measurement is cut to the width it is given."""


class RichProgress:
    """One bar with a text behind it."""

    def __init__(self, bar: Bar, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def advance(self, amount: int, text: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, advance=amount, text=text)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[RichProgress]:
    """A bar on stderr that goes away at the end; of unknown length without ``total``."""
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield RichProgress(bar, bar.add_task(what, total=total, text=""))


def print_table(columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]], title: str) -> bool:
    """A table on stdout; columns are (title, whether they stand on the right). Prints nothing and is false
    where the terminal is too narrow: names and numbers that are folded cannot be read or copied."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for text, is_number in columns:
        table.add_column(text, justify="right" if is_number else "left", no_wrap=True)
    for texts in rows:
        table.add_row(*(Text(text) for text in texts))
    console = Console()
    if table.__rich_measure__(console, console.options.update(max_width=_UNBOUNDED)).maximum > console.width:
        return False
    console.print(table)
    return True
