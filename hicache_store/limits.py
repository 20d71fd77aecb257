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

TIMEOUT_MAX_S: Final = 31_536_000.0
"""Longest time that a caller may give: a year is for ever, and far below what clocks and waits take."""

IO_PIECE_BYTES: Final = MIB
"""Largest single system call of a cancellable transfer: a blocked call may overrun its deadline by
one piece per worker, and 1 MiB takes 1 ms at 1 GB/s."""

IO_TAIL_BYTES: Final = 64 * KIB
"""What a transfer may be longer than one piece and still be one call: a page of 1 MiB has a trailer."""

OBJECT_PAYLOAD_CAP_BYTES: Final = 8 * MIB
"""A writer halves its layers until one chunk is at most this: big enough to amortise a request,
small enough that a lost object costs little and staging stays small."""

STAGING_BYTES: Final = 64 * MIB
"""Default bound of the staging memory of one Store."""

WORKERS_MAX: Final = 64
"""Upper bound of the worker threads one connector may be asked for."""

LOCAL_THREADS_MAX: Final = 8
"""Default bound of the file connector's threads, below the number of cores: warm reads run at memory
speed with a few, and more only take cores from the engine."""

ABANDONED_MAX: Final = 16
"""Worker threads that may be stuck in hung I/O before calls fail at once."""

DIRECTORIES_MAX: Final = 272
"""Directory handles one root keeps open: all of two levels of 16, and the few beside them."""

DIRECTORIES_MIN: Final = 8
"""Directory handles kept when the process was found short of descriptors."""

WORKER_GRAB_ITEMS: Final = 4
"""Items a worker takes from a batch at once: taking costs a lock, and more would leave the last
workers of a batch idle."""

CLOSE_JOIN_S: Final = 2.0
"""Time that closing gives workers in possibly hung I/O; their memory and files outlive it."""

LOOKUP_SLICE_ITEMS: Final = 64
"""Keys of one look-up task on storage that may hang: hanging loses one slice, and 64 round trips of
0.5 ms are short beside any deadline."""

LOOKUP_FIRST_PAGES: Final = 8
"""Pages first asked for where each is a request: what a chain that is not there costs. Further slices
double."""

LOOKUP_ROUNDS: Final = 8
"""Round trips of the largest such slice: what is asked for in vain behind the last stored page."""

SCRATCH_KEEP_BYTES: Final = 16 * MIB
"""Most private memory a worker keeps between items: one object of the largest usual size. Larger
ones are allocated for one item."""

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

MARKER_REFRESH_MAX_S: Final = 60.0
"""The longest such interval: it doubles while nothing new is found."""

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

CANONICAL_DEPTH_MAX: Final = 16
"""Nesting of a value that enters an identity. Model configurations use four levels; a value that
contains itself would never end."""

NAMESPACE_BYTES_MAX: Final = 64 * KIB
"""Largest encoding of one namespace; a quarter of what is read back as a manifest. Real ones have
2 to 8 KiB."""

WEIGHT_FILES_MAX: Final = 10_000
"""Files of one model directory. The largest released models have a few hundred; more means that a
wrong directory was named."""

WEIGHT_HEADER_BYTES_MAX: Final = 100 * MIB
"""Longest safetensors header that is read, the bound of the format's own library."""

WEIGHT_SAMPLES_MAX: Final = 8192
"""Samples of one weight file: at 0.1 to 1 ms each, seconds for the largest shard."""

WEIGHT_CACHE_ENTRIES_MAX: Final = 256
"""Remembered digests of local weights; the oldest goes first."""

QUOTA_SHARE: Final = 0.5
"""Default quota of a file store, as a share of what is free plus what the store already holds: stable
over restarts, the same in every process, and it leaves the other half to the machine."""

QUOTA_FALLBACK_BYTES: Final = 10 * GIB
"""Default quota where the file system cannot tell its free space."""

FREE_FLOOR_SHARE: Final = 0.05
"""Default floor of free space, as a share of the file system: what ext4 keeps back for root, below
which allocation slows down and neighbours start to fail."""

FREE_FLOOR_MAX_BYTES: Final = 10 * GIB
"""The default floor is at most this: 5 % of a 20 TB disk would be kept idle for nothing."""

