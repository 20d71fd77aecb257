"""Runs a real vLLM engine on a CPU and obeys one JSON command a line; ``vllm_client`` starts it.

The scheduler and its half of a connector live in this process, whatever the number of ranks; one rank lives
here too, more are processes of their own. One thing is replaced: eager execution with pipeline stages, see
:class:`StageWorker`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.worker.cpu_worker import CPUWorker

LIFE_S = 1_500
"""After this an engine ends by itself, should whoever asks it be gone."""


class StageWorker(CPUWorker):
    """Has room for what the stage before sends, which on CPUs is made only while compiling."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        runner: Any = self.model_runner
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )


class Place:
    """An engine and what can be asked of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._lora: Any = importlib.import_module("vllm.lora.request")
        self.llm: Any = self._vllm.LLM(**options)

    def generate(self, given: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens of all prompts, which are asked at once, and what was counted meanwhile."""
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=given["new_tokens"], ignore_eos=True, detokenize=False, logprobs=2
        )
        prompts, loras = [], []
        for asked in given["prompts"]:
            salt = {} if asked["salt"] is None else {"cache_salt": asked["salt"]}
            prompts.append({"prompt_token_ids": asked["ids"], **salt})
            lora = asked["lora"]
            loras.append(
                None if lora is None else self._lora.LoRARequest(lora["name"], lora["id"], lora["path"])
            )
        before, start = self.counters(None), time.monotonic()
        outputs = self.llm.generate(
            prompts, sampling, use_tqdm=False, lora_request=loras if any(loras) else None
        )
        seconds, after = time.monotonic() - start, self.counters(None)
        return {
            "answers": [_answer(output) for output in outputs],
            "counted": {name: value - before.get(name, 0.0) for name, value in after.items()},
            "seconds": seconds,
        }

    def forget(self, given: dict[str, Any]) -> bool:
        """Empty the prefix cache, and the connector's with ``external``."""
        return bool(self.llm.reset_prefix_cache(reset_connector=given["external"]))

    def counters(self, _given: object) -> dict[str, float]:
        """All of Prometheus' counters by name, added up over their labels."""
        found: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples if metric.type == "counter" else ():
                if sample.name.endswith("_total"):
                    name = sample.name.removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
        return found

    def call(self, given: dict[str, Any]) -> Any:
        """The result of ``module:function`` called with the engine and an argument."""
        module, _, function = given["function"].partition(":")
        return getattr(importlib.import_module(module), function)(self.llm, given["argument"])

    def stop(self, _given: object) -> list[str]:
        """End the engine; the names of the threads that it leaves behind."""
        self.llm.llm_engine.engine_core.shutdown()
        return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]


def _answer(output: Any) -> dict[str, Any]:
    (completion,) = output.outputs
    tokens, chosen, margins = list(completion.token_ids), [], []
    for token, ranked in zip(tokens, completion.logprobs, strict=True):
        best = ranked[token].logprob
        chosen.append(best)
        margins.append(best - max(other.logprob for one, other in ranked.items() if one != token))
    return {
        "tokens": tokens,
        "logprobs": chosen,
        "margin": min(margins),
        "cached": output.num_cached_tokens,
        "finish": completion.finish_reason,
    }


def serve(commands: int, answers: int) -> None:
    """Obey until ``stop`` or the end of the pipe; what a command raises is its answer."""
    signal.alarm(LIFE_S)
    place: Place | None = None
    with os.fdopen(commands) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            command, given = json.loads(line)
            try:
                if command == "start":
                    place, result = Place(given), None
                else:
                    result = getattr(place, command)(given)
                answer = {"result": result}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)
            if command == "stop":
                return


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
