"""The desk: the state between model and terminal, which is the view, the selection, prompts and notices.

Law of this file: it is plain state and pure drawing. A key is answered at once from the model. A request to the target
goes to the session, which answers later with a notice. Every frame has exactly the height of the screen.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kvbm_console.analysis.lints import Level
from kvbm_console.analysis.lives import Life
from kvbm_console.core.events import Event
from kvbm_console.core.expression import Schema
from kvbm_console.core.ids import Suspend

from .draw import frame
from .draw.bars import trend
from .draw.frame import Hint, message_line
from .draw.glyphs import UNICODE, Glyphs
from .draw.spans import BLANK, Line, Row, Span, crop, fit
from .draw.table import Table
from .model.clock import Times
from .model.events import concerns
from .model.filters import Filter
from .model.lints import Lints, Warning
from .model.mirror import Mirror
from .model.numbers import S, count, cut, duration, plain, plural, wrap
from .model.places import Mark, Marks, seq_at
from .model.series import from_left
from .model.slots import SlotOrder
from .model.sources import blocks_only
from .model.stops import Stops
from .prompts import Prompt
from .source import TargetSession

TALL_ROWS: Final = 36
"""Height from which there is a blank row under the tabs and between sections, and titles are not tinted."""
WIDTH_MIN: Final = 60
HEIGHT_MIN: Final = 16
NOTICE_NS: Final = 4 * S
HITS_MARKED_MAX: Final = 500
"""Hits drawn on the bar of a recording: more than the bar has cells."""
FINDINGS_MARKED_MAX: Final = 100
"""Findings drawn there, the worst over the others."""
STALE_NS: Final = 2 * S
LAG_NS: Final = S
AGES_FROM: Final = 100
"""Below so many columns the age of sampled facts is told from a second on: the badges need its room."""
LINT_EVERY_NS: Final = S // 4
FAST_RATE: Final = 1_000
"""Events a second above which a person cannot read each of them; tables of numbers then change FAST_HZ times a
second."""
FAST_HZ: Final = 8
COPY_AGAIN_NS: Final = 3 * S
"""``y`` pressed again within this time copies more."""
(
    OVERVIEW, SLOTS, SLOT, TIMELINE, TRANSFERS, TIERS, BREAKS, RECORD, LOG, PREFIXES, WARNINGS, WHY, FINISHED, MISSES,
    WHAT_IF, HELP,
) = range(16)
"""Places of the views in the list that a desk is given."""
TAP: Final = "KVBM_TAP=unix:PATH vllm serve MODEL"
"""The command that loads the tap. README.md describes its package and the daemon at PATH."""


LEVELS: Final = " An event stream names no request. The tap in the engine does: see README."


class View:
    """A view of the desk's state. The defaults fit a view without a list: nothing to filter, export or reveal."""

    schema: Schema | None = None
    """The fields of its filter; None when it has nothing to filter."""
    words: tuple[tuple[str, str], ...] = ()
    """Words on the screen that a newcomer may not know, each with its meaning, the most needed first."""
    needs_requests = ""
    """The sentence in place of a view that stays empty while no engine reports requests."""

    def body(self, desk: "Desk", width: int, height: int) -> list[Line]:
        """The view as at most ``height`` lines of at most ``width - 1`` text cells."""
        raise NotImplementedError

    def streamed(self, desk: "Desk", width: int, height: int) -> list[Line]:
        """The view on a target of event streams alone, if ``needs_requests``: how to get requests."""
        return _no_requests(self.needs_requests, width)

    def hints(self, desk: "Desk") -> list[Hint]:
        """Keys that work here and now, the most useful first."""
        return []

    def rows(self, desk: "Desk") -> Table | None:
        """All rows of its list, on the screen or not; None for a view without a list."""
        return None

    def picture(self, desk: "Desk") -> str | None:
        """The view as SVG, if it draws better than its rows do; None for a picture of the screen."""
        return None

    def reveal(self, desk: "Desk", event: Event) -> bool:
        """Show this event; False when it cannot be shown here."""
        return False

    def press(self, desk: "Desk", key: str) -> bool:
        """Take a key; False when it means nothing here."""
        return False

    def proposal(self, desk: "Desk") -> str:
        """The breakpoint that ``b`` proposes for the choice of this view; empty to propose it for the selected
        request."""
        return ""


