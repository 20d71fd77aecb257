"""The contract under concurrency."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_store.connectors.base import Connector, Outcome, Status, Touch
from hicache_store.errors import HandleError
from hicache_store.testing.contract_base import (
    PATIENCE_S,
    Connect,
    ContractBase,
    fetch,
    page_key,
    run_together,
    soon,
    store,
    version_of,
)
from hicache_store.testing.probes import content, read_of, variant_of, write_of


class RaceContract(ContractBase):
    """Whatever runs at the same time, an object is whole or absent."""

    def test_sixteen_writers_of_one_key(self, connector: Connector, writer: Connector) -> None:
        """Different bytes of equal size, all at once: one content stays and every writer succeeds."""
        keys = [page_key(f"race {index}") for index in range(12)]
        results: dict[int, list[Outcome]] = {}

        def write(variant: int) -> Callable[[], None]:
            def run() -> None:
                writes = [write_of(key, content(key, 50_001, variant)) for key in keys]
                results[variant] = writer.write_from(writes, soon())

            return run

        run_together(*[write(variant) for variant in range(16)])
        for index, key in enumerate(keys):
            outcomes = {variant: results[variant][index].status for variant in range(16)}
            assert set(outcomes.values()) <= {Status.OK, Status.EXISTS}, outcomes
            winners = {variant for variant, status in outcomes.items() if status is Status.OK}
            assert variant_of(key, fetch(connector, key, 50_001)[1].delivered()) in winners
            assert len(winners) == 1 or not writer.capabilities.create_only

    def test_eight_repairs_of_one_version(self, connector: Connector, writer: Connector) -> None:
        """Of those who replace the same version at once, one wins where that can be promised."""
        key = page_key("repair")
        store(writer, {key: content(key, 9_001, 100)})
        version = version_of(connector, key, 9_001) or "no versions here"
        statuses: dict[int, Status] = {}

        def repair(variant: int) -> Callable[[], None]:
            def run() -> None:
                write = write_of(key, content(key, 9_001, variant), replace=version)
                statuses[variant] = writer.write_from([write], soon())[0].status

            return run

        run_together(*[repair(variant) for variant in range(8)])
        winners = {variant for variant, status in statuses.items() if status is Status.OK}
        stays = variant_of(key, fetch(connector, key, 9_001)[1].delivered())
        assert stays in (winners or {100})
        if writer.capabilities.conditional_versions:
            assert len(winners) == 1
            assert sorted(statuses.values()) == sorted([Status.OK] + [Status.CONFLICT] * 7)

    def test_readers_never_see_half_an_object(self, connector: Connector, writer: Connector) -> None:
        """While objects appear, every read finds all of one or nothing of it."""
        keys = [page_key(f"appearing {index}") for index in range(16)]
        size = 400_001
        done = threading.Event()
        bad: list[str] = []

        def write() -> None:
            try:
                for start in range(0, 16, 4):
                    store(writer, {key: content(key, size) for key in keys[start : start + 4]})
            finally:
                done.set()

        def read() -> None:
            seen: set[str] = set()
            is_last = False
            while not is_last and not bad:
                is_last = done.is_set()
                wanted = [key for key in keys if key not in seen]
                for key, held in zip(wanted, connector.sizes(wanted, soon()), strict=True):
                    if held not in (None, size):
                        bad.append(f"{key} shows {held} bytes")
                pairs = [read_of(key, size) for key in wanted]
                outcomes = connector.read_into([one for one, _ in pairs], soon())
                for key, outcome, (_, target) in zip(wanted, outcomes, pairs, strict=True):
                    if outcome.status is Status.OK and target.delivered() == content(key, size):
                        seen.add(key)
                    elif outcome.status is not Status.ABSENT:
                        bad.append(f"{key}: {outcome}, whole: {variant_of(key, target.delivered())}")
            if len(seen) < len(keys):
                bad.append(f"only {len(seen)} of {len(keys)} objects were ever seen whole")

        run_together(write, read, read, read)
        assert bad == []

    def test_churn_of_writers_readers_and_deletes(self, connector: Connector, writer: Connector) -> None:
        """Four writers, four readers and a deleter on eight keys: what is read is somebody's, whole."""
        keys = [page_key(f"churn {index}") for index in range(8)]
        size = 60_001
        bodies = {(key, variant): content(key, size, variant) for key in keys for variant in range(4)}
        stop = threading.Event()
        bad: list[str] = []

        def write(variant: int) -> Callable[[], None]:
            def run() -> None:
                for turn in range(30):
                    batch = [keys[(turn * 3 + step + variant) % 8] for step in range(4)]
                    writes = [write_of(key, bodies[key, variant], depth) for depth, key in enumerate(batch)]
                    for outcome in writer.write_from(writes, soon()):
                        if outcome.status not in (Status.OK, Status.EXISTS):
                            bad.append(f"write: {outcome}")

            return run

        def read() -> None:
            while not stop.is_set():
                pairs = [read_of(key, size, 3) for key in keys]
                outcomes = connector.read_into([one for one, _ in pairs], soon())
                for key, outcome, (_, target) in zip(keys, outcomes, pairs, strict=True):
                    data = target.delivered()
                    if outcome.status is Status.OK:
                        if not target.guards_hold or data not in [bodies[key, v] for v in range(4)]:
                            bad.append(f"read: wrong bytes of {key}")
                    elif outcome.status is not Status.ABSENT or not target.is_untouched:
                        bad.append(f"read: {outcome}")

        def delete() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                some = [keys[(turn * 5 + step) % 8] for step in range(3)]
                for outcome in (
                    *writer.delete(some, soon()),
                    *writer.touch([Touch(k) for k in keys], soon()),
                ):
                    if outcome.status not in (Status.OK, Status.ABSENT):
                        bad.append(f"delete or touch: {outcome}")
                for held in connector.sizes(keys, soon()):
                    if held not in (None, size):
                        bad.append(f"sizes: {held}")

        def write_all_and_stop() -> None:
            try:
                run_together(*[write(variant) for variant in range(4)])
            finally:
                stop.set()

        run_together(write_all_and_stop, read, read, read, read, delete)
        assert bad == []

    def test_close_while_calls_run(self, connect: Connect, writer: Connector) -> None:
        """A call that is running ends by itself; the next one is refused; nobody hangs."""
        keys = [page_key(f"closing {index}") for index in range(8)]
        store(writer, {key: content(key, 30_001) for key in keys})
        handle = connect()
        started = threading.Barrier(5)
        closed = threading.Event()
        bad: list[str] = []

        def read() -> None:
            started.wait(PATIENCE_S)
            while not bad:
                is_closed = closed.is_set()
                pairs = [read_of(key, 30_001) for key in keys]
                try:
                    outcomes = handle.read_into([one for one, _ in pairs], soon())
                except HandleError:
                    return
                if is_closed:
                    bad.append("a call on a closed handle went through")
                for key, outcome, (_, target) in zip(keys, outcomes, pairs, strict=True):
                    if outcome.status is Status.OK and target.delivered() != content(key, 30_001):
                        bad.append(f"wrong bytes of {key}")

        def close() -> None:
            started.wait(PATIENCE_S)
            handle.read_into([read_of(key, 30_001)[0] for key in keys], soon())
            handle.close()
            closed.set()

        run_together(close, read, read, read, read)
        assert bad == []
