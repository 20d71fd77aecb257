"""What differs in anything that changes KV never meets on one root; what does not, does."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from store_rig import CONFIG, FilePlace, Place, RankRig, attach_rank, chain

from hicache_store.errors import IdentityError
from hicache_store.layout.hashing import (
    ChainKind,
    LoraIdentity,
    MultimodalInput,
    RequestIdentity,
    page_hashes,
)
from hicache_store.layout.model import Attention, KVPart, ModelKV, Pool
from hicache_store.layout.namespace import KVFacts, Namespace, namespace
from hicache_store.layout.parallel import Rank
from hicache_store.layout.weights import WeightsIdentity
from hicache_store.store import EndReason, PageState

PAGES = 8
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "ab" * 32
BASE = {
    "config": CONFIG,
    "weights": WeightsIdentity.hub_commit("org/model", COMMIT),
    "tenant": "t",
    "dtype": "bf16",
    "heads": 4,
    "parts": (("k", 2), ("v", 2)),
    "layers": 4,
    "page_size": 2,
}


def build(**changed: object) -> tuple[Pool, Namespace]:
    """The pool and the namespace of the base deployment, but for what is given."""
    facts = {**BASE, **changed}
    parts = tuple(KVPart(*part) for part in facts["parts"])
    extra = {name: facts[name] for name in ("chain", "has_rope", "scales", "head_order") if name in facts}
    kv = KVFacts(
        num_kv_heads=facts["heads"],
        parts=facts["parts"],
        dtype=facts["dtype"],
        attention=facts.get("attention", "gqa"),
        page_size=facts["page_size"],
        num_layers=facts["layers"],
        **extra,
    )
    model = ModelKV(
        facts["layers"],
        facts["heads"],
        parts,
        ModelKV.dense(num_layers=1, num_kv_heads=1, head_dim=2, dtype=facts["dtype"]).dtype,
        Attention.GQA,
    )
    return model.pool(facts["page_size"]), namespace(facts["config"], facts["weights"], kv, facts["tenant"])


def config(**changed: object) -> dict[str, object]:
    return {**CONFIG, **changed}


DIFFERENT: dict[str, dict[str, object]] = {
    "fp16, of equal size": {"dtype": "fp16"},
    "fp8 e4m3": {"dtype": "fp8_e4m3", "parts": (("k", 4), ("v", 4))},
    "fp8 e4m3fnuz": {"dtype": "fp8_e4m3fnuz", "parts": (("k", 4), ("v", 4))},
    "fp8 e5m2": {"dtype": "fp8_e5m2", "parts": (("k", 4), ("v", 4))},
    "fp8 e5m2fnuz": {"dtype": "fp8_e5m2fnuz", "parts": (("k", 4), ("v", 4))},
    "int8": {"dtype": "int8", "parts": (("k", 4), ("v", 4))},
    "another commit": {"weights": WeightsIdentity.hub_commit("org/model", COMMIT[::-1])},
    "another repository": {"weights": WeightsIdentity.hub_commit("org/model2", COMMIT)},
    "sampled files": {"weights": WeightsIdentity.sampled(DIGEST)},
    "files in full, same digest": {"weights": WeightsIdentity.full(DIGEST)},
    "the operator's word, same text": {"weights": WeightsIdentity.operator(DIGEST)},
    "the operator's word, another": {"weights": WeightsIdentity.operator(COMMIT)},
    "rope theta": {"config": config(rope_theta=500_000.0)},
    "rope scaling": {"config": config(rope_scaling={"rope_type": "linear", "factor": 2.0})},
    "rope scaling by another factor": {"config": config(rope_scaling={"rope_type": "linear", "factor": 4.0})},
    "partial rotary": {"config": config(partial_rotary_factor=0.5)},
    "depth of the model": {"config": config(num_hidden_layers=8)},
    "norm epsilon": {"config": config(rms_norm_eps=1e-5)},
    "sliding window": {"config": config(sliding_window=4096)},
    "architecture": {"config": config(model_type="mistral", num_key_value_heads=4)},
    "quantised weights": {"config": config(quantization_config={"quant_method": "fp8"})},
    "page size": {"page_size": 1, "parts": (("k", 4), ("v", 4))},
    "K and V widths swapped": {"parts": (("k", 3), ("v", 1))},
    "other K and V widths": {"parts": (("k", 1), ("v", 3))},
    "order of the parts": {"parts": (("v", 2), ("k", 2))},
    "heads for layers": {"heads": 2, "layers": 4, "parts": (("k", 4), ("v", 4))},
    "tenant": {"tenant": "T"},
    "no tenant": {"tenant": ""},
    "bigram chain": {"chain": ChainKind.BIGRAM},
    "keys before rope": {"has_rope": False},
    "scales of the checkpoint": {"scales": "weights"},
    "another head order": {"head_order": "interleaved"},
    "multi-head attention": {"attention": "mha"},
}


def open_places(tmp_path: Path) -> list[Callable[[], Place | FilePlace]]:
    return [Place, lambda: FilePlace(tmp_path)]


@pytest.mark.parametrize("medium", [0, 1], ids=["memory", "file"])
def test_any_difference_is_a_miss_and_none_a_collision(
    medium: int, tmp_path: Path, tally: Counter[str]
) -> None:
    """All on one root under the same page hashes: nobody sees another's pages, everybody their own."""
    place, hashes = open_places(tmp_path)[medium](), chain(PAGES)
    deployments = {"the base": {}, **DIFFERENT}
    digests = [build(**changed)[1].digest for changed in deployments.values()]
    assert len(set(digests)) == len(deployments)
    for seed, changed in enumerate(deployments.values()):
        with rank_of(place, changed) as rig:
            rig.fill(range(PAGES), seed)
            assert rig.store.contains(hashes).pages == 0
            report = rig.restore(hashes)
            assert (report.pages, report.end.reason) == (0, EndReason.ABSENT)
            rig.fill(range(PAGES), seed)
            assert set(rig.backup(hashes).states) == {PageState.STORED}
    for seed, changed in enumerate(deployments.values()):
        with rank_of(place, changed) as rig:
            assert rig.restore(hashes).pages == PAGES
            rig.assert_holds(range(PAGES), seed)
    tally["deployments kept apart on one root, pair by pair"] += len(deployments) * (len(deployments) - 1)


