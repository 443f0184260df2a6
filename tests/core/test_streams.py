"""Pools that an event stream describes: whatever it says, the leader stays sound (a lint, never an exception)."""

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.ids import Authority, ResetMode, Tier

from .engine_model import BLOCK, hashes_of
from .script import Script

STREAM = 2


def followed(tier: Tier = Tier.G2, capacity: int | None = 4) -> tuple[Script, int]:
    """A leader that follows the stream of another engine; the index of its pool."""
    script = Script(g2=0)
    script.tell(st.PoolDeclared, 0, 0, tier, "CPU", capacity, BLOCK, Authority.STREAM, source=STREAM)
    script.checks = False  # the oracles know nothing of what other engines hold
    return script, len(script.state.pools) - 1


def report(script: Script, pool: int, stored: str = "", removed: str = "", *, cleared: bool = False) -> None:
    script.tell(st.BlocksReported, pool, pack_hashes(hashes_of(stored)), pack_hashes(hashes_of(removed)), cleared,
                source=STREAM)


def test_more_than_the_pool_holds_makes_what_was_known_void() -> None:
    script, pool = followed()
    report(script, pool, "abc")
    report(script, pool, "xyz")
    assert not script.rejected
    assert set(script.state.pools[pool].by_hash) == set(hashes_of("xyz"))
    assert [type(event) for event in script.last] == [ev.BlocksSeen, ev.SourceLost]
    assert script.state.lost_sources[STREAM] == 1


def test_what_is_removed_in_the_same_report_makes_room() -> None:
    script, pool = followed()
    report(script, pool, "abc")
    report(script, pool, "xyz", "abc")
    assert set(script.state.pools[pool].by_hash) == set(hashes_of("xyz"))
    assert not script.state.lost_sources
    report(script, pool, "mnop", cleared=True)
    assert set(script.state.pools[pool].by_hash) == set(hashes_of("mnop"))
    assert not script.state.lost_sources


def test_removals_of_what_is_not_there_make_no_room() -> None:
    script, pool = followed()
    report(script, pool, "abc")
    report(script, pool, "xyz", "mnopq")
    assert script.state.lost_sources[STREAM] == 1


def test_a_pool_of_unknown_capacity_grows() -> None:
    script, pool = followed(capacity=None)
    for word in ("abc", "xyz", "mnop"):
        report(script, pool, word)
    assert script.state.pools[pool].resident_blocks == 10


def test_a_streams_device_pool_takes_no_requests() -> None:
    script, pool = followed(Tier.G1)
    script.tell(st.RequestArrived, "a", pack_hashes(hashes_of("ab")), 9, 9, 0, None, source=STREAM)
    script.tell(st.BlocksAllocated, "a", pack_ids([0, 1, 2]), 0, source=STREAM)
    assert "no G1 pool of its own" in script.why
    report(script, pool, "abcd")
    script.tell(st.ResetRequested, ResetMode.LOGICAL, source=0)
    assert script.state.pools[pool].resident_blocks == 4, "its engine still holds them"