class Explains(Protocol):
    """Rows above the keys that explain what is on the screen (``tour``)."""

    def lines(self, desk: "Desk", width: int) -> list[Line]:
        """As many rows in every frame."""
        ...


class Desk:
    """State of one console. ``mono`` and ``wall`` are the local clocks in ns, monotonic and since 1970."""

    def __init__(
        self, mirror: Mirror, actions: TargetSession, mono: Callable[[], int], views: list[View], *,
        glyphs: Glyphs = UNICODE, read_only: bool = False, socket: str = "",
        wall: Callable[[], int] = time.time_ns, utc: bool = False,
    ) -> None:
        self.mirror = mirror
        self.actions = actions
        self.live = actions
        """The session of the target; ``actions`` is another while this console looks back."""
        self.mono = mono
        self.views = views
        self.glyphs = glyphs
        self.read_only = read_only
        self.forests: dict[int, Any] = {}
        """The prefix forest of each source, with the moment of its facts (``views.blocks``)."""
        self.socket = socket
        self.tour: Explains | None = None
        """Rows above the keys that explain the demo's incident; None without a tour."""
        self.wall = wall
        self.times = Times(utc=utc)
        self.lints = Lints()
        self.order = SlotOrder()
        self.current = OVERVIEW
        self.crumbs: list[int] = []
        self.selected: str | None = None
        """The request that all views show."""
        self.filters: dict[int, Filter] = {}
        self.prompt: Prompt | None = None
        self.histories: dict[str, list[str]] = {}
        self.help = False
        self.event: int | None = None
        """The chosen event, shared by the story, the timeline and the log."""
        self.marks = Marks()
        self.targets: list[str] = []
        """Names of all targets of this console. A single target has no row."""
        self.target = 0
        self.copied = 0
        """The last copy of ``y``: 0 the request, 1 its row, 2 the view."""
        self.copied_mono = -COPY_AGAIN_NS
        self.shown: list[Line] = []
        """The rows of the last frame."""
        self.width = 80
        self.height = 24
        self._notice: tuple[str, str, int] | None = None
        self._linted = -LINT_EVERY_NS
        self.warnings: list[Warning] = []
        self._stops = Stops()
        self._paced: dict[str, tuple[tuple[object, ...], list[Line]]] = {}
        """Rows by their name, with the moment for which they were drawn (``paced``)."""
        self._place = mirror.places
        """The place of the tape for which warnings were checked."""
        self._watched: tuple[Lints, Stops] | None = None
        """The watch over the live target, while this console looks back."""

    # --- for the views -----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The view on the screen."""
        return self.views[self.current]

    @property
    def tall(self) -> bool:
        """True if the screen has room for blank rows."""
        return self.height >= TALL_ROWS

    @property
    def present(self) -> Mirror:
        """The target as it is now, also while its past is shown."""
        return self.live.mirror if self.looks_back else self.mirror

    @property
    def silent(self) -> bool:
        """True if the target is gone, or has told nothing for so long that it may stand still."""
        silence = self.present.progress.silence_ns(self.mono())
        return self.present.disconnected is not None or (silence is not None and silence > STALE_NS)

    @property
    def now_ns(self) -> int:
        """The target's time now."""
        return self.mirror.now_ns(self.mono())

    @property
    def rate(self) -> float | None:
        """Events that come in a second of the wall's time; a tape that stands gives none."""
        playback = self.actions.playback
        if self.mirror.state is None:
            return None
        return self.mirror.progress.rate(self.mono()) if playback is None or playback.playing else 0.0

    @property
    def recording(self) -> bool:
        """True if the target is a recording."""
        return self.mirror.connected is not None and self.mirror.connected.recording

    @property
    def looks_back(self) -> bool:
        """True if the past of a live target is shown."""
        return self.actions is not self.live

    @property
    def may_control(self) -> bool:
        """True if keys that act on the target work."""
        return self.actions.control and not self.read_only and not self.recording

    @property
    def hints(self) -> list[Hint]:
        """Keys that work here and now, the most useful first."""
        state = self.mirror.state
        if state is None:
            return [(":", "commands")]
        hidden = self.view.needs_requests and blocks_only(state)
        return [(":", "commands"), ("e", "export")] if hidden else self.view.hints(self)

    def press(self, key: str) -> bool:
        """True if the view took the key. Before the first facts no view is on the screen, and none takes a key."""
        return self.mirror.state is not None and self.view.press(self, key)

    def title(self, name: str, rest: str = "") -> Line:
        """The title of a section."""
        spans = [Span(" ", "text"), Span(name, "title")]
        if rest:
            spans.append(Span(f"   {rest}", "muted"))
        return Line(tuple(spans), "" if self.tall else "bar")

    def tell(self, text: str, role: str = "text") -> None:
        """Show a sentence in the key row for four seconds."""
        self._notice = (self.glyphs.keys(text), role, self.mono() + NOTICE_NS)

    def go(self, view: int) -> None:
        """Show a view; ``esc`` comes back."""
        if view != self.current:
            self.crumbs.append(self.current)
            del self.crumbs[:-16]
            self.current = view
        self.help = False

    def show(self, session: TargetSession) -> None:
        """Show the past of the target, or the target itself again; views, selection and filters stay."""
        if not self.looks_back:
            self._watched = self.lints, self._stops
        self.actions, self.mirror = session, session.mirror
        self.lints, self._stops = Lints(), Stops()
        if not self.looks_back and self._watched is not None:
            self.lints, self._stops = self._watched
        self.order, self.warnings, self.forests = SlotOrder(), self.lints.warnings(self.mono()), {}
        self._linted, self._place = -LINT_EVERY_NS, -1

    def to_live(self) -> None:
        """Come back from the past."""
        self.live.to_live()
        if self.looks_back:
            self.show(self.live)

    @property
    def known_s(self) -> int:
        """Seconds of the target's time whose events this console has, the running second included."""
        start_ns = self.mirror.density.start_ns
        return 1 if start_ns is None else max(1, self.now_ns // S - start_ns // S + 1)

    def trend(
        self, values: Sequence[float | None], cells: int, top: float | None = None, role: str = "trend"
    ) -> list[Span]:
        """Values of one second each, the newest last, in ``cells``; they fill from the left while the run is young."""
        shown = from_left(values, self.known_s, cells)
        return [*trend(shown, self.glyphs, top, role), Span(" " * (cells - len(shown)), "text")]

    def paced(self, name: str, make: Callable[[], list[Line]]) -> list[Line]:
        """Rows of numbers, drawn FAST_HZ times a second while events come too fast to read, else in every frame.

        They depend on the target's facts, on time and on the size of the screen, and on nothing that a key changes.
        """
        mono, mirror = self.mono(), self.mirror
        if mirror.progress.rate(mono) <= FAST_RATE:
            return make()
        key = mirror.incarnation, mirror.places, mono // (S // FAST_HZ), self.width, self.height
        known = self._paced.get(name)
        if known is None or known[0] != key:
            known = self._paced[name] = key, make()
        return known[1]

    def select(self, request: str | None) -> None:
        """Choose a request for all views."""
        self.selected = request

    @property
    def life(self) -> Life | None:
        """The life of the selected request; None when it is not known, or without a selection."""
        return self.mirror.life_of(self.selected) if self.selected else None

    def shown_request(self) -> str | None:
        """The selected request, else the first of the list."""
        state = self.mirror.state
        if self.selected is not None or state is None or not state.slots:
            return self.selected
        first = next((number for number in self.order.numbers if number in state.slots), next(iter(state.slots)))
        return state.slots[first].request

    # --- events and places -------------------------------------------------------------------------------------------

    def chosen_event(self) -> Event | None:
        """The chosen event, else the newest event of the selected request."""
        event = self.mirror.event(self.event) if self.event is not None else None
        if event is not None:
            return event
        life = self.life
        return life.story[-1] if life is not None and life.story else None

    def reveal(self, event: Event) -> None:
        """Choose an event, and its request, and show it: here, or in the log."""
        self.event = event.seq
        request = concerns(event, self.mirror)
        if request and self.mirror.life_of(request) is not None:
            self.select(request)
        if not self.view.reveal(self, event):
            self.go(LOG)
            self.view.reveal(self, event)

    def place(self) -> tuple[int, int] | None:
        """(seq, time) of the cursor, of the chosen event, else of now: the place of a new mark."""
        state = self.mirror.state
        if state is None:
            return None
        cursor = getattr(self.view, "cursor_ns", None)
        event = self.mirror.event(self.event) if self.event is not None else None
        if cursor is not None:
            exact = event is not None and event.at_ns == cursor
            return (event.seq if exact and event is not None else seq_at(self.mirror, cursor) or 0), cursor
        event = event if self.current in (SLOT, LOG) else None
        return (event.seq, event.at_ns) if event is not None else (state.seq - 1, self.now_ns)

    def to_mark(self, mark: Mark) -> None:
        """Back to a mark: the tape of a recording goes there, a live console shows it in the timeline or the log."""
        if self.actions.playback is not None:
            self.actions.playback.seek(mark.seq)
            return
        event = self.mirror.event(mark.seq)
        if self.current == LOG and event is not None:
            self.event = event.seq
            self.view.reveal(self, event)
            return
        self.go(TIMELINE)
        self.view.press(self, f"at:{mark.at_ns}")

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, width: int, height: int) -> list[Line]:
        """The whole screen."""
        self.shown = self._draw(width, height)
        return self.shown

    def _draw(self, width: int, height: int) -> list[Line]:
        self.width, self.height = width, height
        if width < WIDTH_MIN or height < HEIGHT_MIN:
            text = f"Needs {WIDTH_MIN}x{HEIGHT_MIN}, has {width}x{height}"
            return fit([BLANK] * (height // 2) + [Line((Span(text[:width], "text"),))], height)
        self._watch()
        lines = [frame.targets_line(self.targets, self.target, width)] if len(self.targets) > 1 else []
        lines += [frame.status_line(self._status(), width), frame.tabs_line(self.current, width, self.recording)]
        if self.tall:
            lines.append(BLANK)
        feet = self.prompt.lines(width, height // 2) if self.prompt is not None else [self._keys(width)]
        covered = len(feet) - 1
        if self.tour is not None:
            feet = [*self.tour.lines(self, width), *feet]
        if self.actions.playback is not None:
            feet.insert(0, frame.transport_line(self.transport(), width, self.glyphs))
        room = height - len(lines) - len(feet)
        body = fit([_inside(line, width) for line in self._body(width, room + covered)], room)
        return [*lines, *body, *feet]

    def _body(self, width: int, height: int) -> list[Line]:
        if self.help:
            return self.views[HELP].body(self, width, height)
        sentence = banner(self, width)
        state = self.mirror.state
        if state is None:
            waits = " Reading …" if self.actions.playback is not None else " Connecting …"
            return [sentence if sentence is not None else Line((Span(waits, "muted"),))]
        room = height - (sentence is not None)
        if self.view.needs_requests and blocks_only(state):
            lines = [*fit(self.view.streamed(self, width, room - 1), room - 1), Row().put(LEVELS, "faint").line()]
        else:
            lines = fit(self.view.body(self, width, room), room)
        if self.silent and not self.recording:
            lines = [Line(tuple(Span(s.text, "stale") for s in line.spans), line.ground, line.zones) for line in lines]
        return [sentence, *lines] if sentence is not None else lines

    def retry_left(self) -> int | None:
        """Seconds until the next attempt to connect; None when there is none."""
        gone = self.present.disconnected
        if gone is None or gone.retry_in_s is None:
            return None
        passed = (self.mono() - self.present.mono_ns) / S
        return max(0, int(gone.retry_in_s - passed + 0.999))

    def _pill(self) -> tuple[str, str]:
        if not self.looks_back:
            return self._live_pill()
        pill, role = self._live_pill() if self.silent else ("LIVE", "pill.replay")
        return f"{pill} −{duration(max(0, self.present.now_ns(self.mono()) - self.now_ns))}", role

    def _live_pill(self) -> tuple[str, str]:
        mono, mirror = self.mono(), self.present
        if mirror.disconnected is not None or mirror.connected is None:
            left = self.retry_left()
            if mirror.disconnected is None:
                return "CONNECTING" if self.live.playback is None else "READING", "pill.caution"
            return ("RETRY" if left is None else f"RETRY {left}s"), "pill.fault"
        if mirror.connected.recording:
            return "REPLAY", "pill.replay"
        if self.live.paused:
            return "PAUSED full" if self.live.overflowed else "PAUSED", "pill.caution"
        silence = mirror.progress.silence_ns(mono)
        if silence is not None and silence > STALE_NS:
            return f"STALE {silence // S}s", "pill.caution"
        lag = mirror.progress.lag_ns(mirror.next_seq, mono)
        if lag > LAG_NS:
            return f"LIVE −{lag / S:.1f}s", "pill.caution"
        if mirror.sampled:
            one_in = mirror.coverage.one_in()
            pill = "SAMPLED" if one_in is None else f"SAMPLED 1/{count(one_in)}"
            age_ns = mono - mirror.facts_mono_ns
            if one_in is None or age_ns >= S or self.width >= AGES_FROM:
                pill += f" {age_ns / S:.1f}s"
            return pill, "pill.caution"
        return "LIVE", "pill.ok"

    def _status(self) -> frame.StatusRow:
        mirror, mono = self.mirror, self.mono()
        pill, role = self._pill()
        state, beat, target = mirror.state, mirror.heartbeat, mirror.connected
        note = "" if target is None or self.recording else "read-only" if self.read_only else (
            "" if target.control else "observe")
        synced = beat.synced_age_ns if beat is not None else None
        recorder = "recording" if self.recording else beat.recorder if beat is not None else "unknown"
        if recorder is None and self.actions.kept is not None:
            recorder = "here"
        if synced is not None:
            synced += mirror.progress.silence_ns(mono) or 0
        return frame.StatusRow(
            pill=pill, pill_role=role, target=target.target if target else "–", note=note,
            run=target.run if target else 0, iteration=None if state is None or state.streams_only else state.iteration,
            clock=self.times.head(self.now_ns, date=self.recording) if state else "", socket=self.socket,
            rate=self.rate,
            lag=None if state is None or self.recording else mirror.progress.lag_events(mirror.next_seq),
            lost=self._missing() if self.recording else mirror.lost_events, lost_age_ns=mirror.lost_age_ns(mono),
            recorder=recorder, synced_age_ns=synced,
            not_recorded=beat.not_recorded if beat is not None else 0, buffered=self.actions.buffered,
            faults=sum(w.level is Level.FAULT and w.ended_ns is None for w in self.warnings),
            cautions=sum(w.level is Level.CAUTION and w.ended_ns is None for w in self.warnings),
            holds=len(state.holds) if state else 0,
        )

    def _missing(self) -> int | None:
        """Events that are not on the recording, wherever we stand on it."""
        playback = self.actions.playback
        return sum(gap.count for gap in playback.recording.gaps) if playback is not None else None

    def transport(self) -> frame.Transport:
        """The state of the recording's transport."""
        playback = self.actions.playback
        assert playback is not None
        if playback.position_seq >= playback.last_seq:
            state = "END"
        else:
            state = f"PLAY {playback.speed:g}×" if playback.playing else "PAUSED"
        marks = [(seq, self.glyphs.held, "held") for seq in self.actions.hits.seqs[:HITS_MARKED_MAX]]
        marks += [
            (found.seq, "!", "fault" if found.level is Level.FAULT else "caution")
            for found in self.actions.index.findings[FINDINGS_MARKED_MAX::-1] if found.level is not Level.NOTE
        ]
        marks += [(gap.first, self.glyphs.gap, "gap") for gap in playback.recording.gaps if gap.count]
        holds = [stay for life in self.mirror.lives.values() for stay in life.stays if stay.end_ns is None]
        known = self.actions.hits
        hits = len(known.seqs) + known.dropped if known.complete else (
            self.mirror.state.totals.breakpoint_hits if self.mirror.state else 0)
        if holds and self.mirror.state is not None:
            marks.append((self.mirror.state.seq, self.glyphs.held, "held"))
        marks += [(mark.seq, self.glyphs.mark, "strong") for mark in self.marks.places]
        return frame.Transport(
            state, self.times.text(playback.at_ns, millis=True), playback.position_seq, playback.first_seq,
            playback.last_seq, hits, marks,
        )

    # --- the key row -------------------------------------------------------------------------------------------------

    def _keys(self, width: int) -> Line:
        mono = self.mono()
        if self._notice is not None and mono < self._notice[2]:
            return frame.notice_line(self._notice[0], self._notice[1], width)
        stop = self._stops.text(self.mirror, mono)
        if stop is not None:
            return frame.notice_line(stop, "held", width, hint=("H", "go there"))
        hints = [(self.glyphs.keys(key), word) for key, word in self.hints]
        return frame.keys_line(tuple(hints), width)

    def _watch(self) -> None:
        """Update the clock, the warnings (a few times a second) and the announcements."""
        mono, target, beat = self.mono(), self.mirror.connected, self.mirror.heartbeat
        if target is not None:
            at_ns = beat.at_ns if beat is not None else 0
            self.times.look(target.clock_anchor_ns, target.recording, beat, at_ns, self.wall())
        playback = self.actions.playback
        if self.looks_back and playback is not None and playback.playing and playback.at_end and (
            not self.live.play_on(self.show)
        ):
            self.to_live()
        arrived = self.recording and self.mirror.places != self._place
        if arrived or mono - self._linted >= LINT_EVERY_NS:
            self._linted, self._place = mono, self.mirror.places
            if self.mirror.disconnected is None and not self.actions.paused:
                self.lints.check(self.mirror, mono, arrived=arrived)
                self.warnings = self.lints.warnings(mono)
        self._stops.watch(self.mirror, mono, stands=playback is not None and not playback.playing)


def _no_requests(sentence: str, width: int) -> list[Line]:
    """The place of a view that needs requests, on a target that reports blocks alone: how to get requests."""
    texts = [
        (sentence, "strong"),
        ("This target follows KV-event streams (level 1): they name blocks and no request.", "text"),
        ("The tap (level 2) reports every request of vLLM or SGLang and can hold it:", "text"),
        ("", "text"), (f"  {TAP}", "key"), ("", "text"),
        ("The reports of a stream stand in views 1 to 6, 8 Record, 9 Log and p Prefixes.", "muted"),
    ]
    return [
        Row().put(f" {part}", role).line("", width)
        for text, role in texts for part in (wrap(text, width - 3) if len(text) > width - 3 else [text])
    ]


def _inside(line: Line, width: int) -> Line:
    """A body row within the screen: text leaves the last cell empty, a rule or a bar may fill it."""
    if line.width < width or not line.spans or line.spans[-1].role in _FULL_WIDTH:
        return crop(line, width)
    return crop(line, width - 1)


_FULL_WIDTH: Final = frozenset({"rule", "track", "trend", "text@sel"})
"""Roles that may end in the last cell."""


# --- banners: sentences above every view -----------------------------------------------------------------------------


def banner(desk: Desk, width: int) -> Line | None:
    """The first sentence that is true; None on an ordinary screen."""
    return _gone(desk, width) or _frozen(desk, width) or _all_held(desk, width) or _suspended(desk, width) or (
        _draining(desk, width)
    )


def _gone(desk: Desk, width: int) -> Line | None:
    mirror, state = desk.present, desk.mirror.state
    gone = mirror.disconnected
    if gone is None:
        return None
    since = desk.mono() - mirror.disconnected_mono_ns
    text = f"{'Daemon gone' if mirror.connected is not None else 'No daemon answered'} {since // S} s ago."
    if state is not None:
        text += f" Shown: seq {count(state.seq - 1)}, {desk.times.text(state.at_ns)}."
    left = desk.retry_left()
    if left is not None:
        text += f" Next try in {left} s.  r  now"
    else:
        text += f" {gone.reason}"
    return message_line(text, ("key", "r"), width)


def _frozen(desk: Desk, width: int) -> Line | None:
    """The banner of a freeze; a recording shows the freezes of its run."""
    state = desk.mirror.state
    if state is None or state.frozen is None:
        return None
    by = plain(state.frozen.by) or "a breakpoint"
    if desk.recording:
        return message_line(f"Frozen by {by}.", None, width)
    left = max(0, desk.mirror.frozen_left_ns(desk.mono()) or 0)
    text = f"Frozen by {by}. Thaws by itself in {left // S} s."
    return message_line(text + ("  F  thaw now" if desk.may_control else ""), ("key", "F"), width)


def _draining(desk: Desk, width: int) -> Line | None:
    """New requests are refused, which looks like an engine without work."""
    state = desk.mirror.state
    if state is None or not state.draining:
        return None
    live, copies = plural(len(state.slots), "live request"), plural(len(state.operations), "copy", "copies")
    return message_line(f"Draining: no new request is taken; {live}, {copies} in flight. Then a reset.", None, width)


def _all_held(desk: Desk, width: int) -> Line | None:
    """Nothing moves because every slot in flight is held."""
    state = desk.mirror.state
    if state is None or desk.recording or not state.all_held:
        return None
    left = min(max(0, desk.mirror.hold_left_ns(hold, desk.mono()) or 0) for hold in state.holds)
    text = f"Everything in flight is held ({len(state.holds)}). Resumes by itself in {left // S} s."
    return message_line(text + ("  C  continue all" if desk.may_control else ""), ("key", "C"), width)


def _suspended(desk: Desk, width: int) -> Line | None:
    """The banner of a hold that makes other slots or all engines wait."""
    state = desk.mirror.state
    if state is None or desk.recording:
        return None
    holds = [hold for hold in state.holds.values() if hold.suspend is not Suspend.SLOT]
    if not holds:
        return None
    hold = max(holds, key=lambda hold: (hold.suspend, desk.mirror.hold_left_ns(hold.hold, desk.mono()) or 0))
    left = max(0, desk.mirror.hold_left_ns(hold.hold, desk.mono()) or 0)
    waiting = "Engines wait" if hold.suspend is Suspend.ALL else "All copies wait"
    text = f"{waiting} for held {cut(plain(state.slots[hold.slot].request), 20)}. Resumes by itself in {left // S} s."
    return message_line(text + ("  C  continue all" if desk.may_control else ""), ("key", "C"), width)