def rank_of(place: Place | FilePlace, changed: dict[str, object]) -> RankRig:
    pool, ns = build(**changed)
    return attach_rank(place, pool, "tp1", Rank(), pages=PAGES, ns=ns)


def test_a05_bytes_that_do_not_say_their_format_are_refused() -> None:
    """An fp8 pool handed over as raw bytes fits any 8-bit format, so a size check cannot save anybody."""
    for dtype in ("uint8", "fp8", "auto", "float8_e4m3"):
        with pytest.raises(IdentityError, match="cannot be told safely"):
            build(dtype=dtype)


@pytest.mark.parametrize(
    "same",
    [
        {"config": config(rope_theta=10_000)},
        {"config": config(rope_theta=1e4, use_cache=False, bos_token_id=7, transformers_version="9")},
        {"config": dict(reversed(list(CONFIG.items())))},
        {"dtype": "bfloat16"},
        {"dtype": "torch.bfloat16"},
    ],
)
def test_what_changes_no_kv_is_a_hit(same: dict[str, object]) -> None:
    place, hashes = Place(), chain(PAGES)
    with rank_of(place, {}) as writer:
        writer.fill(range(PAGES))
        writer.backup(hashes)
    with rank_of(place, same) as reader:
        assert reader.restore(hashes).pages == PAGES
        reader.assert_holds(range(PAGES))


def test_removing_what_is_of_one_dtype_leaves_the_others_alone() -> None:
    place, hashes = Place(), chain(PAGES)
    wide = {"parts": (("k", 4), ("v", 4))}
    deployments = [{"dtype": dtype, **wide} for dtype in ("fp8_e4m3", "fp8_e5m2", "int8")]
    for seed, changed in enumerate(deployments):
        with rank_of(place, changed) as rig:
            rig.fill(range(PAGES), seed)
            rig.backup(hashes)
    mine = build(**deployments[0])[1].digest
    place.remove(*(key for key in place.contents() if mine in key))
    for seed, changed in enumerate(deployments):
        with rank_of(place, changed) as rig:
            assert rig.restore(hashes).pages == (PAGES if seed else 0)
            rig.assert_holds(range(PAGES) if seed else [], seed)


COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\u00e9 \u1e69") for form in ("NFC", "NFD"))
TEXTS = (
    None, "", "a", "b", "ab", "a/b", "a_b", "a:b", "a\0b", "a\0", "\0a", "\0", "/", "//", "_", "a,b",
    '"', '","', "a\nb", "..", "../../etc/x", COMPOSED, DECOMPOSED, "CON", "None", "null", "a" * 1000,
    " a", "a ", "A",
)  # fmt: skip


def identities() -> list[RequestIdentity]:
    """Salts, adapters and inputs made to imitate one another."""
    found = [RequestIdentity(cache_salt=text) for text in TEXTS]
    names = [text for text in TEXTS if text]
    found += [
        RequestIdentity(lora=LoraIdentity(name, digest)) for name in names for digest in ("1", "2", name)
    ]
    found += [
        RequestIdentity(lora=LoraIdentity("a", "1"), cache_salt=text) for text in TEXTS if text is not None
    ]
    found += [
        RequestIdentity(multimodal=(MultimodalInput(position, digest),))
        for position in (0, 1)
        for digest in ("1", "a/b", "a\0b")
    ]
    return list(dict.fromkeys(found))


