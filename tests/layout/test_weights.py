from __future__ import annotations

import dataclasses

import pytest

from hicache_store.errors import IdentityError
from hicache_store.layout.weights import WeightsIdentity, WeightsKind

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_commit_in_any_case_is_one_identity() -> None:
    identity = WeightsIdentity.hub_commit("org/model-1.5_B", COMMIT.upper())
    assert identity == WeightsIdentity(WeightsKind.HUB_COMMIT, COMMIT, "org/model-1.5_B")
    assert WeightsIdentity.hub_commit("gpt2", COMMIT).repository == "gpt2"


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/3", COMMIT[:7], COMMIT[:39], COMMIT + "0", "", COMMIT + "\n"]
)
def test_a12_a_name_that_can_move_is_refused_with_the_way_out(revision: str) -> None:
    """A branch keeps its name while the weights behind it change."""
    with pytest.raises(IdentityError, match="give the 40 hex digits of the commit of org/model"):
        WeightsIdentity.hub_commit("org/model", revision)


@pytest.mark.parametrize(
    "repository", ["", "/models/llama", "../x", "a/b/c", "org/", "org/mo del", "org/model\n", "é/x"]
)
def test_a_path_is_no_repository(repository: str) -> None:
    with pytest.raises(IdentityError, match="not a repository of a hub"):
        WeightsIdentity.hub_commit(repository, COMMIT)


@pytest.mark.parametrize("digest", ["", "ab", "g" * 64, "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_a_digest_is_64_lower_case_hex_digits(digest: str) -> None:
    with pytest.raises(IdentityError, match="64 lower-case hex digits"):
        WeightsIdentity.sampled(digest)
    with pytest.raises(IdentityError, match="64 lower-case hex digits"):
        WeightsIdentity.full(digest)


@pytest.mark.parametrize("text", ["", "\ud800"])
def test_the_operators_string_must_say_something(text: str) -> None:
    with pytest.raises(IdentityError):
        WeightsIdentity.operator(text)


def test_equal_values_of_different_kinds_differ() -> None:
    digest = "a" * 64
    identities = [
        WeightsIdentity.sampled(digest),
        WeightsIdentity.full(digest),
        WeightsIdentity.operator(digest),
    ]
    assert len(set(identities)) == 3
    assert len({str(identity.record()) for identity in identities}) == 3
    assert dataclasses.replace(identities[0]) == identities[0]
