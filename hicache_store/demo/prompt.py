"""The demo's prompts: a ship's log of any length, and a question about its first page."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

from hicache_store.demo.tokenizer import Tokenizer
from hicache_store.errors import ConfigurationError

_OPENING: Final = (
    "This is the log of the sailing ship Amberwing. Her captain is Ilse Marrow, and her cargo is forty "
    "barrels of lamp oil and six crates of window glass for the lighthouse on Gull Rock.\n"
)
_QUESTION: Final = "\nWho is the captain of the ship, and what is her cargo? Answer in two sentences."

_WINDS: Final = ("a light wind", "a steady breeze", "a hard gale", "no wind at all", "gusts and showers")
_SIDES: Final = ("the north", "the south", "the east", "the west", "the south-west", "the north-east")
_SIGHTS: Final = (
    "two fishing boats", "a school of dolphins", "an empty raft", "a bank of fog", "the lights of a harbour",
    "a whale", "a flock of terns", "a wooden chest", "an island with three hills",
)  # fmt: skip
_WORKS: Final = (
    "mended the mainsail", "scrubbed the deck", "caulked a seam near the bow", "counted the water casks",
    "took soundings", "painted the rail", "baked bread", "replaced a worn rope", "wrote letters home",
)  # fmt: skip


EXCERPT: Final = 240
"""Characters of a prompt's head and tail in a report: its opening, and its whole question."""


def _entries(seed: int) -> Iterator[str]:
    chance = random.Random(seed)  # noqa: S311  (no secret)
    day = 0
    while True:
        day += 1
        yield (
            f"Day {day}: {chance.choice(_WINDS)} from {chance.choice(_SIDES)}. "
            f"We saw {chance.choice(_SIGHTS)} and {chance.choice(_WORKS)}. "
            f"The ship made {chance.randrange(3, 180)} miles.\n"
        )


def prompt_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The words of a prompt of :func:`build_prompt`, without what a chat template puts around them."""
    text = tokenizer.decode(tokens)
    return text[text.index(_OPENING) : text.rindex(_QUESTION) + len(_QUESTION)]


def excerpts(text: str, letters: int = EXCERPT) -> tuple[str, str]:
    """Whole words of the beginning and of the end, ``letters`` of each at most; of a text that has no more
    than both, all of it and nothing."""
    if len(text) <= 2 * letters:
        return text, ""
    return text[:letters].rpartition(" ")[0], text[-letters:].partition(" ")[2]


def build_prompt(tokenizer: Tokenizer, count: int, seed: int = 0) -> list[int]:
    """A prompt of exactly ``count`` tokens; the seed varies the log's days.

    Raises :class:`ConfigurationError` when opening and question alone are longer.
    """
    opening, question = tokenizer.encode(_OPENING), tokenizer.encode(_QUESTION)
    room = count - len(tokenizer.turn([*opening, *question]))
    if room < 0:
        raise ConfigurationError(f"a prompt of {count} tokens is too short; give at least {count - room}")
    body: list[int] = []
    for entry in _entries(seed):
        if len(body) >= room:
            break
        body += tokenizer.encode(entry)
    return tokenizer.turn([*opening, *body[:room], *question])
