"""The demo: one group of ranks computes a prompt's KV and stores it, another group continues from it.

The reader group answers the prompt twice after a warm-up on another prompt: cold, without the store,
and warm, with what is stored loaded first. Both runs choose their tokens greedily; they must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hicache_store.clock import Deadline
from hicache_store.config import parse_url, redacted
from hicache_store.connectors.base import Connector, Entry
from hicache_store.connectors.registry import open_connector
from hicache_store.demo.group import Generation, RankGroup, StoreAccess, checked_ranks
from hicache_store.demo.identity import demo_namespace, demo_tenant, weights_identity
from hicache_store.demo.inspect import negate, remove_namespace, stored_objects
from hicache_store.demo.messages import GroupSpec
from hicache_store.demo.prompt import build_prompt, excerpts, prompt_text
from hicache_store.demo.report import Answers, DemoReport, Written
from hicache_store.demo.tokenizer import Tokenizer, tokenizer_of
from hicache_store.demo.weights import ModelConfig, ModelSource
from hicache_store.errors import ConfigurationError, TopologyError
from hicache_store.layout.hashing import page_hashes
from hicache_store.layout.parallel import ParallelSpec

TIMEOUT_S: Final = 900.0
"""Longest wait for one step of the demo: a cold 8,192-token prompt on a busy machine."""
WARM_UP_TOKENS: Final = 512
"""Two prefill chunks: every code path and most allocations of a longer prompt."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Run:
    """One run's fixed facts."""

    source: ModelSource
    config: ModelConfig
    tokenizer: Tokenizer
    tokens: list[int]
    new_tokens: int
    page_size: int
    access: StoreAccess
    timeout_s: float
    progress: Progress

    @property
    def hashes(self) -> list[str]:
        """The pages of the prompt."""
        return page_hashes(self.tokens, self.page_size)

    @property
    def namespace(self) -> str:
        """The digest of the namespace that holds them."""
        return demo_namespace(self.config, self.access.weights, self.page_size, self.access.tenant).digest

    def group(self, parallel: ParallelSpec, role: str, seed: int) -> RankGroup:
        pages = -(-(len(self.tokens) + self.new_tokens) // self.page_size)
        size = parallel.tp_size * parallel.pp_size
        self.progress(f"{role} {parallel.label}: starting {size} rank process{'es' if size > 1 else ''}")
        # More slots than pages, so that two free lists rarely agree on a page's place.
        slots = pages + max(8, pages // 2)
        return RankGroup.start(GroupSpec(self.source, parallel, self.page_size, slots, seed))

    def write(self, parallel: ParallelSpec) -> Written:
        with self.group(parallel, "writer", seed=1) as group:
            group.attach(self.access, self.timeout_s)
            self.progress(
                f"writer {parallel.label}: computing what is not stored of {len(self.tokens):,} prompt tokens"
            )
            generation = group.generate(self.tokens, 1, self.timeout_s, restore=True)
            self.progress(f"writer {parallel.label}: storing pages")
            return Written(generation, group.backup(self.tokens, self.timeout_s))

    def read(self, parallel: ParallelSpec, *, is_control: bool) -> Answers:
        with self.group(parallel, "reader", seed=2) as group:

            def answer(restore: bool) -> Generation:
                group.reset(self.timeout_s)
                return group.generate(self.tokens, self.new_tokens, self.timeout_s, restore=restore)

            self.progress(f"reader {parallel.label}: warming up on another prompt")
            warm_up = build_prompt(self.tokenizer, min(len(self.tokens), WARM_UP_TOKENS), seed=1)
            group.generate(warm_up, 2, self.timeout_s)
            self.progress(f"reader {parallel.label}: answering without the store")
            cold = answer(restore=False)
            self.progress(f"reader {parallel.label}: answering with the stored prefix")
            group.attach(replace(self.access, verify=not is_control), self.timeout_s)
            warm = answer(restore=True)
            if not is_control:
                return Answers(cold, warm, None)
            self.progress(f"reader {parallel.label}: answering with verification")
            group.attach(self.access, self.timeout_s)
            return Answers(cold, warm, answer(restore=True))

    def seen(
        self, writer: ParallelSpec, reader: ParallelSpec, connector: Connector, *, is_control: bool
    ) -> DemoReport:
        """Write, alter if this is a control, read, and tell."""
        written = self.write(writer)
        entries = stored_objects(connector, self.namespace, self.hashes)
        if is_control:
            self.progress("altering the stored objects")
            pool = self.config.kv().pool(self.page_size)
            negate(connector, pool, entries, Deadline.after(self.timeout_s))
        answers = self.read(reader, is_control=is_control)
        return self._report(writer, reader, entries, written, answers)

    def _report(
        self,
        writer: ParallelSpec,
        reader: ParallelSpec,
        entries: list[Entry],
        written: Written,
        answers: Answers,
    ) -> DemoReport:
        head, tail = excerpts(prompt_text(self.tokenizer, self.tokens))
        verified = answers.verified
        return DemoReport(
            model=self.source.name,
            has_random_weights=self.source.path is None,
            writer=writer.label,
            reader=reader.label,
            store=redacted(self.access.url),
            namespace=self.namespace,
            page_size=self.page_size,
            prompt_tokens=len(self.tokens),
            prompt_head=head,
            prompt_tail=tail,
            continuation=self.tokenizer.decode(answers.warm.tokens),
            pages=len(self.hashes),
            objects=len(entries),
            bytes=sum(entry.size_bytes for entry in entries),
            is_control=verified is not None,
            verified_continuation=None if verified is None else self.tokenizer.decode(verified.tokens),
            **written.to_report(),
            **answers.to_report(),
        )


def run_demo(
    source: ModelSource,
    writer: ParallelSpec,
    reader: ParallelSpec,
    prompt_tokens: int,
    store_url: str,
    *,
    page_size: int = 64,
    new_tokens: int = 32,
    is_control: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Progress = lambda _: None,
) -> DemoReport:
    """Write a prompt's KV with ``writer`` ranks, continue from it with ``reader`` ranks, and compare.

    The pages belong to the writer's topology: another call with it finds them, one with another writer
    does not. With ``is_control`` the stored elements are negated in between and the reader does not
    verify, so that its tokens must differ, then it verifies and must take none of them; the control keeps
    to a namespace of its own and removes it. Raises :class:`ConfigurationError` for what cannot work,
    before any process is started or token computed,
    :class:`~hicache_store.demo.group.RankError` or :class:`DeadlineExceededError` for ranks that fail.
    """
    if parse_url(store_url).scheme == "memory":
        raise ConfigurationError("memory:// is private to one process and ranks are many; use file://")
    config, _ = source.open()
    for option, parallel in (("--writer", writer), ("--reader", reader)):
        try:
            checked_ranks(config, parallel, page_size)
        except TopologyError as error:
            raise TopologyError(f"{option} {parallel.label} cannot run {source.name}: {error}") from None
    if prompt_tokens + new_tokens > config.context:
        raise ConfigurationError(
            f"{prompt_tokens} prompt and {new_tokens} new tokens exceed the context of {config.context}; "
            f"give at most {config.context - new_tokens} prompt tokens"
        )
    tokenizer = tokenizer_of(source)
    tokens = build_prompt(tokenizer, prompt_tokens)
    connector = open_connector(store_url)
    try:
        tenant = demo_tenant(writer, is_control=is_control)
        access = StoreAccess(store_url, weights_identity(source), tenant)
        run = _Run(source, config, tokenizer, tokens, new_tokens, page_size, access, timeout_s, progress)
        try:
            return run.seen(writer, reader, connector, is_control=is_control)
        finally:
            if is_control:
                remove_namespace(connector, run.namespace, Deadline.after(timeout_s))
    finally:
        connector.close()
