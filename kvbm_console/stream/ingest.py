"""Stimuli from other processes: which kinds, which sizes.

Law of this file: a stranger's stimulus reaches the core only if every field of it is within a limit named here, so
nothing that the core keeps, sends or records grows by a stranger's will.
"""

from typing import Final

from kvbm_console.core import stimuli as st
from kvbm_console.core.config import REQUEST_ID_BYTES_MAX, require
from kvbm_console.core.ids import Authority

INT_MAX: Final = 2**53
"""Larger than any count or nanosecond stamp, and exact in every language that reads the stream."""
TEXT_BYTES_MAX: Final = REQUEST_ID_BYTES_MAX
"""Request ids, sessions, media, error texts."""
COLUMN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Half a million hashes: a prompt of eight million tokens in blocks of 16."""
LIST_ITEMS_MAX: Final = 65_536
"""Requests of one iteration, clones, ranks."""
CAPACITY_BLOCKS_MAX: Final = 16_777_216
"""A declared pool costs 17 bytes of columns a place at once: at most 285 MB."""

FEED_KINDS: Final[frozenset[type[st.Stimulus]]] = frozenset({
    st.PoolDeclared, st.RequestArrived, st.MatchRequested, st.BlocksAllocated, st.IterationScheduled,
    st.IterationFinished, st.RequestPreempted, st.RequestCloned, st.RequestFinished, st.TransferStarted,
    st.TransferFinished, st.TransferFailed, st.BlocksReported, st.SourceGapped, st.SourceRestarted,
    st.CallAnnounced, st.LookupObserved, st.CopiesObserved, st.MismatchReported,
})
"""What engines and movers may say. The rest belongs to control sessions and to the daemon itself."""


def check_stimulus(stimulus: st.Stimulus) -> None:
    """Raise ``UsageError`` naming field, bound and value unless the stimulus may come from another process.

    >>> check_stimulus(st.MatchRequested(0, 0, 1, None, "r-1", 16))
    """
    kind = type(stimulus)
    require(kind in FEED_KINDS, "stimulus", "an entry point of engines or movers", kind.__name__)
    for field in kind.__struct_fields__[1:]:
        _check(field, getattr(stimulus, field))
    if isinstance(stimulus, st.PoolDeclared):
        capacity = stimulus.capacity_blocks
        require(capacity is None or 0 <= capacity <= CAPACITY_BLOCKS_MAX, "capacity_blocks",
                f"from 0 to {CAPACITY_BLOCKS_MAX}", capacity)
        require(stimulus.authority is not Authority.LEADER, "authority", "engine or stream", stimulus.authority.label)


def _check(field: str, value: object) -> None:
    if isinstance(value, int):
        require(-INT_MAX <= value <= INT_MAX, field, f"from -{INT_MAX} to {INT_MAX}", value)
    elif isinstance(value, str):
        require(len(value.encode()) <= TEXT_BYTES_MAX, field, f"at most {TEXT_BYTES_MAX} bytes", value[:80])
    elif isinstance(value, bytes):
        require(len(value) <= COLUMN_BYTES_MAX, field, f"at most {COLUMN_BYTES_MAX} bytes", len(value))
    elif isinstance(value, tuple):
        require(len(value) <= LIST_ITEMS_MAX, field, f"at most {LIST_ITEMS_MAX} items", len(value))
        for item in value:
            _check(field, item)
