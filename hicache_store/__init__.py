"""A shared L3 store of canonical KV-cache objects for LLM serving engines."""

from __future__ import annotations

__version__ = "0.1.0"
