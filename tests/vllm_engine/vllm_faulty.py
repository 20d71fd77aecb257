"""A store that fails on command, as a third party's connector: found by its entry point in the engine.

Also what tests do inside an engine's process, by ``Engine.call``.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from hicache_store.config import StoreUrl
from hicache_store.connectors import local
from hicache_store.testing.counting import CountingConnector
from hicache_store.testing.fault_plans import Attempt, Fail, Fault, FlipBit, Hold, TimeOut, Vanish, no_faults
from hicache_store.testing.faults import FaultyConnector

ENTRY_POINT = "[hicache_store.connectors]\nfaulty = vllm_faulty:connect\n"

_OPEN: list[FaultyConnector] = []
_COUNTING: list[CountingConnector] = []
_RELEASE = threading.Event()


def install(folder: Path) -> str:
    """Make ``faulty:`` a scheme for whoever has the result, a folder, on its module path."""
    info = folder / "hicache_faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    return str(folder)


def connect(url: StoreUrl) -> FaultyConnector:
    """Local files that fail as :func:`fail` last said."""
    counting = CountingConnector(local.connect(StoreUrl("file", url.location, url.query)))
    lost = Path(f"{url.location}.lost")

    def plan(attempt: Attempt) -> Fault | None:
        """Pages that a file beside the store names are lost after their look-up, in every process."""
        if attempt.operation != "read" or not lost.exists():
            return None
        return Vanish() if any(page in attempt.key for page in lost.read_text().split()) else None

    connector = FaultyConnector(counting, plan)
    _OPEN.append(connector)
    _COUNTING.append(counting)
    return connector


def fail(_llm: Any, how: str) -> None:
    """From now on: ``none``, ``flip``, ``vanish``, ``fail``, ``late``, ``hang`` (reads, deadlines ignored),
    ``lookups`` (the same for look-ups), ``writes``, or ``raise``."""
    _RELEASE.set()
    hold = threading.Event()
    globals()["_RELEASE"] = hold
    faults: dict[str, tuple[str, Fault]] = {
        "flip": ("read", FlipBit(12_345)),
        "vanish": ("read", Vanish()),
        "fail": ("read", Fail()),
        "late": ("read", TimeOut()),
        "hang": ("read", Hold(hold, ignores_deadline=True)),
        "lookups": ("sizes", Hold(hold, ignores_deadline=True)),
        "writes": ("write", Fail()),
    }

    def plan(attempt: Attempt) -> Fault | None:
        if how == "raise" and attempt.operation in ("read", "write"):
            raise RuntimeError("a connector that breaks its promise")
        operation, fault = faults.get(how, ("", None))
        return fault if attempt.operation == operation else None

    for connector in _OPEN:
        connector.plan = no_faults if how == "none" else plan


def reads(_llm: Any, _argument: Any) -> int:
    """Reads of page objects since the last call, by every handle."""
    total = 0
    for counting in _COUNTING:
        total += sum("/meta/" not in f"/{record.key}" for record in counting.reads)
        counting.reset()
    return total


def groups(llm: Any, _argument: Any) -> list[str]:
    """The kinds of the engine's KV cache groups."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return sorted(type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups)


def held(llm: Any, _argument: Any) -> dict[str, int]:
    """What the adapter and the engine still hold; all of it is nothing when no request runs."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    connector, worker = scheduler.connector, get_kv_transfer_group()
    half, rank = connector._scheduler, worker._worker
    staging = rank._staging
    end = time.monotonic() + 30
    while len(staging.outbound._free) + len(staging.inbound._free) < staging.layout.slots:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests": len(scheduler.requests),
        "tracked": len(half._requests),
        "loading": len(half._loading),
        "orders": len(half._orders),
        "loads": len(rank._loads),
        "slots": staging.layout.slots - len(staging.inbound._free) - len(staging.outbound._free),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def crowd(llm: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Add all prompts, abort every third after some steps, run the others to their end."""
    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=given["new_tokens"], ignore_eos=True, detokenize=False
    )
    names = [f"crowd-{given['name']}-{index}" for index in range(len(given["prompts"]))]
    for name, ids in zip(names, given["prompts"], strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    aborted = names[::3]
    tokens: dict[str, list[int]] = {}
    steps, preempted = 0, 0
    scheduler = engine.engine_core.engine_core.scheduler
    seen: set[str] = set()
    while engine.has_unfinished_requests():
        if steps in (given["abort_at"], 3 * given["abort_at"]):
            engine.abort_request(aborted)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        for request in list(scheduler.requests.values()):
            if request.num_preemptions and request.request_id not in seen:
                seen.add(request.request_id)
                preempted += 1
        steps += 1
        assert steps < 20_000, "the engine does not come to an end"
    kept = [index for index in range(len(names)) if index % 3]
    return {"tokens": [tokens[names[index]] for index in kept], "kept": kept, "preempted": preempted}
