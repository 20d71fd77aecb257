"""What a run of the demo saw."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hicache_store.demo.group import Backup, Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What was seen. Times are from submit to first token, in the reader's topology.

    ``objects`` and ``bytes`` are what the store holds of the prompt; ``objects_written`` and
    ``bytes_written`` what this run added to it.
    """

    model: str
    has_random_weights: bool
    """So that its text means nothing."""
    writer: str
    reader: str
    store: str
    namespace: str
    """The digest of the namespace that holds the writer's pages."""
    page_size: int
    prompt_tokens: int
    prompt_head: str
    prompt_tail: str
    """Empty when the head is all of it."""
    continuation: str
    compared_tokens: int
    tokens_equal: bool
    min_logit_margin: float
    """Least distance between the best two logits, of both runs."""
    max_logit_difference: float
    """Largest difference of a chosen token's logit between the runs, up to the first unequal token."""
    restored_tokens: int
    restore_end: str
    """Why less was restored than possible; empty when nothing was missing."""
    ttft_cold_s: float
    ttft_warm_s: float
    restore_s: float
    read_objects: int
    read_bytes: int
    objects: int
    bytes: int
    objects_written: int
    bytes_written: int
    backup_detail: str
    pages: int
    """Full pages of the prompt."""
    pages_present: int
    """Of them, how many every writer rank found stored already."""
    writer_restored_tokens: int
    """What the writer itself loaded from the store before computing the rest."""
    is_control: bool
    verified_restored_tokens: int | None
    """Control only: what a verifying reader accepted of the altered objects."""
    verified_tokens_equal: bool | None
    verified_continuation: str | None

    @property
    def restorable_tokens(self) -> int:
        """Those of full pages that leave at least one token to compute: its output chooses the first new
        one."""
        return (self.prompt_tokens - 1) // self.page_size * self.page_size

    @property
    def is_as_due(self) -> bool:
        """Whether everything was restored and the tokens are equal; of a control, whether altered bytes
        changed them unverified, and a verifying reader took none of them."""
        if self.restored_tokens < self.restorable_tokens:
            return False
        if not self.is_control:
            return self.tokens_equal
        is_refused = self.verified_restored_tokens == 0 and self.verified_tokens_equal is True
        return is_refused and not self.tokens_equal

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Written:
    """What the writer group did."""

    generation: Generation
    backup: Backup

    def to_report(self) -> dict[str, Any]:
        """The fields of a :class:`DemoReport` that the writer alone decides."""
        return {
            "objects_written": self.backup.objects,
            "bytes_written": self.backup.written_bytes,
            "backup_detail": self.backup.detail,
            "pages_present": self.backup.pages_present,
            "writer_restored_tokens": self.generation.restored_tokens,
        }


@dataclass(frozen=True, slots=True)
class Answers:
    """What the reader group answered, and, of a control, what it answered when it verified."""

    cold: Generation
    warm: Generation
    verified: Generation | None

    def to_report(self) -> dict[str, Any]:
        """The fields of a :class:`DemoReport` that the reader alone decides."""
        cold, warm, verified = self.cold, self.warm, self.verified
        return {
            "compared_tokens": len(cold.tokens),
            "tokens_equal": cold.tokens == warm.tokens,
            "min_logit_margin": min(*cold.margins, *warm.margins),
            "max_logit_difference": self.max_logit_difference,
            "restored_tokens": warm.restored_tokens,
            "restore_end": warm.end,
            "ttft_cold_s": cold.ttft_s,
            "ttft_warm_s": warm.ttft_s,
            "restore_s": warm.restore_s,
            "read_objects": warm.read_objects,
            "read_bytes": warm.read_bytes,
            "verified_restored_tokens": None if verified is None else verified.restored_tokens,
            "verified_tokens_equal": None if verified is None else verified.tokens == cold.tokens,
        }

    @property
    def max_logit_difference(self) -> float:
        """Of the tokens before the first that differs: beyond it the inputs differ too."""
        shared = 0
        for a, b in zip(self.cold.tokens, self.warm.tokens, strict=True):
            if a != b:
                break
            shared += 1
        pairs = zip(self.cold.logits[:shared], self.warm.logits[:shared], strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)
