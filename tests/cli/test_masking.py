"""No command prints a store URL as it was given: it may hold a password."""

from __future__ import annotations

import re
from pathlib import Path

import hicache_store.cli
from hicache_store.cli.masking import masked

SOURCES = sorted(Path(hicache_store.cli.__file__).parent.glob("*.py"))


def test_every_printed_url_is_masked():
    printed = [
        (path.name, line.strip())
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r'"url":|_print\(|_document\(|_list_\w+\(connector', line) and "args.url" in line
    ]
    assert len(printed) >= 8
    assert [entry for entry in printed if "masked(args.url)" not in entry[1]] == []


def test_passwords_and_secret_options_are_replaced():
    assert masked("redis://user:hunter2@host/0?secret_key=x") == "redis://user:***@host/0?secret_key=***"
