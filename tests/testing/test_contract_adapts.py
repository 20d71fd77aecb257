"""The contract asks of a connector what its capabilities say, no more and no less."""

from __future__ import annotations

import dataclasses

import pytest

from hicache_store.connectors.base import OK, Outcome, Status
from hicache_store.connectors.memory import MemoryConnector, MemoryTable
from hicache_store.testing.connector_contract import ConnectorContract
from hicache_store.testing.faults import CountingConnector, FaultyConnector, OverwritingConnector

REFUSED = Outcome(Status.REFUSED, "read-only")


class Weaker:
    """An in-memory connector with less to promise."""

    def __init__(self, table, **said):
        self.inner = MemoryConnector(table)
        self.capabilities = dataclasses.replace(self.inner.capabilities, **said)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class ReadOnly(Weaker):
    def __init__(self, table):
        super().__init__(table, is_read_only=True)

    def write_from(self, writes, deadline):
        return [REFUSED] * len(self.inner.sizes([write.key for write in writes], deadline))

    def delete(self, keys, deadline, versions=None):
        return [REFUSED] * len(self.inner.sizes(keys, deadline))

    def touch(self, touches, deadline):
        return [REFUSED] * len(self.inner.sizes([touch.key for touch in touches], deadline))


class WithoutVersions(Weaker):
    """Reports no version, refuses to replace by one, and cannot tell whether a delete found anything."""

    def __init__(self, table):
        super().__init__(table, conditional_versions=False, orders_eviction=False)

    def read_into(self, reads, deadline):
        return [dataclasses.replace(one, version=None) for one in self.inner.read_into(reads, deadline)]

    def delete(self, keys, deadline, versions=None):
        outcomes = self.inner.delete(keys, deadline, versions)
        return [OK if one.status is Status.ABSENT else one for one in outcomes]

    def touch(self, touches, deadline):
        outcomes = self.inner.touch(touches, deadline)
        return [OK if one.status is Status.ABSENT else one for one in outcomes]


class TestReadOnlyContract(ConnectorContract):
    @pytest.fixture
    def table(self):
        return MemoryTable()

    @pytest.fixture
    def connect(self, table):
        return lambda: ReadOnly(table)

    @pytest.fixture
    def connect_writer(self, table):
        return lambda: MemoryConnector(table)

    @pytest.fixture
    def connect_bounded(self):
        return lambda quota_bytes: MemoryConnector(MemoryTable(quota_bytes))


class TestVersionlessContract(ConnectorContract):
    @pytest.fixture
    def connect(self):
        table = MemoryTable()
        return lambda: WithoutVersions(table)


class TestOverwritingContract(ConnectorContract):
    @pytest.fixture
    def connect(self):
        table = MemoryTable()
        return lambda: OverwritingConnector(MemoryConnector(table))

    @pytest.fixture
    def connect_bounded(self):
        return lambda quota_bytes: OverwritingConnector(MemoryConnector(MemoryTable(quota_bytes)))


class TestFaultlessContract(ConnectorContract):
    @pytest.fixture
    def connect(self):
        table = MemoryTable()
        return lambda: FaultyConnector(MemoryConnector(table))

    @pytest.fixture
    def connect_bounded(self):
        return lambda quota_bytes: FaultyConnector(MemoryConnector(MemoryTable(quota_bytes)))


class TestCountingContract(ConnectorContract):
    @pytest.fixture
    def connect(self):
        table = MemoryTable()
        return lambda: CountingConnector(MemoryConnector(table))

    @pytest.fixture
    def connect_bounded(self):
        return lambda quota_bytes: CountingConnector(MemoryConnector(MemoryTable(quota_bytes)))
