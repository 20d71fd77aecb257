"""The parent's handle on a group of rank processes.

Ranks are forked from one server process that has torch loaded and does nothing else: forking this process
would copy locks that its other threads hold, and starting each rank from nothing takes seconds. Every
wait has a deadline and a name; when a rank fails, dies or is late, all ranks are ended and the error
names it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final, Self

from hicache_store.clock import Deadline
from hicache_store.demo.cut import cut_of
from hicache_store.demo.messages import MESSAGE_BYTES_MAX, GroupSpec, Message, decode, encode, spec_to_message
from hicache_store.demo.weights import ModelConfig
from hicache_store.errors import DeadlineExceededError, HandleError, HicacheError, TopologyError
from hicache_store.layout.parallel import ParallelSpec, Rank
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.store import PageState

RANKS_MAX: Final = 32
"""Each rank is a process with its own weights and connections; more would only swap."""
START_S: Final = 300.0
"""Loading torch, forking and joining takes 10 s for 8 ranks on two idle cores."""
LEAVE_S: Final = 10.0
"""Time for ranks to leave by themselves before they are ended."""
GRACE_S: Final = 1.0
"""After a first failure, how long to listen for the one that caused it: peers of a dead rank notice
its closed connections and may speak before its exit is seen."""

_PRELOAD: Final = "hicache_store.demo.ranks"


class RankError(HicacheError, RuntimeError):
    """A rank failed or died; the message names it and what it was doing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a group answered to one prompt. Times are of the parent, from submit."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    """Distance between the best and the second best logit of each token."""
    logits: tuple[float, ...]
    """The logit of each token."""
    ttft_s: float
    total_s: float
    restored_tokens: int = 0
    restore_s: float = 0.0
    """The slowest rank's time for loading and verifying."""
    read_objects: int = 0
    read_bytes: int = 0
    end: str = ""
    """Why the rank that loaded least stopped; empty when it loaded everything."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What the ranks of a group did with the pages of one prompt, all ranks together."""

    objects: int
    written_bytes: int
    states: tuple[tuple[PageState, ...], ...]
    """What each rank did with each page."""
    detail: str

    @property
    def pages_present(self) -> int:
        """Pages that every rank elected to write found stored already."""
        by_page = zip(*self.states, strict=True)
        return sum(set(page) - {PageState.NOT_ELECTED} == {PageState.PRESENT} for page in by_page)


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How ranks attach to a store."""

    url: str
    weights: WeightsIdentity
    tenant: str
    verify: bool = True
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _Failure:
    label: str
    text: str
    is_cause: bool
    """Not merely the echo of a peer's failure."""


@dataclass(frozen=True, slots=True)
class _RankProcess:
    label: str
    process: BaseProcess
    connection: Connection

    def read(self) -> Message | _Failure:
        """The message that is ready, or why there will be none."""
        try:
            if self.connection.poll():
                message = decode(self.connection.recv_bytes(MESSAGE_BYTES_MAX))
                if message["kind"] != "failed":
                    return message
                is_cause = message["type"] != "FabricError"
                return _Failure(self.label, f"{message['type']}: {message['text']}", is_cause)
        except (EOFError, OSError):
            pass
        self.process.join(GRACE_S)
        return _Failure(self.label, f"the process is gone, exit code {self.process.exitcode}", True)


def checked_ranks(config: ModelConfig, parallel: ParallelSpec, page_size: int) -> list[Rank]:
    """The ranks of ``parallel``; :class:`TopologyError` when there are too many or the model cannot be
    divided so."""
    count = parallel.tp_size * parallel.pp_size * parallel.cp_size
    if count > RANKS_MAX:
        raise TopologyError(f"{parallel.label} needs {count} processes; use at most {RANKS_MAX} ranks")
    ranks = list(parallel.ranks())
    for rank in ranks:
        cut_of(config, config.kv().pool(page_size), parallel, rank)
    return ranks


