"""One real engine in processes of its own, asked through pipes, and ended with all that it started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "engine_place.py"
PAGE = 32
ANSWER_S = 300.0
"""How long a command may take. A start imports for 20 s on idle cores and for a minute on busy ones."""
STOP_S = 30.0
IDLE_S = 30.0


@dataclass(frozen=True)
class Answer:
    """One prompt's greedy tokens, and where the KV of its prompt came from."""

    tokens: tuple[int, ...]
    device: int
    host: int
    storage: int
    backend: str | None


class Engine:
    """A running engine."""

    def __init__(self, commands: int, answers: int, log: Path) -> None:
        self._commands, self._answers, self._log = commands, answers, log
        self._read = b""

    def ask(self, command: str, given: Any = None, wait_s: float = ANSWER_S) -> Any:
        """The result of a command; AssertionError with the engine's log when there is none in time."""
        os.write(self._commands, json.dumps([command, given]).encode() + b"\n")
        end = time.monotonic() + wait_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{command}: no answer within {wait_s:g} s\n{self.log()}"
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, f"{command}: the engine ended\n{self.log()}"
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        assert "error" not in answer, f"{command}: {answer['error']}\n{self.log()}"
        return answer["result"]

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = 16, *, at_once: bool = False
    ) -> list[Answer]:
        """Each prompt after the one before it, or all at once, by greedy sampling."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        command = "generate_at_once" if at_once else "generate"
        return [_answer(one) for one in self.ask(command, {"input_ids": list(prompts), "sampling": sampling})]

    def forget(self) -> None:
        """Empty the caches on the device and the host; the storage stays."""
        self._when_idle("flush")

    def attach(self, configuration: dict[str, Any]) -> None:
        """Take a storage backend at run time."""
        self._when_idle("attach", configuration)

    def detach(self) -> None:
        """Give the storage backend back."""
        self._when_idle("detach")

    def _when_idle(self, command: str, given: Any = None) -> None:
        """A scheduler answers a request before it has put its batch away, and refuses until then."""
        end = time.monotonic() + IDLE_S
        while not (answer := self.ask(command, given))["success"]:
            assert time.monotonic() < end, f"{command}: {answer['message']}"
            time.sleep(0.1)

    def log(self) -> str:
        """The end of what the engine's processes printed."""
        return self._log.read_text(errors="replace")[-8000:]


def _answer(result: dict[str, Any]) -> Answer:
    meta = result["meta_info"]
    details = meta["cached_tokens_details"] or {}
    sources = [int(details.get(source, 0)) for source in ("device", "host", "storage")]
    assert sum(sources) == meta["cached_tokens"]
    return Answer(tuple(result["output_ids"]), *sources, backend=details.get("storage_backend"))


def options(model: Path, *, tp: int, pp: int, layout: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """What an operator gives on SGLang's command line, and what a CPU needs."""
    return {
        "model_path": str(model),
        "tp_size": tp,
        "pp_size": pp,
        "page_size": PAGE,
        "max_total_tokens": 2048,
        "context_length": 1024,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": layout,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(configuration),
        "enable_cache_report": True,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
    }


def _environment(ranks: int) -> dict[str, str]:
    cores = os.cpu_count() or 1
    return os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # torch.compile asks Triton what it can do, and a placeholder can do nothing.
        "TORCHDYNAMO_DISABLE": "1",
    }


@contextmanager
def running(given: dict[str, Any], log: Path) -> Iterator[Engine]:
    """A fresh engine with these server arguments. On the way out no process of it is left."""
    commands_out, commands = os.pipe()
    answers, answers_in = os.pipe()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(PLACE), str(commands_out), str(answers_in)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(given["tp_size"] * given["pp_size"]),
            pass_fds=(commands_out, answers_in),
            start_new_session=True,
        )
    os.close(commands_out)
    os.close(answers_in)
    try:
        engine = Engine(commands, answers, log)
        engine.ask("start", given)
        yield engine
        engine.ask("stop", wait_s=STOP_S)
    finally:
        os.close(commands)
        os.close(answers)
        # The session is the engine's own: its schedulers are in it, and nothing else.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)
