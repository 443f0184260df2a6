"""The prefix map on the screen: its boxes, its figures, its keys, its files, on requests and on event streams.

Law of this file: each figure is recounted from the recording, without the map.
"""

import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbm_console.analysis.prefix_map import PrefixMap
from kvbm_console.core import events as ev
from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_hashes, unpack_ids
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.state import CacheState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.tui.desks import FakeActions, desk_of, everything
from tests.tui.script import Script, connected
from tui.desk import PREFIXES, Desk
from tui.draw.flame import BLOCKS, CACHED, GONE, REQUESTS, Box, Layout, figures, lay_out
from tui.keys import press
from tui.theme import THEMES, Theme

RUN = Path(__file__).resolve().parents[2] / "recordings" / "screens" / "run.mcap"


def state_with(near: set[int], far: set[int]) -> CacheState:
    state = CacheState()
    for index, (tier, keys) in enumerate(((Tier.G1, near), (Tier.G2, far))):
        state.apply(ev.PoolKnown(index, 0, 0, index, 0, 0, 0, tier, "m", 64, 16, Authority.LEADER))
        state.pools[index].by_hash = dict(zip(sorted(keys), range(64), strict=False))
    return state


def chain(letters: list[int]) -> list[int]:
    """Hashes over the whole prefix."""
    return [hash(tuple(letters[: end + 1])) % (1 << 63) + 1 for end in range(len(letters))]


def own(box: Box) -> int:
    """The weight of a box that goes on below it."""
    return sum(below.weight for below in box.below)


@settings(max_examples=60)
@example([[2, 1, 2, 0, 0, 2, 2, 2], [2, 1, 2, 0, 0, 2, 2, 2, 1]], 1, 1, CACHED)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=40), st.integers(1, 30), st.integers(1, 12),
    st.sampled_from([REQUESTS, BLOCKS, CACHED]),
)
def test_nothing_is_dropped_silently(prompts: list[list[int]], cells: int, rows: int, by: str) -> None:
    forest = PrefixMap()
    for slot, letters in enumerate(prompts):
        forest.opened(slot, f"r{slot}", pack_hashes(chain(letters)), slot)
    keys = sorted(forest.node_of)
    state = state_with(set(keys[::3]), set(keys[1::3]) | {5})
    layout = lay_out(forest, state, cells, rows, by=by)
    assert layout.drawn_blocks + layout.folded_blocks + layout.unused_blocks == len(keys)
    assert layout.unknown_blocks == 1
    level: dict[int, list[Box]] = defaultdict(list)
    for box in layout.boxes:
        level[box.level].append(box)
        assert own(box) <= box.weight
        assert len(box.lies) == (box.blocks if not box.folded else sum(1 for _ in box.lies))
        assert box.parent is None or box.parent.x <= box.x <= box.end <= box.parent.end
        if by == REQUESTS and not box.folded:
            first = box.nodes[0].hashes[0]
            assert box.weight == sum(first in chain(letters) for letters in prompts)
    for boxes in level.values():
        boxes.sort(key=lambda box: (box.x, box.end))
        assert all(left.end <= right.x for left, right in pairwise(boxes)), "boxes do not overlap"
    if layout.boxes:  # by cached blocks, what ends without one is not drawn
        held = set(keys[::3]) | set(keys[1::3])
        counts = held if by == CACHED else set(keys)
        least = max(at for letters in prompts for at, key in enumerate(chain(letters), 1) if key in counts)
        assert least <= layout.deepest <= max(map(len, prompts))


def test_one_long_prompt_does_not_decide_the_scale() -> None:
    forest = PrefixMap()
    for slot in range(30):
        forest.opened(slot, f"r{slot}", pack_hashes(chain([slot] * (400 if slot == 7 else 4))), slot)
    layout = lay_out(forest, state_with(set(), set()), 6, 12)
    assert layout.scale == 1
    assert [(box.folded, box.blocks) for box in layout.boxes] == [(True, 4)]
    assert (layout.deepest, layout.deeper) == (400, 1)


@pytest.mark.parametrize(("long", "told"), [(1, "1 request goes deeper"), (2, "2 requests go deeper")])
def test_prompts_that_reach_below_the_picture_are_counted(long: int, told: str) -> None:
    script = Script()
    for number in range(60):
        script.open(f"r{number}", 400 if number < long else 4)
    one = desk_of(script)
    press(one, "p")
    assert f"{told} " in everything(one, 120, 40).replace("\n", " \n")


# --- the figures of a box, recounted ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk() -> Desk:
    recording = Recording.open(RUN)
    events = [event for batch in recording.events() for event in batch]
    desk = desk_of(
        items=[connected(recording=True), SnapshotTaken(CacheState()), EventsArrived(events)], late_ns=0,
        actions=FakeActions())
    press(desk, "p")
    return desk


def layout_of(desk: Desk, cells: int = 100, rows: int = 60) -> Layout:
    return lay_out(desk.mirror.prefixes, desk.mirror.facts, cells, rows)


