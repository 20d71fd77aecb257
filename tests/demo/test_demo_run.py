"""KV written by one group of processes and continued by another, through files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from test_rank_group import TIMEOUT_S, spec_of

from hicache_store.clock import Deadline
from hicache_store.connectors.base import Entry
from hicache_store.connectors.registry import open_connector
from hicache_store.demo.group import RankError, RankGroup, StoreAccess
from hicache_store.demo.identity import demo_namespace, demo_tenant, weights_identity
from hicache_store.demo.inspect import stored_objects
from hicache_store.demo.prompt import build_prompt, excerpts, prompt_text
from hicache_store.demo.report import DemoReport
from hicache_store.demo.run import run_demo
from hicache_store.demo.tokenizer import BpeTokenizer, ByteTokenizer
from hicache_store.demo.weights import ModelSource, model_named, random8, smollm2
from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.hashing import page_hashes
from hicache_store.layout.names import ObjectName
from hicache_store.layout.parallel import ParallelSpec

PROMPT = 400
PAGE = 16
NEW_TOKENS = 12
RESTORABLE = (PROMPT - 1) // PAGE * PAGE


def demo(model: ModelSource, writer: str, reader: str, root: Path, *, is_control: bool = False) -> DemoReport:
    return run_demo(
        model,
        ParallelSpec.parse(writer),
        ParallelSpec.parse(reader),
        PROMPT,
        f"file://{root}?quota=64MiB",
        page_size=PAGE,
        new_tokens=NEW_TOKENS,
        is_control=is_control,
        timeout_s=TIMEOUT_S,
    )


def assert_continued(report: DemoReport) -> None:
    assert report.tokens_equal
    assert report.compared_tokens == NEW_TOKENS
    assert (report.restored_tokens, report.restore_end) == (RESTORABLE, "")
    assert 3 * report.max_logit_difference < report.min_logit_margin
    assert report.ttft_cold_s > 0
    assert report.ttft_warm_s > report.restore_s > 0
    assert report.read_objects > 0
    assert report.read_bytes > 0


@pytest.mark.parametrize(
    ("writer", "reader", "objects_per_page"),
    [("tp2pp2", "tp1", 4), ("tp1", "tp2pp2", 1)],
)
def test_another_topology_continues_what_one_wrote(
    tiny: ModelSource, tmp_path: Path, writer: str, reader: str, objects_per_page: int
) -> None:
    first = demo(tiny, writer, reader, tmp_path)
    assert_continued(first)
    assert first.is_as_due
    assert first.pages == PROMPT // PAGE
    assert first.objects == first.objects_written == first.pages * objects_per_page
    assert first.bytes == first.bytes_written > 0
    assert (first.pages_present, first.writer_restored_tokens) == (0, 0)
    assert json.loads(json.dumps(first.to_json()))["tokens_equal"] is True


def test_a_second_call_hits_everything(tiny: ModelSource, tmp_path: Path) -> None:
    first = demo(tiny, "tp2", "tp1", tmp_path)
    second = demo(tiny, "tp2", "tp1pp2", tmp_path)
    assert_continued(second)
    assert second.writer_restored_tokens == RESTORABLE
    assert second.pages_present == second.pages
    assert (second.objects_written, second.bytes_written) == (0, 0)
    assert (second.objects, second.bytes) == (first.objects, first.bytes)
    assert second.continuation == first.continuation


def test_another_writer_does_not_take_the_pages_of_the_first(tiny: ModelSource, tmp_path: Path) -> None:
    """Else the reader would restore the first one's objects, and the report would name the second."""
    first = demo(tiny, "tp2", "tp1", tmp_path)
    other = demo(tiny, "tp1pp2", "tp1", tmp_path)
    assert_continued(other)
    assert (other.pages_present, other.writer_restored_tokens) == (0, 0)
    assert other.objects_written == 2 * other.pages
    assert other.namespace != first.namespace


