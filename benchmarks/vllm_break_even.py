"""From how many tokens on a hit is worth loading: time to the first token of a real vLLM engine, computed and
loaded, in one run.

``python -m benchmarks.vllm_break_even --model DIR --store URL`` for a model and a store of your own; without
them a tiny random Llama in fp32 over local files, which is quicker to compute than any real model and so
shows what a load costs by itself. Needs vLLM; `make test-engines` installs it for CPUs. Set
``min_hit_tokens`` to the number that is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for name, value in (
    ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
):
    os.environ.setdefault(name, value)
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "vllm_engine"))

from vllm import LLM, SamplingParams  # noqa: E402
from vllm_client import own_transfer  # noqa: E402
from vllm_model import TinyLlama  # noqa: E402

LENGTHS = (64, 128, 256, 512, 1024)
SUFFIX = 8
"""Tokens behind the hit that are computed either way."""
STORING_S = 0.3
"""Pages are stored behind the answer."""
ON_A_CPU = {"block_size": 32, "enforce_eager": True, "num_gpu_blocks_override": 256, "dtype": "float32"}


def _first_token_s(llm: Any, prompt: list[int]) -> float:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return time.perf_counter() - start


def _measure(llm: Any, length: int, rounds: int, draw: random.Random) -> tuple[float, float]:
    """Median seconds to the first token behind ``length`` tokens: computed, and loaded."""
    computed, loaded = [], []
    for _ in range(rounds):
        prompt = [draw.randrange(2, 200) for _ in range(length + SUFFIX)]
        computed.append(_first_token_s(llm, prompt))
        time.sleep(STORING_S)
        llm.reset_prefix_cache(reset_connector=True)
        loaded.append(_first_token_s(llm, prompt))
        llm.reset_prefix_cache()
    return statistics.median(computed), statistics.median(loaded)


def main() -> None:
    """Print a line a length, and the least length from which loading is always faster."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--store", help="a store's URL; new pages are written to it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", type=json.loads, help="arguments of vllm.LLM, as JSON")
    given = parser.parse_args()
    draw = random.Random(time.time_ns())
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or TinyLlama().write(Path(scratch) / "model")
        store = given.store or f"file://{scratch}/store?quota=4GiB"
        llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=max(LENGTHS) + 64,
            kv_transfer_config=own_transfer({"url": store, "min_hit_tokens": 0}),
            **(given.engine or (ON_A_CPU if given.model is None else {})),
        )
        _first_token_s(llm, [1] * max(LENGTHS))
        worth = 0
        print(f"{'hit tokens':>10} {'computed ms':>12} {'loaded ms':>10} {'ratio':>6}")
        for length in LENGTHS:
            cold, warm = _measure(llm, length, given.rounds, draw)
            print(f"{length:>10} {cold * 1e3:>12.1f} {warm * 1e3:>10.1f} {warm / cold:>6.2f}", flush=True)
            worth = (worth or length) if warm < cold else 0
        print(f"min_hit_tokens: {worth or f'above {LENGTHS[-1]}'}")
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
