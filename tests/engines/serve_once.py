"""A real SGLang engine that answers prompts over a store and ends: for tests that run in another engine's
environment. Arguments: the model, the store's URL, a file of prompts as JSON, a folder for logs, and the
dtype.

Prints the greedy tokens, and how many of each prompt's tokens came from storage, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from engine_client import PAGE, options, running

from hicache_store import page_hashes
from hicache_store.connectors.registry import open_connector
from hicache_store.layout.names import ObjectName

WAIT_S = 60.0


def main(model: Path, url: str, prompts: list[list[int]], logs: Path, dtype: str) -> None:
    """Answer, and wait until every whole page is stored: backups run behind the answers."""
    configuration = {
        "backend_name": "hicache_store",
        "module_path": "hicache_store.engines.sglang",
        "class_name": "HiCacheL3",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": PAGE,
        "url": url,
    }
    given = options(model, tp=1, pp=1, layout="page_first", configuration=configuration)
    with running(given | {"skip_tokenizer_init": True, "dtype": dtype}, logs / "sglang.log") as engine:
        answers = engine.generate(prompts)
        wanted = {page for prompt in prompts for page in page_hashes(prompt, PAGE)}
        connector, end = open_connector(url), time.monotonic() + WAIT_S
        while wanted - {ObjectName.parse(entry.key).page_hash for entry in connector.scan("v1/")}:
            if time.monotonic() > end:
                raise SystemExit("not every page was stored in time")
            time.sleep(0.2)
        connector.close()
    print(json.dumps([[answer.tokens, answer.storage] for answer in answers]))


if __name__ == "__main__":
    _, folder, store, asked, log, kind = sys.argv
    main(Path(folder), store, json.loads(Path(asked).read_text()), Path(log), kind)
