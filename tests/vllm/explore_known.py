"""Connectors that the exploration of the newest release is tested with, and its findings there.

Law of this file: REFERENCE.md of ``explore`` describes each finding. Another verdict is a new finding or a false
alarm.
"""

from typing import Any, Final

from kvbm_console.explore.scenario import BLOCK, PROFILES

OFFLOADING: Final[dict[str, Any]] = {"kv_connector": "OffloadingConnector"}
ARC: Final[dict[str, Any]] = {**OFFLOADING, "kv_connector_extra_config": {"eviction_policy": "arc"}}
SIMPLE: Final[dict[str, Any]] = {"kv_connector": "SimpleCPUOffloadConnector"}
MULTI: Final[dict[str, Any]] = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{**one, "kv_role": "kv_both"} for one in (OFFLOADING, SIMPLE)]},
}
SYNC: Final[dict[str, Any]] = {**OFFLOADING, "kv_connector_extra_config": {"sync_load_budget_bytes": 2**20}}
ANSWERS: Final[dict[str, Any]] = {**OFFLOADING, "kv_connector_extra_config": {"offload_prompt_only": False}}
CHUNKS: Final[dict[str, Any]] = {**OFFLOADING, "kv_connector_extra_config": {"block_size": 4 * BLOCK}}
TIERS: Final[dict[str, Any]] = {**OFFLOADING, "kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}]}}
NIXL: Final[dict[str, Any]] = {"kv_connector": "NixlConnector"}
EXAMPLE: Final[dict[str, Any]] = {"kv_connector": "ExampleConnector"}
DECODE_BENCH: Final[dict[str, Any]] = {"kv_connector": "DecodeBenchConnector"}
MOONCAKE: Final[dict[str, Any]] = {"kv_connector": "MooncakeConnector"}
STORE: Final[dict[str, Any]] = {"kv_connector": "MooncakeStoreConnector"}
LMCACHE: Final[dict[str, Any]] = {"kv_connector": "LMCacheMPConnector"}
CONNECTORS: Final = {"lru": OFFLOADING, "arc": ARC, "sync": SYNC, "answers": ANSWERS, "chunks": CHUNKS, "tiers": TIERS,
                     "simple": SIMPLE, "multi": MULTI, "nixl": NIXL}
CLEARED: Final = "truth of answers: device events"
"""A reset of SimpleCPUOffloadConnector publishes AllBlocksCleared, which names no medium."""
OWN_RESERVATION: Final = "progress: deadlock with all blocks free"
"""After a failed load a request waits for the blocks that are reserved for itself."""
UNCOUNTED: Final = "progress: deadlock with a loaded request that is not scheduled"
"""The reservation of a loaded request counts the blocks of a sliding window as they will be, not as they are."""
BEHIND_IT: Final = {UNCOUNTED, "bounded wait: ask again without end"}
"""The same with a loaded request behind it, or with requests that wait for its load."""
AGAIN: Final = "bounded wait: failed loads without end"
"""After a load whose first block failed, the connector offers the same blocks again (vllm-project/vllm#55297)."""
DISPLACED: Final = "bounded wait: brought again without end"
"""The chunks that a waiting request brings from files displace each other in the host tier."""
TWICE: Final = "no crash: AssertionError in scheduler.reset_cache"
"""OffloadingConnector asserts that its cache is not reset twice before a step, with copies in flight."""
NOT_REMOVED: Final = "truth of answers: host events"
"""A reset of the connector's cache publishes no removal of the host blocks."""
TOLD_AS_CACHED: Final = "truth of answers: cached tokens"
"""After a failed load the tokens that did not come are told to the user as cached."""
STORED_AGAIN: Final = "right content: written by load"
"""After a reset of the connector's cache it stores places again that have left the window of a running request."""
TORN: Final = STORED_AGAIN + ", torn store"
"""The same where the store ends after the place was written."""
READMITTED: Final = "no crash: AssertionError in scheduler.build_connector_meta"
"""MooncakeStoreConnector forgets a request that is preempted by a reset and admitted in the next step."""
WITH_PEERS: Final = ("nixl", "mooncake")
CHUNKED: Final = {STORED_AGAIN, STORED_AGAIN + ", incomplete block"}
"""ExampleConnector stores a whole prompt in the first step of its chunked prefill."""
RESETS: Final = [name for name, shape in PROFILES.items() if shape.resets]


def known(name: str, profile: str) -> set[str]:
    """The signatures of the newest release that are known, for a connector and a profile."""
    if name in ("example", "decode bench"):
        return CHUNKED if name == "example" else set()
    if name == "mooncake store":
        more = {AGAIN, TOLD_AS_CACHED, OWN_RESERVATION} if profile == "failures" else set()
        return {READMITTED, *BEHIND_IT, *more} if profile in RESETS else set()
    found = {NOT_REMOVED} if profile in RESETS and name not in ("multi", *WITH_PEERS) else set()
    if profile in RESETS and name in ("simple", "multi"):
        found |= {CLEARED}
    if profile == "failures":
        found |= {OWN_RESERVATION, *BEHIND_IT, TOLD_AS_CACHED, AGAIN}
    if name == "tiers":
        found |= {DISPLACED}
    if profile == "hybrid" and name in ("simple", "multi"):
        found |= {UNCOUNTED}
    if profile == "reset" and name not in ("simple", *WITH_PEERS):
        found |= {TWICE}
    if profile == "hybrid" and name != "simple":
        found |= {"right content: written by nobody" if name in WITH_PEERS
                  else STORED_AGAIN if name in ("chunks", "tiers") else TORN}
    return found
