"""Real rank processes: equal answers for every topology, and faults that end in a named error."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_llama import greedy, prompt, solo

from hicache_store.demo.engine import Choice
from hicache_store.demo.group import Generation, RankError, RankGroup, _RankProcess
from hicache_store.demo.messages import (
    MESSAGE_BYTES_MAX,
    GroupSpec,
    MessageError,
    decode,
    encode,
    spec_of_message,
    spec_to_message,
)
from hicache_store.demo.weights import ModelSource, smollm2
from hicache_store.errors import DeadlineExceededError, HandleError, TopologyError
from hicache_store.layout.parallel import ParallelSpec

TIMEOUT_S = 120.0
TOKENS = prompt(100, seed=4)
COUNT = 16


def spec_of(model: ModelSource, parallel: ParallelSpec, **changes: float) -> GroupSpec:
    return GroupSpec(model, parallel, page_size=16, slots=40, chunk_tokens=48, **changes)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: Sequence[int]) -> None:
    stop = time.monotonic() + TIMEOUT_S
    while any(map(is_alive, pids)):
        assert time.monotonic() < stop, "ranks outlive their group"
        time.sleep(0.02)


def assert_agree(found: Generation, expected: Sequence[Choice]) -> None:
    """Equal tokens, by margins that the topologies' different rounding does not come near."""
    assert found.tokens == tuple(choice.token for choice in expected)
    margins = [choice.best - choice.second for choice in expected]
    noise = max(abs(a - b) for a, b in zip(found.margins, margins, strict=True))
    assert 3 * noise < min(margins)


@pytest.fixture(scope="module")
def alone(tiny: ModelSource) -> list[Choice]:
    engine = solo(tiny)
    engine.open(len(TOKENS) + COUNT)
    return greedy(engine, TOKENS, COUNT)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSpec(1, 1),
        ParallelSpec(2, 2),
        ParallelSpec(1, 3, stage_starts=(1, 4)),
        ParallelSpec(2, 1, head_map=((0, 1), (1, 4))),
    ],
    ids=["tp1", "tp2pp2", "pp3 uneven", "tp2 mapped"],
)
def test_every_topology_chooses_the_same_tokens(
    tiny: ModelSource, alone: list[Choice], parallel: ParallelSpec
) -> None:
    with RankGroup.start(spec_of(tiny, parallel)) as group:
        pids = list(group.pids.values())
        assert len(set(pids)) == parallel.tp_size * parallel.pp_size
        group.generate(prompt(70, seed=5), 2, TIMEOUT_S)
        found = group.generate(TOKENS, COUNT, TIMEOUT_S)
        group.reset(TIMEOUT_S)
    wait_until_gone(pids)
    assert_agree(found, alone)
    assert 0 < found.ttft_s < found.total_s


def test_replicas_of_a_head_share_its_queries(tiny: ModelSource) -> None:
    """More ranks than KV heads: two ranks hold the same keys and values and split the query heads."""
    assert tiny.config is not None
    model = replace(tiny, config=replace(tiny.config, num_kv_heads=2))
    engine = solo(model)
    engine.open(len(TOKENS) + COUNT)
    with RankGroup.start(spec_of(model, ParallelSpec(4, 1))) as group:
        assert_agree(group.generate(TOKENS, COUNT, TIMEOUT_S), greedy(engine, TOKENS, COUNT))


def test_a_topology_that_cannot_be_is_refused_before_any_process(tiny: ModelSource) -> None:
    with pytest.raises(TopologyError, match="4 KV heads cannot be split over tensor-parallel size 3"):
        RankGroup.start(spec_of(tiny, ParallelSpec(3)))
    with pytest.raises(TopologyError, match="at most 32"):
        RankGroup.start(spec_of(tiny, ParallelSpec(8, 5)))


def test_an_error_in_a_rank_names_the_rank_and_the_command(tiny: ModelSource) -> None:
    group = RankGroup.start(spec_of(tiny, ParallelSpec(2, 1)))
    with pytest.raises(
        RankError, match=r"rank tp[01]pp0 of tp2pp1, during generate: Config.*601 tokens do not fit"
    ):
        group.generate(prompt(600), 1, TIMEOUT_S)
    wait_until_gone(list(group.pids.values()))
    with pytest.raises(HandleError, match="closed"):
        group.reset(TIMEOUT_S)
    group.close()


def faulty(tiny: ModelSource, fault: Callable[[dict[str, int]], None], **changes: float) -> str:
    """Start TP2xPP2, begin a long generation, let ``fault`` do its work, and return the error."""
    timeout_s = changes.pop("timeout_s", TIMEOUT_S)
    group = RankGroup.start(spec_of(tiny, ParallelSpec(2, 2), **changes))
    timer = threading.Timer(0.3, fault, [group.pids])
    timer.start()
    with pytest.raises((RankError, DeadlineExceededError)) as raised:
        group.generate(TOKENS, 400, timeout_s)
    timer.join()
    wait_until_gone(list(group.pids.values()))
    assert not list(group._folder.parent.glob(group._folder.name))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_rank_that_dies_is_named_with_its_exit_code(tiny: ModelSource) -> None:
    """Its peers notice first, by their broken connections; the error still names the dead one."""
    error = faulty(tiny, lambda pids: os.kill(pids["tp1pp0"], signal.SIGKILL))
    assert error == "RankError: rank tp1pp0 of tp2pp2, during generate: the process is gone, exit code -9"


