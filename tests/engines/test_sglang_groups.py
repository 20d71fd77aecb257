"""Two processes in one gloo group, each with SGLang's real controller: ranks agree, whatever one lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("sglang_group_worker.py")


Reports = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What all scenarios came to on each rank; a worker that hangs or fails shows what it said."""
    directory = tmp_path_factory.mktemp("ranks")
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(directory)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=280) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, said, strict=True):
        assert worker.returncode == 0, errors[-4000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


def test_b01_b02_b06_ranks_agree_on_the_shortest_prefix(reports: Reports) -> None:
    """Rank 1's objects of pages 40 and on are gone. Both ranks report 40, both send every
    acknowledgement, and a prefetch after a new backup is whole again."""
    lacking = [report["lacking"] for report in reports]
    assert [one["local_hits"] for one in lacking] == [300, 40]
    assert [(one["agreed_hit"], one["completed"], one["healed"]) for one in lacking] == [(40, 40, 300)] * 2


def test_b03_a_backup_that_one_rank_could_not_make_ends_on_all_and_is_made_up(reports: Reports) -> None:
    """Ranks decide each for itself what host memory they have for a backup. None waits for the other's:
    the shorter one is the hit of both, until the rank that fell short stores the rest."""
    skipped = [report["skipped"] for report in reports]
    assert [(one["agreed_hit"], one["completed"], one["made_up"]) for one in skipped] == [(40, 40, 300)] * 2


def test_a_page_that_goes_bad_on_one_rank_shortens_it_on_both(reports: Reports) -> None:
    """Found by both at look-up, corrupt when rank 0 reads it; no acknowledgement is missing."""
    corrupt = [report["corrupt"] for report in reports]
    assert [(one["agreed_hit"], one["acks"], one["completed"]) for one in corrupt] == [(300, 3, 200)] * 2


def test_b07_an_abort_that_only_one_rank_has_seen_ends_on_both(reports: Reports) -> None:
    """No slot is lost and no rank waits for the other's acknowledgement."""
    aborted = [report["aborted_on_one"] for report in reports]
    assert [(one["acks"], one["completed"]) for one in aborted] == [(3, 0)] * 2
    assert all(one["free_after"] == one["free_before"] for one in aborted)


def test_b02_b11_stages_agree_on_the_shortest_prefix(reports: Reports) -> None:
    """A pipeline stage that lacks pages shortens the hit of all stages, and none waits for the other."""
    stages = [report["stages"] for report in reports]
    assert [one["local_hits"] for one in stages] == [300, 40]
    assert [(one["agreed_hit"], one["completed"]) for one in stages] == [(40, 40)] * 2


def test_b16_stages_of_unequal_host_memory_share_what_is_stored(reports: Reports) -> None:
    """How many pages a rank has room for says nothing of what it stores: names and hits do not know it."""
    first, second = (report["stages"] for report in reports)
    assert first["host_pages"] > second["host_pages"]
    assert first["namespace"] == second["namespace"]
    assert first["agreed_hit"] == second["agreed_hit"] == 40
