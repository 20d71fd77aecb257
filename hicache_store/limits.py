"""Every bound of the package, with its reason.

Nothing here is a tuning knob of a deployment (those are options of a URL or of ``Store.attach``);
these are the walls that keep queues, memory and waits finite.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

DEFAULT_TIMEOUT_S: Final = 30.0
"""Total deadline of one batched call. A 128-page batch of 1 MiB takes 0.15 s on a cold disk at
1 GB/s and 13 s on a 10 MB/s link; past that, recomputing has long won."""

IO_PIECE_BYTES: Final = MIB
"""Largest single system call of a cancellable transfer: a blocked call may overrun its deadline by
one piece per worker, and 1 MiB takes 1 ms at 1 GB/s."""

OBJECT_PAYLOAD_CAP_BYTES: Final = 8 * MIB
"""A writer halves its layers until one chunk is at most this: big enough to amortise a request,
small enough that a lost object costs little and staging stays small."""

STAGING_BYTES: Final = 64 * MIB
"""Default bound of the staging memory of one Store."""

DEVICE_WORKERS_MAX: Final = 64
"""Upper bound of the worker threads one connector may be asked for."""

ABANDONED_MAX: Final = 16
"""Worker threads that may be stuck in hung I/O before calls fail at once."""

SUBMIT_THREADS: Final = 4
"""Threads that drive submitted tickets; each drives one batch at a time."""

SUBMIT_QUEUE_MAX: Final = 256
"""Tickets that may wait; one more is refused at once instead of growing a queue."""

BAD_KEYS_MAX: Final = 4096
"""Keys remembered as holding bad bytes when the storage could not delete them."""

MARKER_SLOTS: Final = 64
"""Announced grids per namespace. A fleet has a handful; 64 is one batched read."""

MARKER_BYTES: Final = 4096
"""Size of one grid marker, so that all slots are read in one batch without listing."""

MARKER_REFRESH_S: Final = 5.0
"""A reader re-reads the markers after an unexplained miss at most this often."""

MARKER_RECHECK_S: Final = 30.0
"""A writer checks that its own marker is still there at most this often."""

CANDIDATES_MAX: Final = 512
"""Objects of all known grids that are considered for one page of one rank."""

RESTORE_ROUNDS: Final = 3
"""Tries to assemble a page from other objects after one turned out bad or missing."""

TOUCH_INTERVAL_S: Final = 60.0
"""A page touched within this time is not touched again."""

TOUCH_MEMORY_MAX: Final = 65_536
"""Pages whose last touch is remembered."""

METADATA_MAX_BYTES: Final = 256 * KIB
"""Largest manifest that is read back; a larger one is not ours."""

MEMORY_QUOTA_BYTES: Final = GIB
"""Default bound of the objects of one in-memory place: harmless on any machine that serves a model."""

MEMORY_META_BYTES: Final = 64 * MIB
"""Bound of what an in-memory place keeps outside its quota: 4,096 KiB-sized manifests and 15,000
markers, far beyond what one process meets."""