class ScriptedProcess:
    """A process that lives until it is killed and never says more than what its pipe holds."""

    exitcode = None

    def __init__(self) -> None:
        self.sentinel, self._open_end = os.pipe()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9
        os.close(self._open_end)

    def join(self, timeout: float) -> None:
        assert timeout > 0


def test_the_cause_is_named_before_its_echoes(tiny: ModelSource, tmp_path: Path) -> None:
    """A rank fails, and the peer that lost it speaks first."""
    ranks = []
    said = {"tp0pp0": ("FabricError", "peer gone"), "tp1pp0": ("ValueError", "the fault")}
    for label, (kind, text) in said.items():
        ours, theirs = multiprocessing.Pipe()
        theirs.send_bytes(encode({"kind": "failed", "type": kind, "text": text}))
        ranks.append(_RankProcess(label, ScriptedProcess(), ours))  # type: ignore[arg-type]
    group = RankGroup(spec_of(tiny, ParallelSpec(2)), ranks, tmp_path / "folder")
    with pytest.raises(RankError) as raised:
        group.reset(TIMEOUT_S)
    assert str(raised.value) == "rank tp1pp0 of tp2pp1, during reset: ValueError: the fault"
    assert not any(rank.process.is_alive() for rank in ranks)


def test_a_rank_that_hangs_is_told_by_its_peers(tiny: ModelSource) -> None:
    error = faulty(tiny, lambda pids: os.kill(pids["tp0pp1"], signal.SIGSTOP), collective_timeout_s=1.0)
    assert error.startswith("RankError: rank tp")
    assert "FabricError: " in error
    assert "tp0pp1" in error.rsplit("; no answer from rank ", 1)[1]


def test_ranks_that_all_hang_run_into_the_callers_deadline(tiny: ModelSource) -> None:
    def stop(pids: dict[str, int]) -> None:
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)

    error = faulty(tiny, stop, timeout_s=1.5)
    assert error == (
        "DeadlineExceededError: generate: no answer from rank tp0pp0, tp1pp0, tp0pp1, tp1pp1 "
        "within the deadline"
    )


def test_a_dead_rank_is_noticed_by_the_next_command(tiny: ModelSource) -> None:
    with RankGroup.start(spec_of(tiny, ParallelSpec(1, 2))) as group:
        os.kill(group.pids["tp0pp1"], signal.SIGKILL)
        wait_until_gone([group.pids["tp0pp1"]])
        with pytest.raises(RankError, match="tp0pp1 of tp1pp2, during reset: the process is gone"):
            group.reset(TIMEOUT_S)


def test_a_failing_start_leaves_nothing_behind(tiny: ModelSource, tmp_path: Path) -> None:
    """A model file that is gone when the ranks open it."""
    path = tmp_path / "model.gguf"
    source = smollm2().path
    assert source is not None
    path.symlink_to(source)
    model = ModelSource("gone", path=path)
    open_once = ModelSource.open

    def open_and_remove(self: ModelSource) -> object:
        found = open_once(self)
        path.unlink()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSource, "open", open_and_remove)
        with pytest.raises(RankError, match=r"during start: GgufError: .*cannot be mapped"):
            RankGroup.start(spec_of(model, ParallelSpec(1, 1)))


ORPHANS = """
import os
import re
from hicache_store.demo.group import RankGroup
from hicache_store.demo.messages import GroupSpec
from hicache_store.demo.weights import random8
from hicache_store.layout.parallel import ParallelSpec
group = RankGroup.start(GroupSpec(random8(), ParallelSpec(2, 1), slots=4))
print(*group.pids.values(), group._folder, flush=True)
os.kill(os.getpid(), 9)
"""


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """The script has no guard for its main module, which ranks must not need."""
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=False, timeout=TIMEOUT_S)
    *pids, folder = done.stdout.decode().split()
    assert done.returncode == -signal.SIGKILL
    assert len(pids) == 2
    wait_until_gone(list(map(int, pids)))
    assert os.stat(folder).st_mode & 0o777 == 0o700
    for path in Path(folder).iterdir():
        path.unlink()
    Path(folder).rmdir()


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, hicache_store.demo.group; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


def test_specs_survive_their_message(tiny: ModelSource) -> None:
    for spec in (
        spec_of(tiny, ParallelSpec(2, 2, stage_starts=(3,), head_map=((0, 1), (1, 4)))),
        spec_of(smollm2(), ParallelSpec(3)),
    ):
        assert spec_of_message(decode(encode(spec_to_message(spec)))) == spec


def test_messages_are_bounded_objects() -> None:
    with pytest.raises(MessageError, match="exceeds"):
        encode({"text": "x" * MESSAGE_BYTES_MAX})
    for raw in (b"", b"[1]", b"\xff", b"{"):
        with pytest.raises(MessageError):
            decode(raw)


def test_the_server_of_ranks_does_not_hear_ctrl_c(tiny: ModelSource) -> None:
    """A terminal sends it to every process; the server may be in the middle of loading torch."""
    with RankGroup.start(spec_of(tiny, ParallelSpec())) as group:
        (rank,) = group.pids.values()
        server = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        (blocked,) = re.findall(r"SigBlk:\s+([0-9a-f]+)", Path(f"/proc/{server}/status").read_text())
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1