EVICTION_LOW_WATERMARK: Final = 0.95
"""Eviction goes on down to this share of the quota, so that one walk serves many writes."""

EVICTION_VICTIMS_MAX: Final = 32_768
"""Oldest objects remembered from one walk: at most about 20 MB of memory while walking, and with
1 MiB objects enough for 32 GiB of writes."""

EVICTION_ROUNDS: Final = 3
"""Evictions one reservation may run before it takes what fits: others may have taken the room."""

EVICTION_RETRY_S: Final = 5.0
"""After an eviction that could not make room, the next one waits this long; writes are refused at
once meanwhile instead of walking the store for every batch."""

EVICTION_BATCH: Final = 32
"""Objects removed between two updates of the shared counter: the room appears early for the others,
and a killed evictor leaves at most this many objects counted that are gone."""

ACCOUNT_LOCK_WAIT_S: Final = 1.0
"""Wait for the shared counter where the caller gave no deadline. It is held for microseconds; only a
stopped process holds it longer, and then the update is carried over to the next one."""

TEMPORARY_GRACE_S: Final = 3600.0
"""Age at which an unpublished file counts as left behind where locks cannot tell: far above any
deadline of a write."""

MAINTENANCE_INTERVAL_S: Final = 300.0
"""Default time between two sweeps of one root, by whichever process comes first."""

MAINTENANCE_SWEEP_S: Final = 600.0
"""Deadline of one background sweep: 10 million objects at 20,000 a second."""

MAINTENANCE_PAUSE_S: Final = 0.001
"""Pause of a background sweep after each of the 256 directories, for the engine's threads."""

DIRECT_RUNS_MAX: Final = 128
"""Runs of an object that are read straight into place; a scatter list of more costs more to build
than one strided copy."""

DIRECT_RUN_MIN_BYTES: Final = 16 * KIB
"""Shortest run worth a place in a scatter list: below it the copy out of warm staging is cheaper."""

FILLER_OWN_MAX_BYTES: Final = 16 * KIB
"""Bytes that no slot wants (a trailer, mostly) up to which a read in flight has memory of its own: a
block of the staging pool costs two locks."""

SMALL_OBJECT_SHARE: Final = 4
"""An object is called small when a request costs more than this many times its bytes: 256 KiB on S3,
where 16 and 256 KiB were seen to take the same time."""

BAD_KEY_S: Final = 60.0
"""How long an object that was found bad and could not be removed counts as absent unseen: somebody else
may have put it right."""

PLANNED_AT_ONCE: Final = 256
"""Pages planned between two looks at the deadline: less than a millisecond or two."""

PLAN_CACHE_MAX: Final = 4096
"""Plans, covers and hints kept per pool; past it the oldest are forgotten."""

HINTS_MAX: Final = 65_536
"""Pages whose last seen objects are remembered between a look-up and the restore that follows."""

RECENT_GAPS_MAX: Final = 4096
"""Prefixes whose end is remembered for callers that ask again at once: requests that wait at a time."""

MAINTENANCE_FIRST_S: Final = 10.0
"""Delay of the first background sweep, so that it does not meet the start of the engine."""

EVICTION_WAIT_S: Final = 0.005
"""Time between two looks at whether another process's eviction has made room."""

LAYERS_MAX: Final = 65_536
"""Layers of an object whose format is worked out from its length: far beyond any model, and trying
all divisors of more would take a tool seconds an object."""

SCRUB_BYTES: Final = 64 * MIB
"""Memory of one batch of a scrub: objects are read whole up to this size, longer ones in runs of
cells that fit."""

SCRUB_ITEMS: Final = 256
"""Objects in one batch of a scrub, so that progress moves and deadlines stay near."""

LISTING_BATCH: Final = 256
"""Entries that a listing hands over at once: a hand-over between threads costs tens of microseconds."""

LISTING_BATCHES_MAX: Final = 16
"""Batches that a listing may be ahead of the tool that reads it."""

LISTING_ROWS_MAX: Final = 1_000
"""Rows held back to make columns fit; a longer table is printed as it comes, cut to these widths."""

LISTING_PAGES_MAX: Final = 65_536
"""Pages gathered in one walk, about 30 MB. A listing of more pages walks the store again for the next
ones, in the order of their hashes."""

