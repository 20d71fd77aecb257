"""The contract of handles: opening, closing, forking, refusing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from hicache_store.connectors.base import Connector, Status, Touch
from hicache_store.errors import HandleError
from hicache_store.testing.contract_base import (
    SETTLE_S,
    Connect,
    ContractBase,
    assert_absent,
    assert_holds,
    exit_code_of,
    fetch,
    page_key,
    soon,
    store,
)
from hicache_store.testing.probes import content, read_of, write_of


class LifecycleContract(ContractBase):
    """A handle owns what it opened, gives it all back, and is never half alive."""

    def test_closing_twice_and_using_after(self, connect: Connect) -> None:
        """Closing again does nothing; every other call raises ``HandleError``."""
        handle = connect()
        key = page_key("after close")
        handle.sizes([key], soon())
        handle.close()
        handle.close()
        read, target = read_of(key, 64)
        uses: list[Callable[[], object]] = [
            lambda: handle.sizes([key], soon()),
            lambda: handle.read_into([read], soon()),
            lambda: handle.write_from([write_of(key, content(key, 64))], soon()),
            lambda: handle.delete([key], soon()),
            lambda: handle.touch([Touch(key)], soon()),
            lambda: list(handle.scan()),
        ]
        for use in uses:
            with pytest.raises(HandleError):
                use()
        assert target.events == []

    def test_handles_share_the_place(self, connector: Connector, writer: Connector, connect: Connect) -> None:
        """What one wrote another sees, and closing one leaves the others and the objects alone."""
        key = page_key("shared")
        store(writer, {key: content(key, 5_001)})
        other = connect()
        assert_holds(other, {key: content(key, 5_001)})
        other.close()
        assert_holds(connector, {key: content(key, 5_001)})

    def test_handles_give_everything_back(self, writer: Connector, connect: Connect) -> None:
        """Opened, used and closed twenty times, no descriptor and no thread is left."""
        key = page_key("cycles")
        store(writer, {key: content(key, 5_001)})

        def cycle() -> None:
            handle = connect()
            handle.write_from([write_of(page_key(f"cycles {i}"), b"x" * 100) for i in range(10)], soon())
            assert_holds(handle, {key: content(key, 5_001)})
            handle.touch([Touch(key)], soon())
            assert [entry.key for entry in handle.scan(key)] == [key]
            handle.close()

        cycle()
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for _ in range(20):
            cycle()
        end = time.monotonic() + SETTLE_S
        while threading.active_count() > threads and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) <= descriptors

    def test_use_after_fork_works_or_raises(self, connector: Connector, writer: Connector) -> None:
        """In a forked child a handle works or raises ``HandleError``; it neither hangs nor lies."""
        key = page_key("fork")
        store(writer, {key: content(key, 5_001)})
        assert_holds(connector, {key: content(key, 5_001)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
            child = os.fork()
        if child == 0:
            code = 1
            try:
                with contextlib.suppress(HandleError):
                    assert_holds(connector, {key: content(key, 5_001)})
                with contextlib.suppress(HandleError):
                    connector.close()
                code = 0
            finally:
                os._exit(code)
        assert exit_code_of(child) == 0, "the child saw wrong bytes, another exception, or hung"
        assert_holds(connector, {key: content(key, 5_001)})

    def test_read_only_handles_change_nothing(self, connector: Connector, writer: Connector) -> None:
        """A handle that says it is read-only refuses every change, as items; others accept them."""
        key, new = page_key("read only"), page_key("read only, new")
        store(writer, {key: content(key, 500)})
        if connector.capabilities.is_read_only:
            writes = [write_of(new, content(new, 500)), write_of(key, content(key, 501))]
            outcomes = connector.write_from(writes, soon())
            outcomes += connector.delete([key], soon())
            assert {outcome.status for outcome in outcomes} == {Status.REFUSED}
            assert connector.touch([Touch(key)], soon())[0].status in (Status.REFUSED, Status.OK)
            assert_absent(connector, [new], 500)
            assert_holds(connector, {key: content(key, 500)})
        else:
            assert connector.write_from([write_of(new, content(new, 500))], soon())[0].status is Status.OK
            assert connector.delete([key], soon())[0].status is Status.OK
            assert fetch(connector, key, 500)[0].status is Status.ABSENT