def test_who_uses_it_who_evicted_it_what_its_loss_cost_and_how_long_it_lay(desk: Desk) -> None:
    recording = Recording.open(RUN)
    events = [event for batch in recording.events() for event in batch]
    names: dict[int, str] = {}
    prompts: dict[int, set[int]] = defaultdict(set)
    tier: dict[int, Tier] = {}
    ready: dict[tuple[int, int], int] = {}
    evicted: dict[tuple[Tier, int], tuple[str | None, int]] = {}
    for e in events:
        match e:
            case ev.PoolKnown():
                tier[e.pool] = e.tier
            case ev.SlotOpened():
                names[e.slot] = e.request
                prompts[e.slot].update(unpack_hashes(e.hashes))
            case ev.BlocksFilled():
                at = 0
                for slot, count in zip(e.slots, e.counts, strict=True):
                    prompts[slot].update(unpack_hashes(e.hashes)[at : at + count])
                    at += count
                ready.update(((e.pool, place), e.at_ns) for place in unpack_ids(e.ids))
            case ev.BlocksReady():
                ready.update(((e.pool, place), e.at_ns) for place in unpack_ids(e.ids))
            case ev.BlocksEvicted():
                who = None if e.for_slot is None else names[e.for_slot]
                for place, key in zip(unpack_ids(e.ids), unpack_hashes(e.hashes), strict=True):
                    evicted[tier[e.pool], key] = who, e.at_ns - ready[e.pool, place]
            case _:
                pass
    users = desk.mirror.prefixes.users_by_node()
    state = recording.state_at(recording.last_seq)
    boxes = [box for box in layout_of(desk).boxes if not box.folded]
    assert len(boxes) > 20
    for box in boxes:
        known = figures(desk.mirror.prefixes, desk.mirror.facts, box, users)
        keys = [key for node in box.nodes for key in node.hashes]
        nearest = Counter(
            next((pool.info.tier for pool in sorted(state.pools, key=lambda pool: pool.info.tier)
                  if key in pool.hash_of), GONE) for key in keys)
        assert known.lies == dict(nearest)
        assert sorted(user.request for user in known.users) == sorted(
            names[slot] for slot, prompt in prompts.items() if keys[-1] in prompt)
        groups: dict[tuple[Tier, str | None], list[int]] = defaultdict(list)
        for (one, key), (who, lay_ns) in evicted.items():
            if key in keys:
                groups[one, who].append(lay_ns)
        assert Counter({(each.tier, each.request): each.blocks for each in known.culprits}) == Counter(
            {group: len(lay) for group, lay in groups.items()})
        for each in known.culprits:
            lay = sorted(groups[each.tier, each.request])
            assert each.lay_ns == lay[(len(lay) - 1) // 2]


def test_a_lost_block_is_a_seam_and_has_a_cost(desk: Desk) -> None:
    forest = desk.mirror.prefixes
    lost = [box for box in layout_of(desk, 400, 200).boxes if box.lost]
    assert lost, "the run has blocks that were evicted and asked for again"
    desk.view.chosen = lost[0].key  # type: ignore[attr-defined]
    desk.view.panel = True  # type: ignore[attr-defined]
    text = everything(desk, 200, 60)
    known = figures(forest, desk.mirror.facts, lost[0], forest.users_by_node())
    assert f"{known.lost_blocks} block" in text
    assert f"{known.lost_times * 16:,} tokens computed again" in text


# --- keys, files, looks ----------------------------------------------------------------------------------------------


def test_keys_move_open_zoom_and_come_back(desk: Desk) -> None:
    view = desk.views[PREFIXES] = type(desk.views[PREFIXES])()
    first = everything(desk)
    assert "0 to 15 of the prompt" in first
    press(desk, "down")
    inner = everything(desk)
    assert "16 to" in inner
    press(desk, "l")
    assert everything(desk) != inner
    press(desk, "h")
    assert everything(desk) == inner
    press(desk, "enter")
    assert "used by" in everything(desk)
    press(desk, "escape")
    press(desk, "z")
    assert "zoomed in 1×" in everything(desk, 120, 40)
    press(desk, "escape")
    assert everything(desk) == inner
    press(desk, "up")
    assert everything(desk) == first
    press(desk, "o")
    assert "width = blocks" in everything(desk)
    press(desk, "-")
    press(desk, "0")
    press(desk, "o")
    assert everything(desk) == first
    desk.select("s021-t3")
    assert everything(desk) != first, "the box of the selected request is chosen"
    desk.select(None)
    assert view.rows(desk) is not None
    press(desk, "escape")
    assert desk.current != PREFIXES
    press(desk, "p")


def test_files_have_every_node_and_a_title_for_every_box(desk: Desk) -> None:
    table = desk.view.rows(desk)
    assert table is not None
    header, rows = table
    assert sum(int(row[header.index("blocks")]) for row in rows) == len(desk.mirror.prefixes.node_of)
    root = ET.fromstring(desk.view.picture(desk) or "")
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(lay_out(desk.mirror.prefixes, desk.mirror.facts, 1_200, 900, scale=1).boxes)
    assert any(re.search(r"^16 blocks, 0 to 15 of the prompt\nlies now: .*\nused by \d+ requests: ", title)
               for title in titles)
    assert {"width", "height", "viewBox"} <= set(root.attrib)


@pytest.mark.parametrize("theme", THEMES)
def test_every_theme_knows_every_pixel(desk: Desk, theme: str) -> None:
    styles = Theme(theme)
    roles = {span.role for line in desk.draw(200, 60) for span in line.spans if span.role.startswith("map:")}
    assert len(roles) > 8
    seen = {styles.style(role) for role in roles}
    assert len(seen) > (3 if theme != "none" else 0)


def test_without_colours_textures_tell_the_tiers(desk: Desk) -> None:
    plain = desk_of(items=[], late_ns=0, ascii_only=True)
    plain.mirror = desk.mirror
    press(plain, "p")
    text = everything(plain)
    assert {"1", "2", "3"} <= set("".join(row[6:] for row in text.splitlines()[5:15]))
    assert text.isascii() or "×" in text


# --- event streams: chains with parents, and no request --------------------------------------------------------------


def test_an_event_stream_has_a_map_of_its_chains() -> None:
    a, b = chain([1, 2, 3, 4, 5, 6]), chain([1, 2, 3, 9, 9])
    events: list[ev.Event] = [
        ev.PoolKnown(0, 0, 0, 0, 1, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM),
        ev.BlocksSeen(1, 10, 1, 0, pack_hashes(a), b"", False, pack_ids([6]), pack_hashes([0])),
        ev.BlocksSeen(2, 20, 2, 0, pack_hashes(b[3:]), b"", False, pack_ids([2]), pack_hashes([b[2]])),
        ev.BlocksSeen(3, 30, 3, 0, b"", pack_hashes(a[4:]), False),
        ev.BlocksSeen(4, 40, 4, 0, pack_hashes(a[4:5]), b"", False, pack_ids([1]), pack_hashes([a[3]])),
    ]
    desk = desk_of(items=[connected(), SnapshotTaken(CacheState()), EventsArrived(events)], late_ns=0)
    press(desk, "p")
    text = everything(desk)
    assert "width = cached blocks" in text
    assert "3 blocks, 0 to 2 of the prompt" in text
    [top, left, right] = layout_by_blocks(desk).boxes
    assert [top.blocks, left.blocks, right.blocks] == [3, 3, 2]
    assert bytes(left.lies) == bytes([Tier.G1, Tier.G1, GONE])
    known = figures(desk.mirror.prefixes, desk.mirror.facts, left, {})
    assert (known.lost_blocks, known.lost_times) == (1, 1), "a stored block that was removed before was asked for again"
    assert [(each.tier, each.blocks, each.lay_ns) for each in known.culprits] == [(Tier.G1, 2, 20)]


def layout_by_blocks(desk: Desk) -> Layout:
    return lay_out(desk.mirror.prefixes, desk.mirror.facts, 60, 20, by=BLOCKS)


def test_a_snapshot_of_a_stream_brings_its_chains() -> None:
    state = CacheState()
    state.apply(ev.PoolKnown(0, 0, 0, 0, 1, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM))
    keys = chain([1, 2, 3, 4])
    state.apply(ev.BlocksSeen(1, 10, 1, 0, pack_hashes(keys), b"", False, pack_ids([4]), pack_hashes([0])))
    desk = desk_of(items=[connected(), SnapshotTaken(state)], late_ns=0)
    assert [node.hashes for node in desk.mirror.prefixes.nodes()] == [keys]


def test_a_stream_is_drawn_by_its_cached_blocks_however_many_were_evicted() -> None:
    system, kept = chain([1, 2, 3]), chain([1, 2, 3, 4, 5])
    gone = [chain([1, 2, 3, 100 + number, 7, 7])[3:] for number in range(400)]
    events: list[ev.Event] = [
        ev.PoolKnown(0, 0, 0, 0, 1, 0, 0, Tier.G1, "GPU", None, 16, Authority.STREAM),
        ev.BlocksSeen(1, 10, 1, 0, pack_hashes(kept), b"", False, pack_ids([5]), pack_hashes([0])),
    ]
    for keys in gone:
        at = len(events)
        events.append(ev.BlocksSeen(at, 10 * at, at, 0, pack_hashes(keys), b"", False, pack_ids([3]),
                                    pack_hashes([system[2]])))
        events.append(ev.BlocksSeen(at + 1, 10 * at, at, 0, b"", pack_hashes(keys), False))
    desk = desk_of(items=[connected(), SnapshotTaken(CacheState()), EventsArrived(events)], late_ns=0)
    press(desk, "p")
    text = everything(desk)
    assert "width = cached blocks" in text
    assert "1 row = 2 blocks" in text, "the title is whole at 80 columns"
    assert "5 blocks drawn" in text
    assert "1,200 blocks of prompts that no tier has" in text
    assert "3 blocks, 2 behind" in text
    assert "more" not in text
    press(desk, "o")
    assert "1,202 folded" in everything(desk)