class RankGroup:
    """Running ranks. Use as a context manager; not thread-safe."""

    def __init__(self, spec: GroupSpec, ranks: Sequence[_RankProcess], folder: Path) -> None:
        self.spec = spec
        self._ranks = list(ranks)
        self._folder = folder
        self._is_open = True

    @classmethod
    def start(cls, spec: GroupSpec, timeout_s: float = START_S) -> RankGroup:
        """Start every rank and wait until all have loaded their part.

        Raises :class:`TopologyError` before anything is started when the model cannot be divided so.
        """
        config, _ = spec.model.open()
        ranks = checked_ranks(config, spec.parallel, spec.page_size)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOAD])
        _start_server()
        folder = Path(tempfile.mkdtemp(prefix="hicache-demo-"))
        group = cls(spec, [], folder)
        try:
            for rank in ranks:
                ours, theirs = context.Pipe()
                setup = {
                    "spec": spec_to_message(spec),
                    "rank": [rank.tp, rank.pp],
                    "rendezvous": str(folder / "rendezvous"),
                }
                process = context.Process(target=_run_rank, args=(theirs, encode(setup)), daemon=True)
                with _no_main_module():
                    process.start()
                theirs.close()
                group._ranks.append(_RankProcess(rank.label, process, ours))
            group._collect("start", Deadline.after(timeout_s))
        except BaseException:
            group._end()
            raise
        return group

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each rank by its label."""
        return {rank.label: rank.process.pid or 0 for rank in self._ranks}

    def attach(self, access: StoreAccess, timeout_s: float) -> None:
        """Attach every rank to a store, in place of the one it had."""
        message = {"op": "attach", **asdict(access)}
        self._call(message, timeout_s)

    def backup(self, tokens: Sequence[int], timeout_s: float) -> Backup:
        """Store the full pages of ``tokens``, the prompt generated from last."""
        replies = self._call({"op": "backup", "tokens": list(tokens)}, timeout_s)
        return Backup(
            objects=sum(reply["objects"] for reply in replies),
            written_bytes=sum(reply["bytes"] for reply in replies),
            states=tuple(tuple(PageState(state) for state in reply["states"]) for reply in replies),
            detail=next((reply["detail"] for reply in replies if reply["detail"]), ""),
        )

    def generate(
        self, tokens: Sequence[int], count: int, timeout_s: float, *, restore: bool = False
    ) -> Generation:
        """Prefill ``tokens``, what is stored of them loaded first if asked, and choose ``count`` greedily."""
        begun = time.monotonic()
        first: list[float] = []
        replies = self._call(
            {"op": "generate", "tokens": list(tokens), "count": count, "restore": restore},
            timeout_s,
            lambda _: first.append(time.monotonic() - begun),
        )
        total = time.monotonic() - begun
        choices = replies[-1]["choices"]
        restored = [reply["restored"] for reply in replies if reply["restored"]]
        return Generation(
            tokens=tuple(token for token, _, _ in choices),
            margins=tuple(best - second for _, best, second in choices),
            logits=tuple(best for _, best, _ in choices),
            ttft_s=first[0],
            total_s=total,
            restored_tokens=replies[-1]["pages"] * self.spec.page_size,
            restore_s=max((part["seconds"] for part in restored), default=0.0),
            read_objects=sum(part["objects"] for part in restored),
            read_bytes=sum(part["bytes"] for part in restored),
            end=min(restored, key=lambda part: part["pages"])["end"] if restored else "",
        )

    def reset(self, timeout_s: float) -> None:
        """Drop the sequence; all slots are free afterwards."""
        self._call({"op": "reset"}, timeout_s)

    def close(self) -> None:
        """Ask the ranks to leave, end those that do not, and remove what the group left; idempotent."""
        if not self._is_open:
            return
        deadline = Deadline.after(LEAVE_S)
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(encode({"op": "leave"}))
        for rank in self._ranks:
            rank.process.join(deadline.remaining_s())
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, message: Message, timeout_s: float, on_first: Callable[[Message], None] | None = None
    ) -> list[Message]:
        """Send ``message`` to all ranks; their answers, by rank."""
        if not self._is_open:
            raise HandleError("the group of ranks is closed")
        deadline = Deadline.after(timeout_s)
        raw = encode(message)
        for rank in self._ranks:
            # A dead rank is reported by the wait, which knows its exit code.
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(raw)
        try:
            return self._collect(message["op"], deadline, on_first)
        except BaseException:
            self._end()
            raise

    def _collect(
        self, what: str, deadline: Deadline, on_first: Callable[[Message], None] | None = None
    ) -> list[Message]:
        answers: dict[str, Message] = {}
        failures: list[_Failure] = []
        while len(answers) + len(failures) < len(self._ranks):
            failed = {failure.label for failure in failures}
            waiting = [r for r in self._ranks if r.label not in answers and r.label not in failed]
            handles = {r.connection: r for r in waiting} | {r.process.sentinel: r for r in waiting}
            ready = wait(list(handles), deadline.remaining_s())
            if not ready:
                break
            for rank in {id(handles[h]): handles[h] for h in ready}.values():  # type: ignore[index]
                message = rank.read()
                if isinstance(message, _Failure):
                    failures.append(message)
                    deadline = min(deadline, Deadline.after(GRACE_S), key=lambda d: d.at)
                elif message["kind"] == "done":
                    answers[rank.label] = message
                elif on_first is not None:
                    on_first(message)
        told = answers.keys() | {failure.label for failure in failures}
        late = ", ".join(rank.label for rank in self._ranks if rank.label not in told)
        if failures:
            worst = next((failure for failure in failures if failure.is_cause), failures[0])
            silent = f"; no answer from rank {late}" if late else ""
            topology = self.spec.parallel.label
            raise RankError(f"rank {worst.label} of {topology}, during {what}: {worst.text}{silent}")
        if late:
            raise DeadlineExceededError(f"{what}: no answer from rank {late} within the deadline")
        return [answers[rank.label] for rank in self._ranks]

    def _end(self) -> None:
        self._is_open = False
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join(LEAVE_S)
            rank.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _start_server() -> None:
    """Start the server process deaf to Ctrl-C, which a terminal sends to all: this process decides, and the
    server would die of it in the middle of an import, with a stack trace."""
    resource_tracker.ensure_running()  # whose own start would lift the mask again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep ranks from importing the caller's main module, which they do not need: it may be a script
    without a guard, or no file at all."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run_rank(connection: Connection, setup: bytes) -> None:
    # Imported here, in the rank: the parent needs neither torch nor the engine.
    from hicache_store.demo.ranks import rank_main  # noqa: PLC0415

    rank_main(connection, setup)