def test_a07_a18_salts_and_adapters_never_alias(tally: Counter[str]) -> None:
    """Ten pages under each request identity: only the same identity finds them."""
    tokens = range(10)
    pages_of = {identity: page_hashes(tokens, 1, seed=identity.seed()) for identity in identities()}
    every = list(itertools.chain(*pages_of.values()))
    assert len(set(every)) == len(every)
    place = Place()
    pool, ns = build()
    with attach_rank(place, pool, "tp1", Rank(), pages=10, ns=ns) as rig:
        for seed, hashes in enumerate(pages_of.values()):
            assert rig.store.contains(hashes).pages == 0
            rig.fill(range(10), seed)
            assert rig.backup(hashes).pages == 10
        for seed, hashes in enumerate(pages_of.values()):
            assert rig.restore(hashes).pages == 10
            rig.assert_holds(range(10), seed)
    tally["request identities kept apart, pair by pair"] += len(pages_of) * (len(pages_of) - 1)


def test_a07_a_salt_is_no_prefix_of_a_page() -> None:
    """The seed has a fixed length, so no salt followed by one page is another salt followed by two."""
    one = page_hashes(range(4), 1, seed=RequestIdentity(cache_salt="a").seed())
    two = page_hashes(range(4), 1, seed=RequestIdentity(cache_salt="a" + one[0]).seed())
    three = page_hashes(range(4), 1, seed=bytes.fromhex(one[0]))
    assert one[1:] != three[:3]
    assert not set(one) & set(two)
    assert not set(two) & set(three)


def test_a18_a_reloaded_adapter_is_another_one() -> None:
    """Same name, new weights; and no adapter at all."""
    tokens = list(range(10))
    place = Place()
    pool, ns = build()
    stored = RequestIdentity(lora=LoraIdentity("A", "digest1"))
    others = (
        RequestIdentity(),
        RequestIdentity(lora=LoraIdentity("B", "digest1")),
        RequestIdentity(lora=LoraIdentity("A", "digest2")),
    )
    with attach_rank(place, pool, "tp1", Rank(), pages=10, ns=ns) as rig:
        rig.fill(range(10))
        rig.backup(page_hashes(tokens, 1, seed=stored.seed()))
        for other in others:
            hashes = page_hashes(tokens, 1, seed=other.seed())
            assert rig.store.contains(hashes).pages == 0
            assert rig.restore(hashes).pages == 0
        assert rig.restore(page_hashes(tokens, 1, seed=stored.seed())).pages == 10
    with pytest.raises(IdentityError, match="has no weights digest"):
        LoraIdentity("A", "")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"heads": 2}, "KV heads 4, the pool has 2"),
        ({"parts": (("k", 2), ("v", 3))}, "kv parts"),
        ({"dtype": "fp16"}, "dtype bfloat16, the pool has float16"),
        ({"page_size": 4}, "page size 2, the pool has 4"),
        ({"layers": 3}, "4 layers, pool kv has 3"),
    ],
)
def test_a_pool_that_is_not_the_namespaces_is_refused(changed: dict[str, object], what: str) -> None:
    pool, _ = build(**changed)
    _, ns = build()
    with pytest.raises(IdentityError, match=what):
        attach_rank(Place(), pool, "tp1", Rank(), ns=ns)


def test_e06_nothing_a_user_typed_reaches_a_path(tmp_path: Path) -> None:
    """Tenants, adapters, salts and operators' strings made of paths, NULs and links: only digests and
    numbers name files, and nothing is made outside the root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    root.mkdir(mode=0o700)
    (root / "link").symlink_to(outside)
    place = FilePlace(root)
    names = ("../../outside/x", "..", "/etc/passwd", "a\0b", "CON", "link/x", "link", "a/b", ".hidden")
    for name in names:
        pool, ns = build(tenant=name, weights=WeightsIdentity.operator(name))
        identity = RequestIdentity(lora=LoraIdentity(name, name), cache_salt=name)
        with attach_rank(place, pool, "tp1", Rank(), pages=2, ns=ns) as rig:
            rig.fill(range(2))
            hashes = page_hashes(range(4), 2, seed=identity.seed())
            assert rig.backup(hashes).pages == 2
            assert rig.restore(hashes).pages == 2
    made = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) >= 2 * len(names)
    assert {path.parts[0] for path in made} == {"root"}
    assert list(outside.iterdir()) == []
    plain = re.compile(r"[0-9A-Za-z._+-]{1,254}")
    assert all(plain.fullmatch(part) for path in made for part in path.parts)
    texts = [str(path) for path in made]
    assert not [text for text in texts for name in ("passwd", "CON", "hidden", "outside") if name in text]
