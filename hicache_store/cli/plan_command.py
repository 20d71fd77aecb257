"""``hicache plan``: print, draw and write down one page between two topologies."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from hicache_store.cli.output import Column, Output, count_text, size_text
from hicache_store.cli.plan import Plan, document, plan_page, pool_of, topology
from hicache_store.cli.plan_svg import draw_svg
from hicache_store.cli.plan_text import draw_text
from hicache_store.errors import ConfigurationError
from hicache_store.layout.box import Span
from hicache_store.layout.parallel import Rank


def run(args: Namespace, out: Output) -> int:
    """Plan, then write the SVG if asked for, then print."""
    pool = pool_of(
        layers=args.layers,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        v_head_dim=args.v_head_dim,
        mla_latent=args.mla_latent,
        mla_rope=args.mla_rope,
        dtype=args.dtype,
        page_size=args.page_size,
    )
    plan = plan_page(
        pool,
        topology(args.writer, args.writer_stages),
        topology(args.reader, args.reader_stages),
        request_cost_bytes=args.request_cost,
        fixed=args.grid,
    )
    if args.svg is not None:
        _write_svg(Path(args.svg), draw_svg(plan))
    out.document(document(plan))
    _print(plan, out)
    return 0


def _write_svg(path: Path, drawing: str) -> None:
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the drawing cannot be written to {path}: {error.strerror}; give --svg a file in a directory "
            "that exists and can be written"
        ) from error


def _print(plan: Plan, out: Output) -> None:
    pool = plan.pool
    parts = " + ".join(f"{part.name} {part.width}" for part in pool.parts)
    out.line(
        f"page of {count_text(pool.page_size, 'token')}: {count_text(pool.num_heads, 'head')} x "
        f"{count_text(pool.num_layers, 'layer')} x ({parts}) {pool.dtype.name}, "
        f"{size_text(pool.payload_bytes(pool.page_box))}"
    )
    out.line(
        f"{plan.writer.label} writes {count_text(len(plan.objects), 'object')}, {plan.reader.label} reads"
    )
    out.line()
    if not out.as_json:
        out.line(draw_text(plan, width=out.width, is_ascii=not out.is_terminal))
        out.line()
    _print_objects(plan, out)
    out.line()
    _print_reads(plan, out)
    out.line()
    _print_ranks(plan, out)
    if plan.reader.cp_size > 1 or plan.writer.cp_size > 1:
        out.line("Each context-parallel rank moves the pages it owns, cut like this.")


def _print_objects(plan: Plan, out: Output) -> None:
    columns = [
        Column("#", is_number=True),
        Column("object"),
        Column("heads", is_spare=True),
        Column("layers", is_spare=True),
        Column("payload", is_number=True),
        Column("stored", is_number=True),
        Column("written by"),
    ]
    with out.table(columns, f"objects of {plan.writer.label}") as row:
        for number, one in enumerate(plan.objects, 1):
            row(
                number,
                one.name,
                span_text(one.box.heads),
                span_text(one.box.layers),
                f"{one.payload_bytes:,}",
                f"{one.object_bytes:,}",
                ranks_text(one.writers),
            )


def _print_reads(plan: Plan, out: Output) -> None:
    numbers = {one.name: number for number, one in enumerate(plan.objects, 1)}
    columns = [
        Column("rank"),
        Column("#", is_number=True),
        Column("object", is_spare=True),
        Column("offset", is_number=True),
        Column("wanted", is_number=True),
        Column("ranges", is_number=True, is_spare=True),
        Column("over-read", is_number=True),
        Column("trailer", is_number=True),
        Column("requests", is_number=True),
    ]
    with out.table(columns, f"reads of {plan.reader.label}") as row:
        for rank in plan.ranks:
            for one in rank.reads:
                read = one.read
                row(
                    rank.rank.label,
                    numbers[one.object.name],
                    one.object.name,
                    f"{read.first_byte:,}",
                    f"{read.wanted_bytes:,}",
                    len(one.ranges),
                    f"{read.over_read_bytes:,}",
                    f"{read.trailer_bytes:,}",
                    len(read.fetches),
                )


def _print_ranks(plan: Plan, out: Output) -> None:
    columns = [
        Column("rank"),
        Column("heads", is_spare=True),
        Column("layers", is_spare=True),
        Column("objects", is_number=True),
        Column("requests", is_number=True),
        Column("wanted", is_number=True),
        Column("fetched", is_number=True),
        Column("over-read", is_number=True, is_spare=True),
        Column("extra", is_number=True),
    ]
    with out.table(columns, f"a page of each rank of {plan.reader.label}") as row:
        for rank in plan.ranks:
            row(
                rank.rank.label,
                span_text(rank.box.heads),
                span_text(rank.box.layers),
                len(rank.reads),
                rank.requests,
                f"{rank.wanted_bytes:,}",
                f"{rank.fetched_bytes:,}",
                f"{rank.over_read_bytes:,}",
                f"{100 * (rank.fetched_bytes / rank.wanted_bytes - 1):.1f} %",
            )


def span_text(span: Span) -> str:
    """A half-open span with its last number: ``4-5``, ``7``."""
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def ranks_text(ranks: Iterable[Rank]) -> str:
    """The labels of ranks; of more than two, the first and the last."""
    labels = [rank.label for rank in ranks]
    return " or ".join(labels) if len(labels) <= 2 else f"one of {labels[0]} .. {labels[-1]}"
