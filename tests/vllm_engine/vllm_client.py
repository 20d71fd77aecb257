"""One real vLLM engine in processes of its own, asked through pipes, and ended with all that it started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_model import LONGEST

HERE = Path(__file__).parent
ANSWER_S = 300.0
"""How long a command may take. A start imports for 20 s on idle cores and for minutes on busy ones."""
STOP_S = 60.0


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as an engine is told of it."""

    name: str
    id: int
    path: str


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what else tells requests apart."""

    ids: Sequence[int]
    salt: str | None = None
    lora: Adapter | None = None


@dataclass(frozen=True)
class Answer:
    """One prompt's greedy tokens with their log probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margin: float
    """Least distance of a chosen token to the second best, in log probability."""
    cached: int
    """Tokens of the prompt that were not computed: from this engine's own cache or from outside it."""
    finish: str
    """``length``, or ``error`` where the engine gave up the request."""


@dataclass(frozen=True)
class Batch:
    """The answers to prompts that were asked at once, and what the engine counted meanwhile."""

    answers: tuple[Answer, ...]
    counted: Mapping[str, float]
    """What every counter of Prometheus grew by."""
    seconds: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.answers]

    @property
    def cached(self) -> list[int]:
        return [answer.cached for answer in self.answers]

    @property
    def margin(self) -> float:
        return min(answer.margin for answer in self.answers)

    @property
    def queried(self) -> int:
        """Tokens that the engine asked its connector for."""
        return int(self.counted.get("vllm:external_prefix_cache_queries", 0))

    @property
    def external(self) -> int:
        """Tokens that the engine's own counter says came through its connector."""
        return int(self.counted.get("vllm:external_prefix_cache_hits", 0))

    @property
    def local(self) -> int:
        """Tokens that were in the engine's own prefix cache."""
        return int(self.counted.get("vllm:prefix_cache_hits", 0))


@dataclass(frozen=True)
class Setup:
    """An engine as an operator starts it, and what a CPU needs."""

    model: Path
    tp: int = 1
    pp: int = 1
    block: int = 32
    dtype: str = "float32"
    blocks: int = 512
    connector: Mapping[str, Any] | None = None
    """The extra configuration of this package's connector; None is an engine without one."""
    transfer: Mapping[str, Any] | None = None
    """A whole KV transfer configuration, in place of ``connector``."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the engine, such as ``enable_lora`` or ``hf_overrides``."""

    def arguments(self) -> dict[str, Any]:
        """What is given to ``vllm.LLM``."""
        found: dict[str, Any] = {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "block_size": self.block,
            "dtype": self.dtype,
            "num_gpu_blocks_override": self.blocks,
            "max_model_len": LONGEST,
            "enforce_eager": True,
            "disable_log_stats": False,
        }
        if self.tp * self.pp > 1:
            found["distributed_executor_backend"] = "mp"
        if self.pp > 1:
            found["worker_cls"] = "vllm_place.StageWorker"
        transfer = self.transfer if self.connector is None else own_transfer(self.connector)
        if transfer is not None:
            found["kv_transfer_config"] = dict(transfer)
        return found | dict(self.more)


def own_transfer(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The KV transfer configuration that names this package's connector."""
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": "hicache_store.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


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
        self, prompts: Sequence[Prompt | Sequence[int]], new_tokens: int = 16, wait_s: float = ANSWER_S
    ) -> Batch:
        """All prompts at once, by greedy sampling."""
        given = {
            "prompts": [_asked(prompt) for prompt in prompts],
            "new_tokens": new_tokens,
        }
        result = self.ask("generate", given, wait_s)
        answers = tuple(
            Answer(tuple(one["tokens"]), tuple(one["logprobs"]), one["margin"], one["cached"], one["finish"])
            for one in result["answers"]
        )
        return Batch(answers, result["counted"], result["seconds"])

    def forget(self, *, external: bool = False) -> bool:
        """Empty the engine's own prefix cache, and with ``external`` call the connector's ``reset_cache``."""
        return bool(self.ask("forget", {"external": external}))

    def counters(self) -> dict[str, float]:
        """All counters that the engine's process has told Prometheus of, added up over their labels."""
        return dict(self.ask("counters"))

    def call(self, function: str, argument: Any = None, wait_s: float = ANSWER_S) -> Any:
        """The result of ``module:function(llm, argument)`` in the engine's process, by way of JSON."""
        return self.ask("call", {"function": function, "argument": argument}, wait_s)

    def log(self, last: int = 8000) -> str:
        """The end of what the engine's processes printed."""
        return self._log.read_text(errors="replace")[-last:]


def _asked(prompt: Prompt | Sequence[int]) -> dict[str, Any]:
    one = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
    return {"ids": list(one.ids), "salt": one.salt, "lora": None if one.lora is None else vars(one.lora)}


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": "1",
        # Ranks are spawned and import the worker class of `vllm_place`.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        **more,
    }


@contextmanager
def running(
    setup: Setup, log: Path, environment: Mapping[str, str] | None = None, wait_s: float = ANSWER_S
) -> Iterator[Engine]:
    """A fresh engine. It must end by itself when it is told to; on the way out no process of it is left."""
    commands_out, commands = os.pipe()
    answers, answers_in = os.pipe()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_place.py"), str(commands_out), str(answers_in)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(environment or {}),
            pass_fds=(commands_out, answers_in),
            start_new_session=True,
        )
    os.close(commands_out)
    os.close(answers_in)
    try:
        engine = Engine(commands, answers, log)
        engine.ask("start", setup.arguments(), wait_s)
        yield engine
        left = engine.ask("stop", wait_s=STOP_S)
        assert not [name for name in left if name.startswith("hicache")], left
        assert process.wait(STOP_S) == 0, engine.log()
    finally:
        os.close(commands)
        os.close(answers)
        # The session is the engine's own: its ranks are in it, and nothing else.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)
