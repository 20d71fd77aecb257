"""The page as a drawing in characters: layers from left to right, heads from top to bottom.

Boxes are the writer's objects. The brackets on the right and below are the heads and layers of the
reader's ranks, so a rank takes what lies between its two brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hicache_store.cli.plan import Plan
from hicache_store.layout.box import Span

_LEFT: Final = 8
_RIGHT: Final = 16
_BAND_MIN_COLUMNS: Final = 4
_BANDS_MAX: Final = 32
_WIDTH_MAX: Final = 120

_UP, _DOWN, _LEFTWARDS, _RIGHTWARDS = 1, 2, 4, 8
_LINES: Final = {
    _UP: "│", _DOWN: "│", _UP | _DOWN: "│",
    _LEFTWARDS: "─", _RIGHTWARDS: "─", _LEFTWARDS | _RIGHTWARDS: "─",
    _DOWN | _RIGHTWARDS: "┌", _DOWN | _LEFTWARDS: "┐", _UP | _RIGHTWARDS: "└", _UP | _LEFTWARDS: "┘",
    _UP | _DOWN | _RIGHTWARDS: "├", _UP | _DOWN | _LEFTWARDS: "┤",
    _DOWN | _LEFTWARDS | _RIGHTWARDS: "┬", _UP | _LEFTWARDS | _RIGHTWARDS: "┴",
    _UP | _DOWN | _LEFTWARDS | _RIGHTWARDS: "┼",
}  # fmt: skip
_ASCII: Final = {"│": "|", "─": "-"}


class _Canvas:
    """Characters by place; lines that meet become one."""

    def __init__(self, width: int, height: int) -> None:
        self._texts = [[" "] * width for _ in range(height)]
        self._lines = [[0] * width for _ in range(height)]

    def horizontal(self, y: int, x0: int, x1: int) -> None:
        """A line from ``x0`` to ``x1``."""
        for x in range(x0, x1):
            self._lines[y][x] |= _RIGHTWARDS
            self._lines[y][x + 1] |= _LEFTWARDS

    def vertical(self, x: int, y0: int, y1: int) -> None:
        """A line from ``y0`` to ``y1``."""
        for y in range(y0, y1):
            self._lines[y][x] |= _DOWN
            self._lines[y + 1][x] |= _UP

    def stub(self, x: int, y: int, direction: int) -> None:
        """The half line that turns the end of a line into a bracket."""
        self._lines[y][x] |= direction

    def text(self, x: int, y: int, text: str, room: int) -> None:
        """``text`` cut to ``room`` characters."""
        row = self._texts[y]
        for offset, letter in enumerate(text[:room]):
            if x + offset < len(row):
                row[x + offset] = letter
                self._lines[y][x + offset] = 0

    def render(self, *, is_ascii: bool) -> str:
        """All lines, without trailing blanks."""
        rows = []
        for texts, lines in zip(self._texts, self._lines, strict=True):
            drawn = (_LINES[line] if line else text for text, line in zip(texts, lines, strict=True))
            row = "".join(drawn).rstrip()
            rows.append(
                "".join(_ASCII.get(c, "+" if c in _LINES.values() else c) for c in row) if is_ascii else row
            )
        return "\n".join(rows)


def draw_text(plan: Plan, *, width: int, is_ascii: bool) -> str:
    """The drawing, or a line that says why there is none."""
    boxes = [one.box for one in plan.objects] + [rank.box for rank in plan.ranks]
    heads = _bounds(box.heads for box in boxes)
    layers = _bounds(box.layers for box in boxes)
    room = min(width, _WIDTH_MAX) - _LEFT - _RIGHT
    if len(heads) - 1 > _BANDS_MAX or (len(layers) - 1) * _BAND_MIN_COLUMNS > room:
        return f"({len(heads) - 1} x {len(layers) - 1} bands are too many to draw here; use --svg FILE)"
    rows = {head: 1 + 2 * index for index, head in enumerate(heads)}
    columns = _spread(layers, room)
    canvas = _Canvas(_LEFT + room + _RIGHT, rows[heads[-1]] + 2)
    _draw_scales(canvas, rows, columns)
    for number, one in enumerate(plan.objects, 1):
        x0, x1 = columns[one.box.layers.start], columns[one.box.layers.stop]
        y0, y1 = rows[one.box.heads.start], rows[one.box.heads.stop]
        for y in (y0, y1):
            canvas.horizontal(y, x0, x1)
        for x in (x0, x1):
            canvas.vertical(x, y0, y1)
        label = f"{number} {one.writers[0].label}"
        space = x1 - x0 - 1
        canvas.text(
            x0 + 1 + (space > len(label)), y0 + 1, label if space >= len(label) else str(number), space
        )
    _draw_readers(canvas, plan, rows, columns)
    return canvas.render(is_ascii=is_ascii)


def _bounds(spans: Iterable[Span]) -> list[int]:
    return sorted({bound for span in spans for bound in (span.start, span.stop)})


def _spread(layers: Sequence[int], room: int) -> dict[int, int]:
    """A column for each bound: to scale, but never closer than a box needs."""
    first, last = layers[0], layers[-1]
    columns: list[int] = []
    for index, layer in enumerate(layers):
        left = columns[-1] + _BAND_MIN_COLUMNS if columns else 0
        right = room - _BAND_MIN_COLUMNS * (len(layers) - 1 - index)
        columns.append(min(max(left, round((layer - first) / (last - first) * room)), right))
    return {layer: _LEFT + column for layer, column in zip(layers, columns, strict=True)}


def _draw_scales(canvas: _Canvas, rows: Mapping[int, int], columns: Mapping[int, int]) -> None:
    canvas.text(0, 0, "layer", _LEFT)
    free_from = _LEFT
    for layer, x in columns.items():
        if x >= free_from:
            canvas.text(x, 0, str(layer), 6)
            free_from = x + len(str(layer)) + 1
    for head, y in rows.items():
        canvas.text(0, y, f"head {head}", _LEFT)


def _draw_readers(canvas: _Canvas, plan: Plan, rows: Mapping[int, int], columns: Mapping[int, int]) -> None:
    right = max(columns.values()) + 2
    bottom = max(rows.values()) + 1
    by_heads: dict[Span, list[int]] = {}
    by_layers: dict[Span, list[int]] = {}
    for one in plan.ranks:
        for spans, span, number in (
            (by_heads, one.box.heads, one.rank.tp),
            (by_layers, one.box.layers, one.rank.pp),
        ):
            numbers = spans.setdefault(span, [])
            if number not in numbers:
                numbers.append(number)
    for span, numbers in by_heads.items():
        y0, y1 = rows[span.start], rows[span.stop]
        canvas.vertical(right, y0, y1)
        for y in (y0, y1):
            canvas.stub(right, y, _LEFTWARDS)
        canvas.text(right + 2, (y0 + y1) // 2, _numbered("tp", numbers), _RIGHT - 4)
    for span, numbers in by_layers.items():
        x0, x1 = columns[span.start], columns[span.stop]
        canvas.horizontal(bottom, x0, x1)
        for x in (x0, x1):
            canvas.stub(x, bottom, _UP)
        label = f" {_numbered('pp', numbers)} "
        if len(label) < x1 - x0:
            canvas.text((x0 + x1 - len(label)) // 2 + 1, bottom, label, x1 - x0)
    canvas.text(0, bottom, "reader", _LEFT)


def _numbered(axis: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{axis}{numbers[0]}"
    return f"{axis}{numbers[0]}..{numbers[-1]}"
