"""The arguments of every command; imports nothing that takes time."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_store import __version__
from hicache_store.config import MissingUnitError, parse_duration, parse_size
from hicache_store.limits import (
    DEFAULT_TIMEOUT_S,
    EXPLAIN_OBJECTS_MAX,
    KIB,
    MAINTENANCE_SWEEP_S,
    MIB,
    TIMEOUT_MAX_S,
)

T = TypeVar("T")
_Adds = Callable[..., argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``hicache``."""
    parser = argparse.ArgumentParser(
        prog="hicache",
        description="See, check and clean a store of KV-cache objects; plan topologies; watch it work.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hicache {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, text: str, *, store: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = commands.add_parser(
            name, help=text, description=_sentence(text), allow_abbrev=False
        )
        if store:
            sub.add_argument("url", metavar="URL", help="the store, such as file:///srv/kv")
            sub.add_argument(
                "--timeout",
                type=_typed(_more_than_no_time, "a time such as 500ms or 30s, more than 0 and at most 365d"),
                default=timeout_s,
                metavar="TIME",
                help=f"longest time of one batch of storage work (default {timeout_s:g}s)",
            )
        sub.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
        return sub

    for add_command in (_demo, _plan, _ls, _stat, _verify, _explain, _rm, _gc, _grids, _doctor, _bench):
        add_command(add)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of ``argv``; leaves by ``SystemExit`` for wrong usage, naming what was meant."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [word for word in vars(args) if word not in ("command", "store_ends")]
        options = [f"--{name.replace('_', '-')}" for name in known]
        close = difflib.get_close_matches(unknown[0], options, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; see hicache {args.command} --help"
        parser.error(f"{' '.join(unknown)} is not an argument of {args.command}{hint}")
    return args


def _demo(add: _Adds) -> None:
    sub = add(
        "demo", "write a real model's KV by one topology and read it by another, and compare", store=False
    )
    sub.add_argument("--model", choices=("smollm2", "random8"), default="smollm2")
    sub.add_argument("--writer", metavar="TOPOLOGY", help="ranks that write, such as tp3pp2")
    sub.add_argument("--reader", metavar="TOPOLOGY", help="ranks that read, such as tp1pp1")
    sub.add_argument("--prompt-tokens", type=_at_least(1), metavar="N", help="length of the prompt")
    sub.add_argument(
        "--store", metavar="URL", help="where to keep objects (default: a directory in the user's cache)"
    )
    sub.add_argument(
        "--control", action="store_true", help="alter the stored bytes, which must change the answer"
    )
    # For who starts a storage for one run alone: nothing is left to look at afterwards.
    sub.add_argument("--store-ends", action="store_true", help=argparse.SUPPRESS)


def _plan(add: _Adds) -> None:
    sub = add("plan", "show the objects of one writer's page and what each reader rank takes", store=False)
    model = sub.add_argument_group("the model")
    model.add_argument("--layers", type=_at_least(1), required=True, metavar="N")
    model.add_argument("--kv-heads", type=_at_least(1), metavar="N", help="KV heads of the whole model")
    model.add_argument("--head-dim", type=_at_least(1), metavar="N", help="width of K (and of V)")
    model.add_argument("--v-head-dim", type=_at_least(1), metavar="N", help="width of V where it differs")
    model.add_argument("--mla-latent", type=_at_least(1), metavar="N", help="MLA: width of the latent")
    model.add_argument("--mla-rope", type=_at_least(1), metavar="N", help="MLA: width of the rope part")
    model.add_argument("--dtype", default="bfloat16", metavar="NAME", help="KV dtype (default bfloat16)")
    model.add_argument("--page-size", type=_at_least(1), default=64, metavar="N", help="tokens (default 64)")
    ranks = sub.add_argument_group("the ranks")
    ranks.add_argument("--writer", required=True, metavar="TOPOLOGY", help="such as tp4pp2")
    ranks.add_argument("--reader", required=True, metavar="TOPOLOGY", help="such as tp2pp1")
    for side in ("writer", "reader"):
        ranks.add_argument(
            f"--{side}-stages",
            type=_typed(_starts, "first layers such as 16,32"),
            metavar="N,N",
            help=f"first layer of each later stage of the {side}, where stages are uneven",
        )
    ranks.add_argument(
        "--grid",
        type=_typed(_grid, "heads and layers an object, such as 2x30"),
        metavar="HxL",
        help="a fixed grid: heads and layers an object (default: the writer's own shards)",
    )
    sub.add_argument(
        "--request-cost",
        type=_typed(parse_size, "a size such as 64KiB"),
        default=64 * KIB,
        metavar="SIZE",
        help="bytes that cost as much as one more request (default 64KiB, the cost of files)",
    )
    sub.add_argument("--svg", metavar="FILE", help="draw it into FILE as well")


def _ls(add: _Adds) -> None:
    sub = add("ls", "list objects, or pages")
    _namespace(sub, "only namespaces that start like this")
    sub.add_argument("--pages", action="store_true", help="one row a page, in the order of hashes")


def _stat(add: _Adds) -> None:
    add("stat", "show namespaces, their manifests, grids and pools, with counts and ages")


def _verify(add: _Adds) -> None:
    sub = add("verify", "read every object and check every byte; exit code 1 when anything is wrong")
    _namespace(sub, "only namespaces that start like this")
    sub.add_argument(
        "--repair",
        action="store_true",
        help="remove what is proven bad, if it is still there; restore it where another layer has it sound",
    )


def _explain(add: _Adds) -> None:
    sub = add("explain", "tell why a prefix misses: its pages under every namespace, and how these differ")
    sub.add_argument(
        "--page",
        nargs="+",
        metavar="HASH",
        help="pages, by at least 16 digits of their hashes, in the order of the chain (default: from stdin)",
    )
    sub.add_argument(
        "--like",
        metavar="MANIFEST",
        help="the namespace that misses: the start of its digest, or a JSON file that holds its manifest",
    )
    sub.add_argument(
        "--limit",
        type=_at_least(1),
        default=EXPLAIN_OBJECTS_MAX,
        metavar="N",
        help=f"objects to walk over at most (default {EXPLAIN_OBJECTS_MAX:,})",
    )


def _rm(add: _Adds) -> None:
    sub = add("rm", "remove objects; conditions given together must all hold")
    _namespace(sub, "this namespace; alone, its manifest and grid markers go too")
    sub.add_argument("--page", metavar="HASH", help="this page, by at least 16 digits of its hash")
    sub.add_argument(
        "--older-than",
        type=_typed(parse_duration, "a time such as 12h or 7d"),
        metavar="TIME",
        help="objects not used for this long, by this machine's clock",
    )
    sub.add_argument("--dry-run", action="store_true", help="only say what would go")
    _yes(sub)


def _gc(add: _Adds) -> None:
    sub = add("gc", "expire, evict and clean up as the options of the URL say", timeout_s=MAINTENANCE_SWEEP_S)
    sub.add_argument(
        "--lifecycle",
        type=_typed(_days, "whole days such as 30d, or off"),
        metavar="TIME",
        help="have an S3 server remove objects this long after they were written; off: no longer",
    )


def _grids(add: _Adds) -> None:
    sub = add("grids", "list the announced chunk grids, or retire one")
    _namespace(sub, "only namespaces that start like this")
    sub.add_argument("--retire", type=_at_least(0), metavar="SLOT", help="free this marker slot (asks first)")
    _yes(sub)


def _doctor(add: _Adds) -> None:
    add("doctor", "try everything a store needs of this storage; exit code 1 when something is missing")


def _bench(add: _Adds) -> None:
    sub = add("bench", "measure this storage with pages of its own, which are removed again")
    sub.add_argument(
        "--pages", type=_at_least(1), default=128, metavar="N", help="pages a batch (default 128)"
    )
    sub.add_argument(
        "--size",
        type=_typed(_page_bytes, "a size such as 256KiB"),
        default=MIB,
        metavar="SIZE",
        help="bytes of a page's object (default 1MiB)",
    )
    sub.add_argument("--rounds", type=_at_least(1), default=5, metavar="N", help="batches (default 5)")


def _namespace(sub: argparse.ArgumentParser, text: str) -> None:
    sub.add_argument("--namespace", type=_typed(_hex, "hex digits of a digest"), metavar="DIGEST", help=text)


def _yes(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--yes", action="store_true", help="do not ask")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _typed(read: Callable[[str], T], accepts: str) -> Callable[[str], T]:
    def convert(text: str) -> T:
        try:
            return read(text)
        except MissingUnitError as missing:
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted; {missing}") from None
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give {accepts}") from None

    return convert


def _at_least(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError(text)
        return value

    return _typed(read, f"a whole number of at least {minimum}")


def _more_than_no_time(text: str) -> float:
    seconds = parse_duration(text)
    if not 0.0 < seconds <= TIMEOUT_MAX_S:
        raise ValueError(text)
    return seconds


def _page_bytes(text: str) -> int:
    value = parse_size(text)
    if value < 1:
        raise ValueError(text)
    return value


def _days(text: str) -> int:
    """Whole days, 0 for ``off``."""
    if text == "off":
        return 0
    days, rest = divmod(parse_duration(text), 86_400.0)
    if rest or days < 1:
        raise ValueError(text)
    return int(days)


def _starts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _grid(text: str) -> tuple[int, int]:
    heads, layers = text.lower().split("x")
    return int(heads), int(layers)


def _hex(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{1,64}", text.lower()):
        raise ValueError(text)
    return text.lower()
