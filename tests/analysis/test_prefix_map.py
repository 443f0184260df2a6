"""The prefix map against plain recounts: of random prompts, and of every committed recording.

Law of this file: a recount knows no tree. It keeps sets and lists of hashes by request and by tier.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm_console.analysis.prefix_map import BLOCKS_MAX, MapNode, PrefixMap, adopt
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.tui.script import connected
from tui.model.mirror import Mirror

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
PATHS = [*sorted(RECORDINGS.glob("*.mcap")), RECORDINGS / "screens" / "run.mcap"]
S = 1_000_000_000


def chain(parent: int, letter: int) -> int:
    """A hash over the whole prefix, as real ones are."""
    return hash((parent, letter)) % (1 << 63) + 1


def prompt(letters: list[int], parent: int = 0) -> list[int]:
    keys = []
    for letter in letters:
        parent = chain(parent, letter)
        keys.append(parent)
    return keys


def check(forest: PrefixMap) -> None:
    """Each block is in one node, and the nodes form a forest."""
    found: list[int] = []
    for node in forest.nodes():
        assert node.blocks
        found += node.hashes
        assert all(forest.node_of[key] is node for key in node.hashes)
        assert node.parent is not None
        assert node.parent.children[bytes(node.column[:8])] is node
        assert node.depth == sum(each.blocks for each in list(node.path())[1:])
    assert len(found) == len(set(found)) == len(forest.node_of)


def way(node: MapNode) -> list[int]:
    """The hashes from the root to the end of a node."""
    return [key for each in reversed(list(node.path())) for key in each.hashes]


letters = st.lists(st.integers(0, 2), max_size=7)
kinds = st.sampled_from(["open", "fill", "close", "clone"])
steps = st.lists(st.tuples(kinds, st.integers(0, 5), letters), max_size=40)


@given(steps)
def test_nodes_are_what_the_requests_of_the_window_share(steps: list[tuple[str, int, list[int]]]) -> None:
    forest = PrefixMap(window_ns=5 * S)
    live: dict[int, list[int]] = {}
    ended: list[tuple[int, list[int]]] = []
    ever: set[int] = set()
    for second, (what, slot, tail) in enumerate(steps):
        at_ns = second * S
        if what == "close":
            forest.closed(slot, at_ns)
            if slot in live:
                ended.append((at_ns, live.pop(slot)))
        elif what == "fill" and slot in live and tail:
            keys = prompt(tail, live[slot][-1] if live[slot] else 0)
            forest.filled(slot, pack_hashes(keys), at_ns)
            live[slot] += keys
        elif what == "clone" and slot in live and slot + 10 not in live:
            forest.cloned(slot + 10, "clone", slot, at_ns)
            live[slot + 10] = list(live[slot])
        elif what == "open" and slot not in live:
            live[slot] = prompt(tail)
            forest.opened(slot, f"r{second}", pack_hashes(live[slot]), at_ns)
        ever.update(key for keys in live.values() for key in keys)
        check(forest)
        edge = forest.at_ns - 5 * S
        window = [*live.values(), *(keys for ended_ns, keys in ended if ended_ns >= edge)]
        uses = Counter(key for keys in window for key in keys)
        assert set(forest.node_of) == ever
        assert {key: node.uses for key, node in forest.node_of.items() if node.uses} == dict(uses)
        assert {number: way(user.node) for number, user in forest.users.items()} == live


@given(st.lists(st.tuples(letters, st.integers(1, 7)), max_size=12), st.randoms())
def test_chains_of_a_stream_find_their_place_in_any_order(rows: list[tuple[list[int], int]], random: Any) -> None:
    pieces = []
    for tail, size in rows:
        keys = prompt(tail)
        pieces += [(keys[at - 1] if at else 0, keys[at : at + size]) for at in range(0, len(keys), size)]
    random.shuffle(pieces)
    forest = PrefixMap()
    for parent, keys in pieces:
        forest.hang(parent, pack_hashes(keys), 0)
    check(forest)
    for tail, _ in rows:
        keys = prompt(tail)
        if keys:
            assert way(forest.node_of[keys[-1]])[: len(keys)] == keys
    assert not forest.orphans, "every chain is complete in the end"


wrong = st.lists(st.integers(1, 8), min_size=1, max_size=3)
wrong_steps = st.lists(st.tuples(kinds | st.just("hang"), st.integers(0, 8), wrong), max_size=40)


@settings(max_examples=300)
@given(wrong_steps, st.sampled_from([3, 6, 1_000]))
def test_blocks_that_are_told_at_two_places_or_in_a_circle_keep_their_first_place(
    steps: list[tuple[str, int, list[int]]], blocks_max: int
) -> None:
    """An engine or a stream may tell anything. A circle of parents stopped the console for ever."""
    forest = PrefixMap(window_ns=5 * S, blocks_max=blocks_max)
    for second, (what, number, keys) in enumerate(steps):
        before, column = dict(forest.node_of), pack_hashes(keys)
        if what == "hang":
            forest.hang(number, column, second * S)
        elif what == "open":
            forest.opened(number, f"r{second}", column, second * S)
        elif what == "fill":
            forest.filled(number, column, second * S)
        elif what == "clone":
            forest.cloned(number + 10, f"r{second}", number, second * S)
        else:
            forest.closed(number, second * S)
        check(forest)
        assert blocks_max < 1_000 or before.keys() <= forest.node_of.keys()
        users = [*forest.users.values(), *forest.ended]
        uses = Counter(node for user in users for node in user.node.path())
        assert all(node.uses == uses[node] for node in forest.nodes())


def test_a_chain_that_leads_into_its_own_tree_is_left_out() -> None:
    forest = PrefixMap()
    forest.hang(9, pack_hashes([1, 2]), 0)
    forest.hang(2, pack_hashes([3]), 0)
    forest.hang(3, pack_hashes([1]), 0)  # stood in front of itself
    check(forest)
    assert way(forest.node_of[3]) == [1, 2, 3]
    forest.hang(0, pack_hashes([9, 1]), 0)
    assert way(forest.node_of[3]) == [9, 1, 2, 3]


@settings(max_examples=25)
@given(st.lists(letters, min_size=20, max_size=40))
def test_a_full_map_forgets_what_was_used_longest_ago(prompts: list[list[int]]) -> None:
    forest = PrefixMap(window_ns=3 * S, blocks_max=10)
    for second, tail in enumerate(prompts):
        forest.opened(second, f"r{second}", pack_hashes(prompt(tail)), second * S)
        forest.closed(second, second * S)
        check(forest)
        assert len(forest.node_of) <= 10
        assert all(key in forest.node_of for key in prompt(tail))


# --- every committed recording, recounted by sets and lists ----------------------------------------------------------


def stretches(recording: Recording) -> Iterator[tuple[CacheState, list[ev.Event]]]:
    """The facts and the events of each stretch without a gap."""
    state, events = CacheState(), list[ev.Event]()
    for batch in recording.events():
        seq = state.seq + len(events)
        if batch[0].seq != seq:
            yield state, events
            state, events = recording.state_at(batch[0].seq - 1), []
        events += batch
    yield state, events


def recount(events: list[ev.Event]) -> tuple[dict[int, int], dict[Tier, dict[int, int]], Counter[int], Counter[int]]:
    """Uses by hash, the seq of the last eviction by tier and hash, losses by hash, requests by slot path."""
    tier_of: dict[int, Tier] = {}
    resident: dict[int, Counter[int]] = defaultdict(Counter)
    at_place: dict[tuple[int, int], int] = {}
    names: dict[int, list[int]] = {}
    prompts: dict[int, set[int]] = {}
    gone: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
    losses: Counter[int] = Counter()

    def places(column: bytes) -> list[int]:
        return [int.from_bytes(column[at : at + 4], "little") for at in range(0, len(column), 4)]

    def put(pool: int, ids: bytes, hashes: bytes) -> None:
        for place, key in zip(places(ids), unpack_hashes(hashes), strict=True):
            at_place[pool, place] = key
            resident[pool][key] += 1

    def take(pool: int, ids: bytes) -> None:
        for place in places(ids):
            key = at_place.pop((pool, place), None)
            if key is not None:
                resident[pool][key] -= 1

    for e in events:
        match e:
            case ev.PoolKnown():
                tier_of[e.pool] = e.tier
            case ev.SlotOpened():
                names[e.slot] = unpack_hashes(e.hashes)
                prompts[e.slot] = set(names[e.slot])
            case ev.SlotCloned():
                names[e.slot] = list(names[e.parent])
                prompts[e.slot] = set(prompts[e.parent])
            case ev.BlocksFilled():
                put(e.pool, e.ids, e.hashes)
                keys, at = unpack_hashes(e.hashes), 0
                for slot, count in zip(e.slots, e.counts, strict=True):
                    names[slot] += [key for key in keys[at : at + count] if key not in set(names[slot])]
                    prompts[slot].update(keys[at : at + count])
                    at += count
            case ev.BlocksReserved():
                put(e.pool, e.ids, e.hashes)
            case ev.BlocksEvicted():
                take(e.pool, e.ids)
                gone[tier_of[e.pool]].update(dict.fromkeys(unpack_hashes(e.hashes), e.seq))
            case ev.BlocksDropped():
                take(e.pool, e.ids)
            case ev.ResetDone():
                at_place.clear()
                resident.clear()
                gone = {tier: {} for tier in Tier}
            case ev.PrefixScored():
                for key in names[e.slot][sum(e.hits) : e.prompt_blocks]:
                    if any(key in keys for keys in gone.values()) and not any(keys[key] for keys in resident.values()):
                        losses[key] += 1
            case _:
                pass
    uses = Counter(key for keys in prompts.values() for key in keys)
    return dict(uses), gone, losses, Counter(len(keys) for keys in names.values())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_figures_are_those_of_a_recount(path: Path) -> None:
    recording = Recording.open(path)
    mirror = Mirror()
    mirror.take(connected(recording=True), 0)
    state, events = next(stretches(recording))
    mirror.take(SnapshotTaken(state), 0)
    mirror.take(EventsArrived(events), 0)
    forest = mirror.prefixes
    check(forest)
    uses, gone, losses, lengths = recount(events)
    assert events[-1].at_ns < forest.window_ns, "all requests are in the window"
    assert {key: node.uses for key, node in forest.node_of.items()} == uses
    assert {key: eviction.seq for key, eviction in forest.evicted[0].items()} == gone[Tier.G1]
    assert {key: eviction.seq for key, eviction in forest.evicted[1].items()} == gone[Tier.G2]
    assert {key: times for key, (times, _) in forest.lost.items()} == dict(losses)
    everyone = [*forest.users.values(), *forest.ended]
    assert Counter(len(way(user.node)) for user in everyone) == lengths


def test_a_demonstration_has_something_to_show() -> None:
    recording = Recording.open(RECORDINGS / "screens" / "run.mcap")
    _, events = next(stretches(recording))
    uses, _, losses, _ = recount(events)
    assert max(uses.values()) > 20
    assert sum(losses.values()) > 10
    assert len(uses) < BLOCKS_MAX


def test_of_a_pool_larger_than_the_map_the_newest_blocks_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the blocks in front of them. The map does not hang each block of the pool to forget most of them."""
    system, chats = prompt([0, 1]), 200
    state = CacheState()
    state.apply(ev.PoolKnown(0, 0, 0, 0, 1, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM))
    stored = [(system, 0)] + [(prompt([2, chat], system[-1]), system[-1]) for chat in range(chats)]
    for seq, (column, parent) in enumerate(stored, 1):
        new = [key for key in column if key not in state.pools[0].by_hash]
        front = parent if new == column else column[len(column) - len(new) - 1]
        state.apply(ev.BlocksSeen(
            seq, seq * S, 0, 0, pack_hashes(new), b"", False, pack_ids([len(new)]), pack_hashes([front])))
    hung = []
    hang = PrefixMap.hang
    monkeypatch.setattr(PrefixMap, "hang", lambda self, *given: (hung.append(given), hang(self, *given))[1])
    forest = PrefixMap(blocks_max=40)
    adopt(forest, state, 1_000 * S)
    check(forest)
    assert {stored[-1][0][-1], stored[-40][0][-1], *system} <= forest.node_of.keys()
    assert len(forest.node_of) <= 40 + 3
    assert len(forest.node_of) + forest.forgotten_blocks == len(state.pools[0].by_hash)
    assert len(hung) <= 45