def test_a_store_that_cannot_be_written_is_not_as_due(tiny: ModelSource, tmp_path: Path) -> None:
    open_connector(f"file://{tmp_path}?quota=64MiB").close()
    two = ParallelSpec(2)
    report = run_demo(
        tiny, two, two, PROMPT, f"file://{tmp_path}?readonly=1", page_size=PAGE, timeout_s=TIMEOUT_S
    )
    assert report.tokens_equal
    assert (report.restored_tokens, report.objects) == (0, 0)
    assert report.backup_detail == "the store is read-only"
    assert not report.is_as_due


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_impossible_topologies_are_refused_before_anything_is_computed(
    tiny: ModelSource, tmp_path: Path, role: str
) -> None:
    steps: list[str] = []
    for label, said in (("tp3", "4 KV heads cannot be split"), ("tp8pp5", "use at most 32 ranks")):
        message = f"--{role} {ParallelSpec.parse(label).label} cannot run tiny: .*{said}"
        specs = {"writer": ParallelSpec(), "reader": ParallelSpec(), role: ParallelSpec.parse(label)}
        with pytest.raises(TopologyError, match=message):
            run_demo(
                tiny,
                specs["writer"],
                specs["reader"],
                PROMPT,
                f"file://{tmp_path}/new",
                progress=steps.append,
            )
    assert steps == []
    assert not (tmp_path / "new").exists()


def test_altered_bytes_change_the_tokens_unless_they_are_verified(tiny: ModelSource, tmp_path: Path) -> None:
    """The comparison has power: the reader's tokens do depend on what it restored."""
    honest = demo(tiny, "tp2", "tp1", tmp_path)
    control = demo(tiny, "tp2", "tp1", tmp_path, is_control=True)
    assert control.is_control
    assert control.restored_tokens == RESTORABLE
    assert not control.tokens_equal
    assert control.continuation != honest.continuation
    assert (control.verified_restored_tokens, control.verified_tokens_equal) == (0, True)
    assert control.verified_continuation == honest.continuation
    assert control.is_as_due
    # Nothing altered stays, and what the honest run stored was never touched.
    config, _ = tiny.open()
    tokens = build_prompt(ByteTokenizer(), PROMPT)
    connector = open_connector(f"file://{tmp_path}?quota=64MiB")
    assert (
        honest.namespace
        == demo_namespace(
            config, weights_identity(tiny), PAGE, demo_tenant(ParallelSpec(2), is_control=False)
        ).digest
    )
    assert control.namespace != honest.namespace
    assert len(stored_objects(connector, honest.namespace, page_hashes(tokens, PAGE))) == honest.objects
    assert not [entry.key for entry in connector.scan() if control.namespace in entry.key]
    connector.close()
    assert_continued(demo(tiny, "tp2", "tp1", tmp_path))


class Stored:
    """A prompt's pages in one root, written by a group."""

    def __init__(self, model: ModelSource, root: Path, parallel: ParallelSpec, seed: int = 0) -> None:
        self.tokens = build_prompt(ByteTokenizer(), 300)
        self.access = StoreAccess(f"file://{root}?quota=64MiB", weights_identity(model), "test")
        config, _ = model.open()
        self.namespace = demo_namespace(config, self.access.weights, PAGE, "test").digest
        self.hashes = page_hashes(self.tokens, PAGE)
        with RankGroup.start(spec_of(model, parallel, seed=seed)) as group:
            group.attach(self.access, TIMEOUT_S)
            group.generate(self.tokens, 1, TIMEOUT_S)
            self.backup = group.backup(self.tokens, TIMEOUT_S)

    def entries(self) -> dict[ObjectName, Entry]:
        connector = open_connector(self.access.url)
        found = stored_objects(connector, self.namespace, self.hashes)
        connector.close()
        return {ObjectName.parse(entry.key): entry for entry in found}

    def remove(self, chosen: Callable[[ObjectName], bool]) -> int:
        doomed = [entry.key for name, entry in self.entries().items() if chosen(name)]
        connector = open_connector(self.access.url)
        assert all(o.is_ok for o in connector.delete(doomed, Deadline.after(TIMEOUT_S)))
        connector.close()
        return len(doomed)


