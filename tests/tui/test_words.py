"""Help for somebody who sees the console for the first time: words, examples, lints; whole, and never wrong."""

import re
from pathlib import Path
from typing import get_args

import pytest

from kvbm_console.core import events as ev
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.ids import FinishReason, SlotState
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, FeedItem, SnapshotTaken
from tests.tui.desks import FakeActions, desk_of, everything, screen
from tests.tui.script import BLOCK, Mono, S, Script, connected, story
from tui.desk import BREAKS, HELP, LOG, OVERVIEW, RECORD, SLOT, TIERS, WARNINGS, WHAT_IF, WHY
from tui.keys import press
from tui.model.breaks import parse_breakpoint
from tui.model.events import kind_words
from tui.model.lints import TEXTS
from tui.views import all_views
from tui.views.breaks import EXAMPLES

WORDS = {number: view.words for number, view in enumerate(all_views()) if view.words}
LIFE = {"staged", "onboarding", "preempted", "skipped"}
"""States: on a screen whenever a request is in one."""
ELSEWHERE = {
    "never_stored", "other_context", "evicted", "promoted", "skipped", "allowed", "gap", "past its limit", "need", "OP",
    "op",
    "stimulus", "G3", "seq", "RANKS", "thrash", "limit", "evidence", "to do", "queued", "SITE", "cell", "LIFE",
    "misses", "lane", "waiting", "miss", "long", "wait", "when", "inevitable",
    "PAYS", "CURVE", "kind", "box", "colour", "stay", "kept", "by", "for", "times", "brightness", "seam", "+N", "more",
}
"""Words of views that have something chosen, or of wide screens."""


@pytest.mark.parametrize("view", sorted(WORDS))
def test_every_word_of_the_help_is_on_its_view(view: int) -> None:
    desk = desk_of(story())
    desk.selected = "agent-0003.2"
    desk.current = view
    text = everything(desk, 200, 60) + everything(desk, 80, 24)
    for word, meaning in WORDS[view]:
        assert not meaning.endswith(".")
        for part in word.split() if view not in (WHY, WHAT_IF) else ():
            assert part in text or {word, part} & (ELSEWHERE | LIFE), f"{part!r} is not on view {view + 1}"


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (110, 30), (120, 40), (200, 60)])
@pytest.mark.parametrize("view", range(HELP))
def test_help_is_never_cut(view: int, size: tuple[int, int]) -> None:
    desk = desk_of(story())
    desk.current = view
    desk.help = True
    rows = screen(desk, *size)
    assert not any("…" in row for row in rows[2:-1] if "continue until" not in row)
    if size[1] >= 24:
        assert any(row.startswith(" COLOURS") for row in rows)
        assert any(WORDS[view][0][0] in row for row in rows[3:-2])
    if size == (200, 60):
        text = " ".join(" ".join(row[83:].split()) for row in rows)
        for word, meaning in WORDS[view]:
            assert f"{word}: {meaning}" in text


@pytest.mark.parametrize("typed", [typed for typed, _ in EXAMPLES])
def test_every_example_of_a_breakpoint_is_one(typed: str) -> None:
    assert isinstance(parse_breakpoint(typed), BreakpointSpec)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_without_a_breakpoint_the_view_says_what_one_looks_like(size: tuple[int, int]) -> None:
    script = Script()
    script.pools()
    script.run("chat-1")
    desk = desk_of(script, late_ns=0)
    desk.current = BREAKS
    rows = screen(desk, *size)
    for typed, meaning in EXAMPLES:
        assert any(row.startswith(f" {typed}") for row in rows)
        assert any(meaning in row for row in rows)
    desk = desk_of(script, late_ns=0, read_only=True)
    desk.current = BREAKS
    assert "EXAMPLES" not in everything(desk, *size)


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 40), (200, 60)])
def test_every_lint_that_is_watched_can_be_read_whole(size: tuple[int, int]) -> None:
    script = Script()
    script.pools()
    desk = desk_of(script, late_ns=0)
    desk.current = WARNINGS
    seen: list[str] = []
    for _ in range(100):
        seen += [row for row in screen(desk, *size)[3:-1] if not row.endswith("↓")]
        press(desk, "down")
    text = " ".join(" ".join(dict.fromkeys(seen)).split())
    for lint, told in TEXTS.items():
        assert f"{lint.replace('_', ' ')} " in text
        for word in told.threshold.split():
            assert word in text
    assert "…" not in text


def test_the_window_of_the_hit_rate_is_as_long_as_what_is_known() -> None:
    script = Script()
    script.pools()
    script.run("chat-1")
    desk = desk_of(script, late_ns=0)
    desk.current = OVERVIEW
    assert "hit rate, last 1 s, of 4 prompt blocks" in everything(desk)
    for _ in range(99):
        script.wait(S)
        script.iterate()
    desk = desk_of(script, late_ns=0)
    assert "hit rate, last 60 s, no prompt yet" in everything(desk)


def test_before_the_first_heartbeat_nobody_knows_whether_it_is_recorded() -> None:
    script = Script()
    script.pools()
    items: list[FeedItem] = [connected(), script.snapshot()]
    head = screen(desk_of(items=items, late_ns=0))[0]
    assert head.endswith("rec –")
    head = screen(desk_of(items=[*items, script.heartbeat(recorder=None, synced_age_ns=None)], late_ns=0))[0]
    assert head.endswith("rec off")


