"""Words of each view that somebody who sees the console for the first time may not know, the most needed first.

Law of this file: a word stands here as it stands on the screen; a test looks for each on its view.
"""

from typing import Final

from ..desk import BREAKS, LOG, OVERVIEW, RECORD, SLOT, SLOTS, TIERS, TIMELINE, TRANSFERS, WARNINGS, WHY

_TIERS: Final = ("G1 G2 G3", "device memory, host memory, disk: a cached block lies in one or several")
_PREEMPTED: Final = ("preempted", "it lost its device blocks to others and begins again")
_LIFE: Final = (
    ("staged", "found below the device; its places are kept until it is admitted"),
    ("onboarding", "its blocks are copied up to the device"), _PREEMPTED,
    ("skipped", "alive, and without a token in this iteration"),
)

WORDS: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    OVERVIEW: (
        ("hit rate", "share of the prompt blocks asked for that some tier had; the rest is computed"),
        _TIERS, ("lag", "events published that this console has not shown yet"),
        ("lost", "events that never came here"),
        ("rec", "age of the newest event that is safe on disk; off: no recorder"),
        ("queued", "copies that wait for their link; moving ones are on it"),
        ("evict/s", "blocks a second that gave their place to others"),
        ("thrash", "of the blocks evicted in the last minute, share that came back within the window"),
        ("p50 p99", "half, and 99 of 100, of the copies took no longer"),
    ),
    SLOTS: (
        ("slot", "one request from its arrival until nothing of it is left"),
        ("PROMPT", "its prompt: blocks found in G1, G2, G3, then computed, then still to do"),
        ("OPS", "its copies that have not ended"), ("need", "those with trouble first, then those that wait"), *_LIFE,
    ),
    SLOT: (
        ("LIFE", "its states over time, below them its copies"), ("queued", "the copy waits; wire: it moves"),
        ("to do", "prompt blocks that are neither found nor computed"), *_LIFE,
    ),
    TIMELINE: (
        ("cell", "one column: how much time it stands for"),
        ("gap", "events that are not known; nothing is drawn there"),
        ("past its limit", "longer in one state than 4 × what 99 of 100 need"), *_LIFE,
    ),
    TRANSFERS: (
        ("queued", "waits for its link; moving: on it"), ("p50 p99", "half, and 99 of 100, took no longer"),
        ("promoted", "decided: places are reserved, the copy runs or waits for its link"),
        ("skipped", "decided against; the reason says why"), ("RANKS", "workers that reported, of all"),
        ("OP", "number of the copy"),
    ),
    TIERS: (
        _TIERS, ("referenced", "in use by a live request"), ("writing", "being copied in"),
        ("cached", "kept for whoever asks for it again"), ("hit", "found here, of the blocks asked for here"),
        ("thrash", "of the blocks evicted in the last minute, share that came back within the window"),
        ("again", "time from an eviction until a prompt asked for the block again; short: the tier is too small"),
        ("BOUND", "what the best possible eviction would have reached"),
    ),
    BREAKS: (
        ("SITE", "where a request can be stopped: a move between states, a copy, an eviction"),
        ("HOLDS", "requests that stand still; each goes on by itself when its time is over"),
        ("allowed", "so many at most, so that a debugger never stops a service"),
    ),
    RECORD: (
        ("written", "survives when the daemon is killed"), ("synced", "survives when the power fails"),
        ("lost hits", "blocks that were found and gone before they could be used"),
        ("thrash", "blocks that came back within the window after their eviction"),
        ("epoch", "resets of the cache so far"),
        ("rejected", "calls that the core refused"),
    ),
    LOG: (
        ("seq", "number of the event; none is missing between two"),
        ("stimulus", "number of the call that caused it: equal ones happened at once"),
        ("op", "a copy; candidate: one that is planned"),
    ),
    WARNINGS: (("limit", "from where on it is a warning"), ("evidence", "what was measured, and since which event")),
    WHY: (
        ("never_stored", "nobody had computed this block before"), ("evicted", "it had been there and gave its place"),
    ),
}