def test_ranks_agree_on_the_shortest_prefix(tiny: ModelSource, tmp_path: Path) -> None:
    """One rank lacks its part of page 9, another of page 5: no rank may start behind the least."""
    parallel = ParallelSpec(2, 2)
    stored = Stored(tiny, tmp_path, parallel)
    doomed = {(False, False): stored.hashes[9], (True, True): stored.hashes[5]}
    assert stored.remove(lambda n: doomed.get((n.heads.start > 0, n.layers.start > 0)) == n.page_hash) == 2
    with RankGroup.start(spec_of(tiny, parallel)) as group:
        cold = group.generate(stored.tokens, 8, TIMEOUT_S)
        group.attach(stored.access, TIMEOUT_S)
        group.reset(TIMEOUT_S)
        warm = group.generate(stored.tokens, 8, TIMEOUT_S, restore=True)
        assert warm.restored_tokens == 5 * PAGE
        assert warm.end == "page 5: absent"
        assert warm.tokens == cold.tokens
        backup = group.backup(stored.tokens, TIMEOUT_S)
    assert backup.objects == 2
    assert backup.pages_present == len(stored.hashes) - 2


def test_one_topology_writes_the_same_bytes_from_any_slots(tiny: ModelSource, tmp_path: Path) -> None:
    contents = []
    for seed in (1, 2):
        root = tmp_path / str(seed)
        stored = Stored(tiny, root, ParallelSpec(2, 1), seed)
        names = {str(name) for name in stored.entries()}
        assert len(names) == 2 * len(stored.hashes) == stored.backup.objects
        contents.append({p.relative_to(root): p.read_bytes() for p in root.rglob("*.H*") if p.is_file()})
    assert len(contents[0]) >= stored.backup.objects
    assert contents[0] == contents[1]


def test_a_rank_without_a_store_says_so(tiny: ModelSource) -> None:
    message = "during generate: HandleError: no store is attached"
    with RankGroup.start(spec_of(tiny, ParallelSpec())) as group, pytest.raises(RankError, match=message):
        group.generate(build_prompt(ByteTokenizer(), 300), 1, TIMEOUT_S, restore=True)


def test_runs_that_cannot_work_are_refused(tiny: ModelSource, tmp_path: Path) -> None:
    one = ParallelSpec()
    with pytest.raises(ConfigurationError, match="memory:// is private to one process"):
        run_demo(tiny, one, one, PROMPT, "memory://demo")
    with pytest.raises(ConfigurationError, match="give at most 480 prompt tokens"):
        run_demo(tiny, one, one, 481, f"file://{tmp_path}")
    with pytest.raises(ConfigurationError, match="a prompt of 20 tokens is too short; give at least 2"):
        run_demo(tiny, one, one, 20, f"file://{tmp_path}")
    with pytest.raises(ConfigurationError, match="unknown model 'gpt'; known: smollm2, random8"):
        model_named("gpt")
    assert model_named("random8") == random8()


def test_prompts_have_the_length_that_was_asked_for(smollm2_tokenizer: BpeTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), smollm2_tokenizer):
        prompts = [build_prompt(tokenizer, count) for count in (300, 301, 1024)]
        assert [len(prompt) for prompt in prompts] == [300, 301, 1024]
        assert build_prompt(tokenizer, 301) == prompts[1]
        assert build_prompt(tokenizer, 301, seed=1) != prompts[1]
        text = tokenizer.decode(prompts[2])
        assert "captain is Ilse Marrow" in text
        assert "Who is the captain" in text[-200:]
        words = prompt_text(tokenizer, prompts[2])
        assert words in text
        assert words.startswith("This is the log")
        assert words.endswith("in two sentences.")


def test_excerpts_of_a_text_are_whole_words_that_do_not_overlap() -> None:
    assert excerpts("one two three", 7) == ("one two three", "")
    assert excerpts("one two three four", 6) == ("one", "four")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [("smollm2", "tp3pp2", "tp1"), ("random8", "tp4pp2", "tp2"), ("random8", "tp1", "tp4pp2")],
)
def test_the_demonstrations(tmp_path: Path, name: str, writer: str, reader: str) -> None:
    report = run_demo(
        model_named(name),
        ParallelSpec.parse(writer),
        ParallelSpec.parse(reader),
        1024,
        f"file://{tmp_path}?quota=1GiB",
    )
    assert report.tokens_equal
    assert report.restored_tokens == 960
    assert 3 * report.max_logit_difference < report.min_logit_margin
    if name == smollm2().name:
        assert report.continuation.startswith("The captain of the ship is Ilse Marrow, and her cargo is")