def test_the_parts_of_a_prompt_add_up_to_its_full_blocks() -> None:
    script = Script()
    script.pools()
    slot = script.open("chat-1", 12, 5)
    script.admit(slot, (3, 0, 0, 0))
    script.move(slot, SlotState.PREFILLING)
    script.iterate((slot, 7 * BLOCK))
    desk = desk_of(script, late_ns=0)
    desk.select("chat-1")
    desk.current = SLOT
    shown = everything(desk)
    assert "197 tokens, 12 full blocks" in shown
    parts = re.search(r"G1 (\d+) +\S G2 (\d+) +\S G3 –.*computed (\d+) +\S+ to do (\d+)", shown)
    assert parts is not None
    assert sum(map(int, parts.groups())) == 12, parts


def test_a_request_that_still_copies_is_not_told_as_finished() -> None:
    script = Script()
    script.pools()
    slot = script.run("chat-1")
    script.plan(slot)
    script.move(slot, SlotState.FINISHING, reason=FinishReason.STOP)
    desk = desk_of(script, late_ns=0)
    desk.current = RECORD
    assert re.search(r"requests +1 +finished +0 ", everything(desk, 120, 40))


def test_the_legend_of_a_prompt_is_whole_in_the_panel_beside_the_list() -> None:
    script = Script()
    script.pools()
    slot = script.run("chat-1")
    script.iterate(count=90)
    desk = desk_of(script, late_ns=0)
    desk.select("chat-1")
    for view, size in ((1, (120, 40)), (1, (160, 45)), (SLOT, (80, 24)), (SLOT, (120, 40))):
        desk.current = view
        rows = everything(desk, *size)
        assert slot == 0
        assert re.search(r"to do 0 +\+\d+ gen", rows), rows


def test_losses_of_a_recording_are_on_its_first_screen() -> None:
    class Lost:
        first, last, reason, count = 10, 55, "not recorded", 46

    from tests.tui.desks import FakeTape, FakeTransport

    transport = FakeTransport()
    tape = FakeTape()
    tape.gaps = (Lost(),)  # type: ignore[assignment]
    transport.recording = tape
    from kvbm_console.core.state import CacheState
    script = Script()
    script.pools()
    desk = desk_of(items=[connected(recording=True), SnapshotTaken(CacheState()), EventsArrived(script.events)],
                   actions=FakeActions(transport))
    for view in (OVERVIEW, TIERS, RECORD):
        desk.current = view
        assert " lost 46" in screen(desk)[0]


def test_the_recorder_is_told_with_its_file_and_growth_once_it_was_asked() -> None:
    script, mono = Script(), Mono()
    script.pools()
    actions = FakeActions()
    desk = desk_of(items=[connected(), script.snapshot(), script.heartbeat()], mono=mono, late_ns=0, actions=actions)
    desk.current = RECORD
    assert "file" not in everything(desk)
    assert actions.recorder_asked
    for second in range(3):
        mono.at_ns += S
        desk.mirror.sources.tell({"recorder": {"path": "/var/rec/0001.mcap", "bytes": 2**20 * (1 + second)}})
        rows = everything(desk).splitlines()
    assert any(row.split() == ["file", "/var/rec/0001.mcap"] for row in rows)
    assert any(row.split()[:3] == ["size", "3.00", "MiB,"] and row.endswith(" 1.00 MiB/s") for row in rows)
    desk.mirror.sources.tell({"recorder": None, "engines": []})
    assert "file" not in everything(desk)


KINDS = re.compile(r"\b(" + "|".join(kind.__name__ for kind in get_args(ev.AnyEvent)) + r")\b")
PLAIN = {"Frozen", "Noted", "Thawed"}
"""Kinds of one word: they are words."""


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_a_kind_is_told_in_words_and_its_class_name_behind_a_key(size: tuple[int, int]) -> None:
    desk = desk_of(story())
    desk.selected = "agent-0003.2"
    for view in range(HELP):
        desk.current = view
        assert set(KINDS.findall(everything(desk, *size))) <= PLAIN, f"view {view + 1}"
    desk.current = LOG
    press(desk, "up")
    text = everything(desk, *size)
    chosen = desk.mirror.event(desk.event or 0)
    assert chosen is not None
    assert f" seq {chosen.seq}  {type(chosen).__name__}" in text
    assert kind_words(type(chosen)) in text


RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
TAPES = sorted(path for path in RECORDINGS.rglob("*.mcap") if path.parent.name != "versions")
SPELLED = re.compile(r"[A-Za-z]+(?:_[A-Za-z0-9]+)+")
AS_THEY_ARE = {"CPU_PINNED", "KVBM_TAP", "max_queue_size"}
"""A medium as its engine calls it, a variable that a person types, and an engine's own setting."""


@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
def test_no_view_shows_a_name_of_the_code(path: Path) -> None:
    tape = Recording.open(path)
    events = [event for batch in tape.events(tape.first_seq + 1) for event in batch]
    for share in (2, 1):
        some = events[: len(events) // share]
        desk = desk_of(
            items=[connected(recording=True), SnapshotTaken(tape.state_at(tape.first_seq)), EventsArrived(some)],
            late_ns=0)
        slots = desk.mirror.facts.slots.values()
        requests = [slot.request for slot in slots] + [life.request for life in desk.mirror.past]
        for chosen in (None, *requests[:1]):
            desk.selected = chosen
            for view in range(HELP):
                desk.current = view
                for size in ((80, 24), (200, 60)):
                    found = {
                        word for row in screen(desk, *size) for word in SPELLED.findall(row)
                        if word not in AS_THEY_ARE and not any(word in request for request in requests)}
                    assert not found, f"view {view + 1}, at event {desk.mirror.next_seq - 1}"
