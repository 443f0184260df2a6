"""The log: what a row cuts stands whole below the list, and folding equal rows never loses one."""

import itertools
import re
from collections import deque

import pytest

from kvbm_console.core.events import CandidatePlanned, Event, Noted, SlotMoved
from kvbm_console.core.ids import Note
from kvbm_console.core.state import CacheState
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken
from tests.tui.desks import desk_of, screen
from tests.tui.script import MS, Mono, S, Script, connected, story
from tui.desk import LOG, Desk
from tui.keys import press
from tui.model.events import EVENTS, kind_role, kind_words
from tui.model.filters import Filter
from tui.views.log import KIND_CELLS


def log_of(events: int, gap_ns: int) -> tuple[Desk, Script]:
    """A log that follows so many iterations, three of four in a row, one this long after the other."""
    script, mono = Script(), Mono()
    script.pools()
    slot = script.open("chat-1")
    for number in range(events):
        script.wait(gap_ns)
        if number % 4 == 3:
            script.plan(slot)
        else:
            script.iterate()
    desk = desk_of(mono=mono, late_ns=0, items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)])
    desk.current = LOG
    return desk, script


@pytest.mark.parametrize("width", [80, 120, 200])
def test_equal_rows_fold_while_nobody_could_read_them_and_every_event_is_counted(width: int) -> None:
    desk, script = log_of(800, MS)
    rows = [row for row in screen(desk, width, 30)[3:-1] if row]
    seqs = [int(re.search(r"([\d,]+)", row[14:]).group(1).replace(",", "")) for row in rows]  # type: ignore[union-attr]
    more = [int(found.group(1)) if (found := re.search(r"\+(\d+)  ", row)) else 0 for row in rows]
    assert max(more) == 2
    for (before, after), folded in zip(itertools.pairwise(seqs), more[1:], strict=True):
        assert after - before == folded + 1
    assert seqs[-1] == script.state.seq - 1
    press(desk, "k")  # whoever stops it reads single events
    assert not any("+2  " in row for row in screen(desk, width, 30))


def test_a_note_without_a_detail_ends_with_its_name() -> None:
    script = Script()
    script.emit(Noted, Note.SHUTTING_DOWN, "")
    desk = desk_of(items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)])
    desk.current = LOG
    assert any(row.endswith(" shutting down") for row in screen(desk, 80, 24))


@pytest.mark.parametrize("kind", sorted(Event.__subclasses__(), key=lambda kind: kind.__name__))
def test_no_kind_is_cut_in_a_narrow_row(kind: type[Event]) -> None:
    assert len(kind_words(kind)) <= KIND_CELLS


def test_the_rest_of_a_row_begins_behind_the_widest_kind() -> None:
    script = Script()
    script.pools()
    slot = script.open("chat-1")
    script.admit(slot)
    desk = desk_of(items=[connected(), SnapshotTaken(CacheState()), EventsArrived(script.events)])
    desk.current = LOG
    assert any("device blocks assigned chat-1" in row for row in screen(desk, 80, 24))


def test_a_quiet_log_does_not_fold() -> None:
    desk, _ = log_of(40, MS)
    assert not any(re.search(r"\+\d+  ", row) for row in screen(desk, 120, 30))


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (120, 40), (200, 60)])
def test_the_chosen_event_stands_whole_below_the_list(size: tuple[int, int]) -> None:
    desk = desk_of()
    desk.current = LOG
    for event in list(desk.mirror.log)[-30:]:
        desk.event = event.seq
        text = " ".join(" ".join(row.split()) for row in screen(desk, *size)[-7:])
        assert type(event).__name__ in text
        assert f"stimulus {event.cause:,}" in text
        assert f"engine {event.at_ns // S}." in text
    assert "…" not in text or size[0] < 80


def test_hashes_of_the_chosen_event_are_those_of_the_event() -> None:
    script = story()
    desk = desk_of(script)
    desk.current = LOG
    event = next(event for event in desk.mirror.log if type(event).__name__ == "SlotOpened")
    desk.event = event.seq
    assert "hashes 0000000000000001" in "\n".join(screen(desk, 120, 40))


def flow(desk: Desk, script: Script, events: int) -> None:
    """So many more events arrive, a millisecond apart."""
    first = len(script.events)
    for _ in range(events):
        script.wait(MS)
        script.iterate()
    desk.mirror.take(EventsArrived(script.events[first:]), desk.mono())


