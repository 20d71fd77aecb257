"""For properties of so few shapes that a quarter of the usual examples meets them all."""

from __future__ import annotations

from hypothesis import settings

FEWER = settings(max_examples=settings.default.max_examples // 4)