LISTING_NAMESPACES_MAX: Final = 1_024
"""Namespaces that tools tell apart in one store; a fleet has tens."""

PAGE_SKETCH: Final = 4_096
"""Distinct pages counted exactly in each namespace; beyond, the count is an estimate with a standard
error of 1/sqrt(4096), 1.6 %."""

REMOVE_BATCH: Final = 256
"""Objects of one batched removal by a tool."""

EXPLAIN_OBJECTS_MAX: Final = 1_000_000
"""Objects that `hicache explain` walks over unless told otherwise: under a minute at 20,000 a second."""

EXPLAIN_PAGES_MAX: Final = 4_096
"""Pages explained at once: 262,144 tokens in pages of 64."""

EXPLAIN_ENTRIES_MAX: Final = 65_536
"""Objects of these pages that are kept and read, all namespaces together."""

EXPLAIN_LISTS_MAX: Final = 256
"""Lists, one a namespace and page, that are asked for instead of a walk where a storage lists a prefix by
one request."""

LISTING_WAIT_S: Final = 600.0
"""Longest wait for the next entry of a listing: one that finds nothing passes over everything, 10
million objects at 20,000 a second."""

S3_CONCURRENCY: Final = 32
"""Default requests of one S3 handle in flight: 32 objects of 1 MiB hide 25 ms of latency at 1 GB/s."""

S3_CONCURRENCY_MAX: Final = 256
"""Most of them: each is a connection, and servers refuse clients with thousands."""

S3_LOOKUP_CONCURRENCY: Final = 64
"""Look-ups in flight: they carry no bytes, so that only latency counts."""

S3_INFLIGHT_BYTES: Final = 256 * MIB
"""Bodies of one S3 handle in memory at a time: 32 objects of the largest usual size."""

S3_EXIT_GRACE_S: Final = 0.1
"""Pause of a process's exit for native threads on their way back from Python."""

S3_BUFFERS_KEEP_BYTES: Final = 64 * MIB
"""Memory for bodies kept between PUTs: new memory costs more in page faults than the copy into it."""

S3_OPERATION_TIMEOUT_S: Final = 10.0
"""Default limit of one request, its body included: 8 MiB at 1 MB/s. Slower is as good as a miss."""

S3_CONNECT_TIMEOUT_S: Final = 2.0
"""Limit of a connection's start: a second try of a lost SYN comes after one second."""

S3_ATTACH_TIMEOUT_S: Final = 5.0
"""Limit of attaching: credentials, one look at the bucket and three probes."""

S3_OBJECT_BYTES_MAX: Final = 5 * GIB
"""Largest object of one PUT, by the protocol."""

S3_KEY_BYTES_MAX: Final = 1024
"""Longest key, by the protocol."""

S3_PART_BYTES_MAX: Final = 255
"""Longest part of a key: gateways and servers that keep objects as files have NAME_MAX."""

S3_DELETE_BATCH: Final = 1000
"""Keys of one DeleteObjects request, by the protocol."""

S3_LANDING_THREADS: Final = 4
"""Threads that copy bodies into place: a copy runs at memory speed, more would only take cores."""

S3_RENEW_INTERVAL_S: Final = 5.0
"""Credentials that a server refuses are read anew at most this often."""

S3_CREDENTIALS_REFRESH_S: Final = 600.0
"""Credentials are asked for again after half of this; the chain itself renews what expires."""

S3_RETRY_AFTER_MAX_S: Final = 3600.0
"""Longest wait that is believed of a server."""

S3_PUT_TRIES: Final = 3
"""Tries to create an object whose key is taken and freed again meanwhile."""

S3_RANGES_TOGETHER: Final = 8
"""Ranges of one object in flight: the planner merges near ones, and one read must not take every
connection."""

REDIS_THREADS: Final = 4
"""Connections that one call to one Redis server uses by default: the server has one thread for commands,
and two connections already keep it busy while one waits for the network."""

REDIS_CLUSTER_THREADS_MAX: Final = 16
"""The same for a cluster, which gets two a server up to this."""

REDIS_CONNECTIONS_MAX: Final = 64
"""Connections of one handle to one server, far below the 10,000 clients a server takes."""

