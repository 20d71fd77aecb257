"""The page as one self-contained SVG: layers along x, heads along y."""

from __future__ import annotations

from collections.abc import Iterator
from colorsys import hls_to_rgb
from html import escape
from typing import Final

from hicache_store.cli.output import count_text, size_text
from hicache_store.cli.plan import Plan, PlannedObject, RankReads
from hicache_store.layout.parallel import Rank

_WIDTH: Final = 960
_LEFT: Final = 72
_TOP: Final = 96
_PAGE_WIDTH: Final = 620
_HEAD_HEIGHT_MAX: Final = 56
_PAGE_HEIGHT_MAX: Final = 640
_LEGEND_X: Final = _LEFT + _PAGE_WIDTH + 40
_LEGEND_ROW: Final = 20
_TEXT_MIN: Final = (64, 13)
"""Smallest box, in pixels, that gets a label."""
_GOLDEN_ANGLE: Final = 137.508
"""Degrees of hue from one rank to the next: neighbours differ strongly, however many there are."""


def draw_svg(plan: Plan) -> str:
    """The whole document: objects coloured by the rank that writes them, reader ranks outlined."""
    scale = _Scale(plan)
    writers = list(dict.fromkeys(one.writers[0] for one in plan.objects))
    fills = {rank: _colour(index, lightness=0.82) for index, rank in enumerate(writers)}
    strokes = {one.rank: _colour(index, lightness=0.32) for index, one in enumerate(plan.ranks)}
    body = [
        *_titles(plan),
        *_scales(plan, scale),
        *(_object(number, one, fills, scale) for number, one in enumerate(plan.objects, 1)),
        *(_outline(index, one, strokes, scale) for index, one in enumerate(plan.ranks)),
        *_legend(plan, fills, strokes),
    ]
    rows = len(writers) + len(plan.ranks) + 4
    height = max(_TOP + scale.height + 48, _TOP + rows * _LEGEND_ROW + 24)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
            f'width="{_WIDTH}" height="{height:.0f}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


class _Scale:
    """From heads and layers to pixels."""

    def __init__(self, plan: Plan) -> None:
        self._layer = _PAGE_WIDTH / plan.pool.num_layers
        self._head = min(_HEAD_HEIGHT_MAX, _PAGE_HEIGHT_MAX / plan.pool.num_heads)
        if plan.pool.num_heads == 1:
            self._head = 2.0 * _HEAD_HEIGHT_MAX
        self.height = self._head * plan.pool.num_heads

    def x(self, layer: int) -> float:
        return _LEFT + layer * self._layer

    def y(self, head: int) -> float:
        return _TOP + head * self._head


def _colour(index: int, *, lightness: float) -> str:
    channels = hls_to_rgb(index * _GOLDEN_ANGLE % 360 / 360, lightness, 0.7)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'


def _rect(x0: float, y0: float, x1: float, y1: float, style: str, title: str) -> str:
    return (
        f'<rect x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" {style}>'
        f"<title>{escape(title)}</title></rect>"
    )


def _titles(plan: Plan) -> Iterator[str]:
    pool = plan.pool
    yield _text(
        _LEFT,
        28,
        f"One page: written by {plan.writer.label}, read by {plan.reader.label}",
        ' font-size="18" font-weight="bold"',
    )
    parts = " + ".join(f"{part.name} {part.width}" for part in pool.parts)
    yield _text(
        _LEFT,
        50,
        f"{pool.num_heads} heads x {pool.num_layers} layers x {pool.page_size} tokens x ({parts}) "
        f"{pool.dtype.name}, {size_text(pool.payload_bytes(pool.page_box))}",
        ' fill="#444"',
    )


def _scales(plan: Plan, scale: _Scale) -> Iterator[str]:
    boxes = [one.box for one in plan.objects] + [one.box for one in plan.ranks]
    last = -1e9
    for layer in sorted({bound for box in boxes for bound in (box.layers.start, box.layers.stop)}):
        if scale.x(layer) - last >= 24:
            last = scale.x(layer)
            yield _text(last, _TOP - 8, str(layer), ' text-anchor="middle" fill="#444"')
    yield _text(_LEFT, _TOP - 24, "layers", ' fill="#444"')
    last = -1e9
    for head in sorted({bound for box in boxes for bound in (box.heads.start, box.heads.stop)}):
        if scale.y(head) - last >= 13:
            last = scale.y(head)
            yield _text(_LEFT - 8, last + 4, str(head), ' text-anchor="end" fill="#444"')
    yield _text(8, _TOP + 4, "heads", ' fill="#444"')


def _object(number: int, one: PlannedObject, fills: dict[Rank, str], scale: _Scale) -> str:
    box = one.box
    x0, x1 = scale.x(box.layers.start), scale.x(box.layers.stop)
    y0, y1 = scale.y(box.heads.start), scale.y(box.heads.stop)
    style = f'fill="{fills[one.writers[0]]}" stroke="#333" stroke-width="1"'
    title = f"{number}: {one.name}, {one.payload_bytes:,} bytes, written by {one.writers[0].label}"
    drawn = _rect(x0, y0, x1, y1, style, title)
    if x1 - x0 >= _TEXT_MIN[0] and y1 - y0 >= _TEXT_MIN[1]:
        label = f"{number}: {one.writers[0].label}"
        drawn += _text((x0 + x1) / 2, (y0 + y1) / 2 + 4, label, ' text-anchor="middle"')
    return drawn


def _outline(index: int, one: RankReads, strokes: dict[Rank, str], scale: _Scale) -> str:
    # Replicas hold equal boxes: a small step inwards keeps the first few apart.
    inset = 3.0 + 3.0 * (index % 3)
    box = one.box
    title = f"{one.rank.label} reads {len(one.reads)} objects, {one.fetched_bytes:,} bytes"
    style = f'fill="none" stroke="{strokes[one.rank]}" stroke-width="2.5" stroke-dasharray="9 4"'
    x0, x1 = scale.x(box.layers.start) + inset, scale.x(box.layers.stop) - inset
    y0, y1 = scale.y(box.heads.start) + inset, scale.y(box.heads.stop) - inset
    return _rect(x0, y0, max(x1, x0 + 1), max(y1, y0 + 1), style, title)


def _legend(plan: Plan, fills: dict[Rank, str], strokes: dict[Rank, str]) -> Iterator[str]:
    y = float(_TOP)
    yield _text(_LEGEND_X, y, f"writes ({plan.writer.label})", ' font-weight="bold"')
    for rank, fill in fills.items():
        y += _LEGEND_ROW
        count = sum(rank == one.writers[0] for one in plan.objects)
        yield _rect(_LEGEND_X, y - 11, _LEGEND_X + 18, y + 2, f'fill="{fill}" stroke="#333"', rank.label)
        yield _text(_LEGEND_X + 26, y, f"{rank.label}: {count_text(count, 'object')}")
    y += 2 * _LEGEND_ROW
    yield _text(_LEGEND_X, y, f"reads ({plan.reader.label})", ' font-weight="bold"')
    for one in plan.ranks:
        y += _LEGEND_ROW
        style = f'fill="none" stroke="{strokes[one.rank]}" stroke-width="2.5" stroke-dasharray="9 4"'
        yield _rect(_LEGEND_X, y - 11, _LEGEND_X + 18, y + 2, style, one.rank.label)
        more = one.fetched_bytes / one.wanted_bytes - 1
        yield _text(
            _LEGEND_X + 26,
            y,
            f"{one.rank.label}: {count_text(len(one.reads), 'object')}, +{100 * more:.1f} %",
        )