def test_the_oldest_page_is_never_blank_while_events_flow_on() -> None:
    desk, script = log_of(400, MS)
    desk.mirror.log = deque(desk.mirror.log, maxlen=600)
    press(desk, "g")
    for _ in range(4):
        flow(desk, script, 300)
        rows = screen(desk, 80, 24)
        assert "stopped" in rows[2]
        assert f"{len(desk.mirror.log):,} kept" in rows[2]
        first = desk.mirror.log[0].seq
        assert f" {first:,} " in rows[3], rows
        assert all(f" {first + at:,} " in row for at, row in enumerate(rows[3:20])), rows


def test_a_filter_on_the_oldest_page_goes_on_to_what_matches() -> None:
    desk, script = log_of(40, MS)
    flow(desk, script, 1_000)
    press(desk, "g")
    desk.filters[LOG] = Filter.parse("seq > 500", EVENTS)
    rows = screen(desk, 80, 24)
    assert " 501 " in rows[3], rows
    desk.filters[LOG] = Filter.parse("kind = SlotHeld", EVENTS)
    text = "\n".join(screen(desk, 80, 24))
    assert "events around here match" in text
    press(desk, "G")
    kept = len(desk.mirror.log)
    text = "\n".join(screen(desk, 80, 24))
    assert f"0 of the newest {kept:,} events match" in text
    assert f"{kept:,} kept, 1." in text
    assert "looking for older ones" in text


STEADY_ROW = re.compile(r"^ +([\d,]+) +· (.*\d.*)$")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_steady_kinds_share_a_row_and_every_event_is_counted(width: int) -> None:
    desk, script = log_of(60, MS)
    press(desk, "z")
    rows = [row for row in screen(desk, width, 40)[3:-1] if row]
    total = 0
    for row in rows:
        found = STEADY_ROW.match(row)
        total += sum(int(number) for number in re.findall(r"[a-z] (\d+)", found[2])) if found else 1
    first = next(int(found[1]) for row in rows if (found := re.search(r" ([\d]+)  ?[a-z]", row)))
    assert any(STEADY_ROW.match(row) for row in rows)
    assert total >= script.state.seq - first
    press(desk, "z")
    assert not any(STEADY_ROW.match(row) for row in screen(desk, width, 40))


def test_n_finds_the_matches_of_the_last_filter_in_the_whole_list() -> None:
    desk, script = log_of(60, MS)
    planned = [event.seq for event in script.events if isinstance(event, CandidatePlanned)]
    for key in ("/", *"kind = CandidatePlanned".replace(" ", "\0"), "enter"):
        press(desk, "space" if key == "\0" else key)
    screen(desk, 120, 30)
    press(desk, "escape")
    assert LOG not in desk.filters
    screen(desk, 120, 30)
    for wanted in reversed(planned[-3:]):
        press(desk, "N")
        assert desk.event == wanted
        assert len([row for row in screen(desk, 120, 30) if "iteration advanced" in row]) > 3  # what is around it
    press(desk, "n")
    assert desk.event == planned[-2]
    for _ in planned:
        press(desk, "n")
    assert "no later match" in screen(desk, 120, 30)[-1]


def test_a_kind_has_the_colour_of_its_meaning() -> None:
    desk = desk_of()
    roles = {type(event).__name__: kind_role(event, desk.mirror) for event in desk.mirror.log}
    assert roles["SlotHeld"] == "held"
    assert roles["IterationAdvanced"] == "faint"
    moves = {kind_role(event, desk.mirror) for event in desk.mirror.log if isinstance(event, SlotMoved)}
    assert {"state.prefilling", "state.decoding"} <= moves


def test_a_cause_that_the_filter_hides_is_told() -> None:
    for text in ('request = "nosuch"', "kind = IterationAdvanced"):
        desk = desk_of()
        desk.filters[LOG] = Filter.parse(text, EVENTS)
        for key in ("9", "2", "down", "["):
            press(desk, key)
            rows = screen(desk, 80, 24)
        assert desk.event is not None
        assert rows[-1] == f" seq {desk.event:,} is hidden by the filter of the log; esc clears it"
        press(desk, "escape")
        assert f" seq {desk.event:,}  " in "\n".join(screen(desk, 80, 24)), "the event stays chosen"