REDIS_DIAL_THREADS: Final = 4
"""Threads that open connections; a handshake takes four round trips."""

REDIS_CONNECT_TIMEOUT_S: Final = 2.0
"""Default time to open a connection: a server that needs longer is no cache."""

REDIS_ATTACH_S: Final = 15.0
"""Time to find out at attach what a server, all sentinels or all seeds of a cluster can do."""

REDIS_AHEAD_BYTES: Final = MIB
"""Replies asked for ahead on one connection, at least: they lie in the server's memory until they are
read, and memory that went cold costs it more than waiting costs us."""

REDIS_WRITE_AHEAD_BYTES: Final = 256 * KIB
"""Values sent ahead of their replies, at least: a server takes a large value as it is only if nothing
stands before it in its buffer, else it moves it."""

REDIS_AHEAD_BYTES_MAX: Final = 8 * MIB
"""Either of them at most, where a round trip is long."""

REDIS_AHEAD_RATE: Final = 2_000_000_000
"""Bytes a second one connection may be worth: what a long round trip is filled up with."""

REDIS_AHEAD_ITEMS: Final = 32
"""Objects asked for, or sent, ahead on one connection: at 64 KiB an object enough to hide a round trip
of 2 ms at 1 GB/s."""

REDIS_LOOKUP_ITEMS: Final = 4096
"""Short commands in one request: a 10,000-page look-up is three round trips and no buffer is large."""

REDIS_ROUNDS_MAX: Final = 5
"""Times an item follows a moving slot or a broken connection before it fails."""

REDIS_REFRESH_S: Final = 1.0
"""Time between two questions for the layout of a cluster or the master of a service."""

REDIS_NODES_MAX: Final = 1024
"""Servers of one cluster, the bound its makers recommend."""

REDIS_REPLY_GRACE_S: Final = 0.25
"""Time past the deadline for the reply to a write that the server has in full."""

REDIS_PREFIX_BYTES_MAX: Final = 1024
"""Longest prefix of all keys of a store."""

REDIS_VALUE_BYTES: Final = 64 * MIB
"""Default bound of one value: larger ones hold up everybody else on the server while they move."""

REDIS_VALUE_BYTES_MAX: Final = 511 * MIB
"""Largest value at all: servers end a connection that sends one of more than 512 MiB."""

REDIS_SCAN_COUNT: Final = 1000
"""Keys a server is asked to look at in one step of a listing: a fraction of a millisecond of its time."""

REDIS_SCAN_SEEN_MAX: Final = 1_000_000
"""Keys remembered while listing, so that each shows once: at most 300 MB in a tool."""

RETRIES_MAX: Final = 10
"""Most tries after the first that an option may ask for: each one adds load to a storage in trouble."""

RETRY_FIRST_WAIT_S: Final = 0.05
"""Longest wait before the first retry; it doubles with each one, and the real wait is drawn below it."""

RETRY_WAIT_MAX_S: Final = 2.0
"""Longest drawn wait before a retry. What the storage itself asks for may be longer."""

RETRY_BUDGET: Final = 256
"""Retries a handle may have in hand, refilled by one for ten successes: two batches of 128 pages can be
tried again at once, a storage that fails for long gets at most a tenth more load."""

BREAKER_CALLS: Final = 3
"""Calls in a row without one answer after which a breaker opens."""

BREAKER_WINDOW_S: Final = 10.0
"""Time over which the share of faults is judged."""

BREAKER_WINDOW_ITEMS: Final = 32
"""Items in such a window below which their share says nothing."""

BREAKER_FAULT_SHARE: Final = 0.5
"""Share of faults at which a breaker opens: half the work is wasted by then."""

BREAKER_COOL_S: Final = 1.0
"""Time a breaker stays open at first; it doubles with each failed probe."""

BREAKER_COOL_MAX_S: Final = 30.0
"""Longest such time: the storage is back in use at most this long after it works again."""

BREAKER_LOG_S: Final = 10.0
"""Time between two lines of the log about storage that fails, works and fails again."""

BREAKER_PROBE_S: Final = 1.0
"""Longest time of a probe; a storage that needs longer for one absent key is not back."""

IN_FLIGHT_MAX: Final = 4096
"""Most items in flight that an option may ask for."""

