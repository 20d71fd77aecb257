"""The contract accepts a sound connector and catches every way of breaking it."""

from __future__ import annotations

import inspect

import pytest
from sloppy_connector import SloppyConnector, World

from hicache_store.testing.connector_contract import ConnectorContract

TESTS = sorted(name for name in dir(ConnectorContract) if name.startswith("test_"))

CAUGHT_BY = {
    "first view only": [
        "gather_lists_of_any_length_round_trip",
        "churn_of_writers_readers_and_deletes",
    ],
    "ignores offsets": ["parts_land_where_they_belong", "one_key_into_two_targets"],
    "writes beside views": ["gather_lists_of_any_length_round_trip", "parts_land_where_they_belong"],
    "skips empty reads": ["reading_no_bytes_still_checks"],
    "ignores size": ["wrong_size_delivers_nothing", "outcomes_keep_the_order_of_the_items"],
    "asks for parts first": ["wrong_size_delivers_nothing", "absent_objects_are_values"],
    "absent raises": ["absent_objects_are_values"],
    "hides versions": ["wrong_size_delivers_nothing", "check_that_refuses_rejects_one_item"],
    "reverses outcomes": ["outcomes_keep_the_order_of_the_items", "parts_that_raise_fail_one_item"],
    "errors escape": [
        "parts_that_raise_fail_one_item",
        "check_that_raises_fails_one_item",
        "release_that_raises_harms_no_other",
        "read_only_views_fail_one_item",
        "buffers_that_raise_fail_one_item",
        "release_of_a_source_that_raises",
    ],
    "no release on error": [
        "parts_that_raise_fail_one_item",
        "check_that_raises_fails_one_item",
        "read_only_views_fail_one_item",
        "buffers_that_raise_fail_one_item",
        "too_short_a_source_fails_one_item",
    ],
    "forgets release": ["sources_are_used_once_and_copied", "gather_lists_of_any_length_round_trip"],
    "releases twice": ["gather_lists_of_any_length_round_trip"],
    "checks first": ["gather_lists_of_any_length_round_trip", "large_objects_round_trip"],
    "checks twice": ["reading_no_bytes_still_checks", "check_that_refuses_rejects_one_item"],
    "no check": ["reading_no_bytes_still_checks", "check_that_refuses_rejects_one_item"],
    "ignores refusals": ["check_that_refuses_rejects_one_item"],
    "copies read-only views": ["read_only_views_fail_one_item"],
    "copies strided views": ["views_that_are_not_contiguous"],
    "short reads pass": ["parts_beyond_the_object_fail_one_item"],
    "one target a key": ["one_key_into_two_targets"],
    "cuts at 16 MiB": ["large_objects_round_trip"],
    "plain views only": ["views_of_any_format"],
    "late sizes": ["past_deadline_reads_nothing"],
    "late reads": ["past_deadline_reads_nothing", "deadline_that_passes_midway"],
    "lands after return": ["deadline_that_passes_midway"],
    "torn reads": ["an_object_that_changes_under_a_read"],
    "keeps views": ["sources_are_used_once_and_copied"],
    "asks sources twice": ["sources_are_used_once_and_copied"],
    "overwrites": [
        "the_first_complete_object_stays",
        "one_key_twice_in_a_batch",
        "sixteen_writers_of_one_key",
    ],
    "overwrites other sizes": ["an_object_of_another_size_is_a_conflict"],
    "pads sources": ["too_short_a_source_fails_one_item"],
    "cuts sources": ["too_long_a_source_fails_one_item"],
    "publishes zeros first": ["buffers_that_raise_fail_one_item", "too_long_a_source_fails_one_item"],
    "publishes half first": ["readers_never_see_half_an_object"],
    "ignores source strides": ["sources_that_are_not_contiguous"],
    "drops empty objects": ["an_empty_object_is_refused_or_kept"],
    "replaces anything": ["replacing_a_named_version", "eight_repairs_of_one_version"],
    "replaces equal sizes only": ["replacing_an_object_of_another_size"],
    "replace creates": ["replacing_what_is_not_there"],
    "versions repeat": ["a_version_is_never_used_again"],
    "refuses duplicates": ["one_key_twice_in_a_batch"],
    "shallow only": ["any_depth_can_be_written"],
    "late writes": ["past_deadline_writes_nothing", "write_deadline_that_passes_midway"],
    "reads after return": ["write_deadline_that_passes_midway"],
    "checks, then writes": [
        "a_create_that_loses_its_race",
        "a_repair_that_loses_its_race",
        "sixteen_writers_of_one_key",
        "eight_repairs_of_one_version",
    ],
    "empty batch raises": ["empty_batches"],
    "odd alignment": ["capabilities_are_sound_and_steady"],
    "caps sizes": ["ten_thousand_sizes_in_one_call"],
    "late deletes": ["delete_removes_exactly_the_named"],
    "deletes nothing": ["delete_removes_exactly_the_named", "delete_of_a_named_version"],
    "deletes any version": ["delete_of_a_named_version"],
    "deletes by prefix": ["names_of_the_real_form_never_meet"],
    "touch creates": ["touch_keeps_the_bytes"],
    "scans whole parts": ["scan_yields_what_lies_below_a_prefix"],
    "cuts names": ["names_of_the_real_form_never_meet"],
    "hostile names raise": ["hostile_names_harm_nobody"],
    "evicts heads first": ["eviction_takes_the_tail_first"],
    "close once": ["closing_twice_and_using_after"],
    "lives after close": ["closing_twice_and_using_after", "close_while_calls_run"],
    "close clears the place": ["handles_share_the_place"],
    "leaks descriptors": ["handles_give_everything_back"],
    "leaks threads": ["handles_give_everything_back"],
    "lies after fork": ["use_after_fork_works_or_raises"],
    "writes though read-only": ["read_only_handles_change_nothing"],
}


def run(test: str, *faults: str) -> BaseException | None:
    """What one test of the contract says about a connector with these faults."""
    world = World()
    connectors: list[SloppyConnector] = []

    def connect() -> SloppyConnector:
        connectors.append(SloppyConnector(world, *faults))
        return connectors[-1]

    connector = connect()
    given = {
        "connect": connect,
        "connect_writer": connect,
        "connector": connector,
        "writer": connector,
        "connect_bounded": lambda quota_bytes: SloppyConnector(World(quota_bytes), *faults),
    }
    method = getattr(ConnectorContract(), test)
    try:
        method(**{name: given[name] for name in inspect.signature(method).parameters})
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        world.dispose()
    return None


@pytest.mark.parametrize("test", TESTS)
def test_a_sound_connector_passes(test):
    assert run(test) is None


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_a_broken_connector_is_caught(fault):
    for test in CAUGHT_BY[fault]:
        assert run(f"test_{test}", fault) is not None, f"{test} lets a connector pass that: {fault}"


def test_every_test_of_the_contract_catches_something():
    caught = {f"test_{test}" for tests in CAUGHT_BY.values() for test in tests}
    assert caught == set(TESTS)