HEDGED_CALLS_MAX: Final = 16
"""Calls that may have a thread of their own for each of two reads; further ones are not hedged."""

LAYER_QUEUE_BYTES: Final = 256 * MIB
"""Default memory of objects on their way to one layer: 128 pages of 1 MiB twice over."""

LAYER_QUEUE_ITEMS: Final = 4096
"""Objects on their way to one layer, however small they are."""

LAYER_BATCH: Final = 32
"""Objects that are written to a layer in one call in the background."""

LAYER_WRITE_S: Final = 30.0
"""Deadline of one such call."""

LAYER_RETRY_MAX_S: Final = 10.0
"""Longest wait between two tries to write to a slow layer that fails."""

LAYER_CONFIRMED_S: Final = 60.0
"""How long a length that the slow layer confirmed lets the fast layer answer alone: what is lost or removed
there is seen after a minute, and a chain in use, which is touched once a minute, costs one request more."""

LAYER_CONFIRMED_MAX: Final = 65_536
"""Such keys remembered, about 20 MB; the oldest are forgotten."""

LAYER_LOST_S: Final = 60.0
"""How long an object of the fast layer may be missing in the slow one before it counts as lost, where it
may be on its way there from another handle: above the deadline of one batch and the wait before the next."""

LAYER_DRAIN_S: Final = 10.0
"""Default time that closing waits for what a slow layer has not got yet."""

BENCH_BYTES_MAX: Final = 2 * GIB
"""Bytes of one batch of `hicache bench`, which are held in memory to be compared."""

ENGINE_TRANSFER_S: Final = 8.0
"""Default deadline of one batch of 128 pages that an engine moves: SGLang waits 10 s for its threads when
a store is detached, and a prefetch that is 8 s late has lost against recomputing."""

ENGINE_LOOKUP_S: Final = 2.0
"""Default deadline of an engine's look-up: on some paths it holds the scheduler."""

ENGINE_SCRATCH_BYTES: Final = 32 * MIB
"""Memory through which pages go that only the engine can take apart, in each direction."""

ENGINE_STATS_MAX: Final = 4096
"""Transfers remembered between two questions for statistics; the oldest are forgotten."""

ENGINE_STAGING_BYTES: Final = 512 * MIB
"""Default host memory of one rank through which vLLM's blocks go, half of it in each direction: a prefill
step of 8,192 tokens of a 70B model at tensor-parallel size 8 is 320 MiB."""

ENGINE_DEVICE_STAGING_BYTES: Final = 64 * MIB
"""Device memory through which blocks go, in each direction: it is not in vLLM's own account of memory, so it
stays small against the reserve that vLLM leaves."""

ENGINE_LOAD_THREADS: Final = 4
"""Loads of requests that run at one time in a rank; each moves a batch of pages with the store's threads."""

ENGINE_SAVE_THREADS: Final = 2
"""Saves that run at one time in a rank."""

ENGINE_LOOKUP_THREADS: Final = 4
"""Look-ups that run at one time beside a scheduler."""

ENGINE_QUEUE_MAX: Final = 1024
"""Requests whose look-up or load waits for a thread; one more is computed, not waited for."""

ENGINE_LOAD_PAGES: Final = 32
"""Pages that a load moves before it places them in the engine's blocks: enough for the store's threads to
work side by side, few enough that several loads share the staging memory."""

ENGINE_SHARED_WAIT_S: Final = 10.0
"""How long a request waits for another one's load of the same pages before it loads them itself. Above the
default deadline of a load, so that it only ends a wait for a request that cannot be scheduled."""

ENGINE_IDLE_WAIT_S: Final = 0.002
"""How long a step of vLLM that computes nothing waits for a look-up or a load to end. Such steps follow each
other without a pause, and their thread would keep the interpreter's lock from the threads it waits for: each
system call of a load then costs up to 5 ms, the interval at which the lock changes hands."""

ENGINE_LOOKUP_AGE_S: Final = 1.0
"""How long a page that was found counts as there for other requests: those of one burst share a prefix."""

ENGINE_GRACE_S: Final = 1.0
"""How long after its deadline a transfer of vLLM's offloading is waited for: storage that works answers at
the deadline, with what it has."""
