"""The two things that an editor can debug: a recording, which goes back and forth, and a daemon, which holds slots.

Both stop at breakpoints that are the core's own. A function breakpoint names a state or a site, as ``onboarding``,
``dispatch.will`` or ``preempted of chat.*``. It may have a condition in the expression language. A data breakpoint
names a field of a slot. On a recording it stops where the value changes, on a daemon where its condition holds.

Law of this file: a recording stops where the leader of today says that a breakpoint hits, and a daemon where it holds.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from kvbm_console.analysis.hits import find_hits
from kvbm_console.analysis.visitor import Visitor
from kvbm_console.analysis.walk import Walker, evidence_of, walk
from kvbm_console.answers.chronicle import Chronicle
from kvbm_console.client import Client, ControlSession, Ended
from kvbm_console.core import events as ev
from kvbm_console.core.breakpoints import hit_test
from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, RecordingError, UsageError
from kvbm_console.core.expression import SLOT, compile_condition, compile_slot_filter
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.core.state import CacheState
from kvbm_console.recording.playback import Playback
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import EventsArrived, GapSeen, SnapshotTaken
from kvbm_console.stream.verbs import ContinueHold, ReplaceBreakpoints, StepSlot

FUNCTION: Final = re.compile(r"([\w.]+)(?: of (\S+))?")
FUNCTION_REASON: Final = "function breakpoint"
DATA_REASON: Final = "data breakpoint"
ENDED_STORIES_MAX: Final = 1_024
"""Requests of a daemon that ended and can still be looked at."""


class Stop(msgspec.Struct, frozen=True):
    """Why and where it stands."""

    reason: str
    slot: int | None = None
    text: str = ""
    breakpoints: tuple[int, ...] = ()
    """Their ids in the editor."""


class EditorBreakpoint(msgspec.Struct, frozen=True):
    """A breakpoint of the editor, with its id there, and as the core says it. ``field`` is of one on data."""

    number: int
    spec: BreakpointSpec
    slot: int | None = None
    field: str = ""


def function_spec(name: str, condition: str, hits: str, max_hold_ns: int) -> BreakpointSpec:
    """The breakpoint that a function breakpoint names. Raises ``UsageError``."""
    states = {state.label: state for state in SlotState}
    sites = {site.label: site for site in Site}
    match = FUNCTION.fullmatch(name.strip())
    if match is None or match[1] not in {**states, **sites}:
        raise UsageError(f"a function is a state ({', '.join(states)}) or a site ({', '.join(sites)}), as "
                         f"'onboarding' or 'dispatch.will of chat.*', got {name!r}")
    if condition:
        compile_condition(condition)
    return BreakpointSpec(
        site=sites.get(match[1], Site.TRANSITION_DID), to_state=states.get(match[1]), request=match[2] or "*",
        condition=condition, hit_condition=_hit_condition(hits), max_hold_ns=max_hold_ns,
    )


def data_spec(request: str, condition: str, hits: str, max_hold_ns: int) -> BreakpointSpec:
    """The breakpoint of a daemon that stands for one on data of ``request``. Raises ``UsageError``."""
    if condition:
        compile_condition(condition)
    return BreakpointSpec(
        site=Site.TRANSITION_DID, request=request, condition=condition, hit_condition=_hit_condition(hits),
        max_hold_ns=max_hold_ns,
    )


def _hit_condition(hits: str) -> str:
    return f"=={hits}" if hits.isdecimal() else hits


class RecordedDebuggee:
    """A recording. Positions are numbers of events; it stands behind one."""

    live = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recording = Recording.open(path)
        self.playback = Playback(self.recording)
        self.chronicle = Chronicle()
        walk(evidence_of(self.recording), (self.chronicle,))
        self._stops: dict[int, Stop] = {}

    @property
    def state(self) -> CacheState:
        """The facts at its position."""
        return self.playback.state

    @property
    def position(self) -> int:
        """The event behind which it stands."""
        return self.playback.position_seq

    def facts(self, seq: int) -> CacheState:
        """The facts behind an event. Raises ``RecordingError``."""
        return self.recording.state_at(seq)

    async def set_breakpoints(self, wanted: Sequence[EditorBreakpoint]) -> list[str]:
        """Find where these breakpoints hit; an empty sentence for each that works."""
        functions = [one for one in wanted if not one.field]
        stops: dict[int, Stop] = {}
        told = [""] * len(wanted)
        if functions:
            try:
                report = find_hits(self._path, [one.spec for one in functions], self.recording.incarnation)
            except RecordingError as error:
                told = ["" if one.field else str(error) for one in wanted]
            else:
                for hit in report.hits:
                    text = f"{hit.request} at {hit.site.label}: {hit.old.label} to {hit.new.label}"
                    _join(stops, hit.seq - 1, Stop(FUNCTION_REASON, hit.slot, text, (functions[hit.spec].number,)))
        data = _Changes([one for one in wanted if one.field])
        walk(evidence_of(self.recording), (data,))
        for seq, stop in data.stops.items():
            _join(stops, seq, stop)
        self._stops = stops
        return told

    async def resume(self, slot: int | None, *, back: bool = False) -> Stop:
        """Go on to the next stop, or back to the one before, or to an end of the recording."""
        ways = sorted(seq for seq in self._stops if (seq < self.position if back else seq > self.position))
        if ways:
            seq = ways[-1] if back else ways[0]
            self.playback.seek(seq)
            return self._stops[seq]
        self.playback.seek(self.recording.first_seq if back else self.recording.last_seq)
        return Stop("pause", slot, f"the {'beginning' if back else 'end'} of the recording")

    async def step(self, slot: int | None, how: str) -> Stop:
        """One event of the slot (``next``, ``back``), of anybody (``in``), or to its next state (``out``)."""
        if how == "back":
            seq = self.chronicle.preceding(self.position, slot)
        else:
            seq = self.chronicle.following(self.position, None if how == "in" else slot, moves=how == "out")
        if seq is None:
            return Stop("step", slot, "nothing more of this request in this direction")
        self.playback.seek(seq)
        return Stop("step", slot)

    async def close(self) -> None:
        """Nothing to give back."""


def _join(stops: dict[int, Stop], seq: int, stop: Stop) -> None:
    """Add a stop at an event. Where one is already, that one also names the breakpoints of the new one."""
    before = stops.get(seq)
    if before is None:
        stops[seq] = stop
        return
    numbers = tuple(dict.fromkeys((*before.breakpoints, *stop.breakpoints)))
    stops[seq] = msgspec.structs.replace(before, text=f"{before.text}; {stop.text}", breakpoints=numbers)


class _Changes(Visitor):
    """The events with which fields of slots changed while their condition held."""

    def __init__(self, wanted: Sequence[EditorBreakpoint]) -> None:
        super().__init__()
        self.stops: dict[int, Stop] = {}
        self._wanted = [
            (one, SLOT.fields[one.field].get, compile_slot_filter(one.spec.condition) if one.spec.condition else None)
            for one in wanted
        ]
        self._values: dict[int, Any] = {}
        self._matches: Counter[int] = Counter()
        self._counts = {one.number: hit_test(one.spec.hit_condition) for one in wanted}
        self._before = -1
        if wanted:
            self.every = self._event

    def ended(self, state: CacheState | None, gap: GapSeen | None) -> None:
        if state is not None and self.every is not None:
            self._look(state)

    def _event(self, event: ev.Event, state: CacheState) -> None:
        if self._before >= 0:
            self._look(state)
        self._before = event.seq

    def _look(self, state: CacheState) -> None:
        for one, get, holds in self._wanted:
            slot = state.slots.get(-1 if one.slot is None else one.slot)
            if slot is None:
                self._values.pop(one.number, None)
                continue
            value = get(slot, state, None)
            if one.number in self._values and self._values[one.number] != value and (
                holds is None or holds(state, slot)
            ):
                self._matches[one.number] += 1
                counts = self._counts[one.number]
                if counts is None or counts(self._matches[one.number]):
                    text = f"{one.field} of {slot.request}: {self._values[one.number]} to {value}"
                    _join(self.stops, self._before, Stop(DATA_REASON, slot.slot, text, (one.number,)))
            self._values[one.number] = value


class LiveDebuggee:
    """A daemon. Its session has a lease: when the editor goes, its breakpoints and holds go, too."""

    live = True

    def __init__(
        self, client: Client, session: ControlSession, tell: Callable[[Stop], None], goes_on: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """``tell`` gets each stop, ``goes_on`` the slot of a hold that ended without our asking, and ``say`` a sentence
        for each reason for which a breakpoint was hit and could not hold."""
        self._client = client
        self._session = session
        self._tell = tell
        self._goes_on = goes_on
        self._say = say
        self._said: set[tuple[int, str]] = set()
        """Breakpoints and the reasons that were said of them, since the breakpoints were set."""
        self._hit: ev.BreakpointHit | None = None
        """The last hit; a hold that it could not begin is denied by the next event."""
        self._numbers: dict[int, int] = {}
        self._stopped: dict[int, int] = {}
        """The slots of the holds that were told as stops and have not ended."""
        self._let_go: set[int] = set()
        """Those of them that the editor let go."""
        # A stop that a request leads to is told behind the answer of that request.
        self._asking = anyio.Lock()
        self._closed = False
        self.state = CacheState()
        self.chronicle = Chronicle(ENDED_STORIES_MAX)
        self.ready = anyio.Event()

    @property
    def position(self) -> int:
        """Its last event."""
        return self.state.seq - 1

    def facts(self, seq: int) -> CacheState:
        """The facts of now. Raises ``UsageError`` for an event of the past."""
        if seq < self.position:
            raise UsageError("a daemon tells its facts of now; record it, and debug the recording")
        return self.state

    async def follow(self) -> None:
        """Fold the stream, and tell each hold of ours that stands still. Ends with the daemon."""
        walker = Walker((self.chronicle,), self._client.target)
        async with self._client.subscribe() as items:
            async for item in items:
                if isinstance(item, Ended):
                    break
                if isinstance(item, SnapshotTaken):
                    self.state = item.state
                if isinstance(item, SnapshotTaken | EventsArrived | GapSeen):
                    walker.take(item)
                    self.ready.set()
                    async with self._asking:
                        if isinstance(item, EventsArrived):
                            self._say_denials(item.events)
                        self._tell_holds()
        raise ConnectionLost(f"{self._client.target} ended")

    def _say_denials(self, events: Sequence[ev.Event]) -> None:
        """Say why our breakpoints did not hold; otherwise an editor would look as if they were never hit."""
        for event in events:
            if isinstance(event, ev.BreakpointHit):
                self._hit = event
            elif isinstance(event, ev.HoldDenied) and self._hit is not None and self._hit.seq == event.seq - 1:
                hit = self._hit.breakpoints
                told = {(self._numbers[one], event.why) for one in hit if one in self._numbers} - self._said
                if told:
                    self._said |= told
                    name = self.chronicle.names.get(event.slot) or f"slot {event.slot}"
                    self._say(f"a breakpoint was hit by {name} at {event.site.label} and does not hold: {event.why}")

    def _tell_holds(self) -> None:
        """Tell which slots went on and which stand still since the last time. A gap has no events, but facts."""
        if self._closed:
            return
        for number in [number for number in self._stopped if number not in self.state.holds]:
            slot = self._stopped.pop(number)
            if number not in self._let_go:
                self._goes_on(slot)
        self._let_go &= self._stopped.keys()
        for number, hold in self.state.holds.items():
            ours = tuple(self._numbers[one] for one in hold.breakpoints if one in self._numbers)
            # Breakpoints of two editors may make one hold, which has one owner and stops both.
            mine = ours or hold.owner == self._session.owner
            if not hold.parked or number in self._stopped or not mine:
                continue
            self._stopped[number] = hold.slot
            name = self.state.slots[hold.slot].request
            text = f"{name} at {hold.site.label}, for at most {hold.max_hold_ns / 1e9:g} s"
            self._tell(Stop(FUNCTION_REASON if ours else "step", hold.slot, text, ours))

    async def set_breakpoints(self, wanted: Sequence[EditorBreakpoint]) -> list[str]:
        """Replace the breakpoints of the session; an empty sentence for each that works."""
        async with self._asking:
            verdicts = await self._session.ask(ReplaceBreakpoints(tuple(one.spec for one in wanted)))
            self._numbers = {
                verdict.id: one.number for verdict, one in zip(verdicts, wanted, strict=True) if verdict.verified
            }
            self._said.clear()
        return [verdict.message for verdict in verdicts]

    async def resume(self, slot: int | None, *, back: bool = False) -> Stop | None:
        """Let the held slot go on. Raises ``UsageError`` for the way back."""
        if back:
            raise UsageError("a daemon goes forward only; record it, and debug the recording")
        hold = self._hold_of(slot)
        if hold is not None:
            await self._release(hold, ContinueHold(hold))
        return None

    async def step(self, slot: int | None, how: str) -> Stop | None:
        """Let the held slot go on to its next site. Raises ``UsageError`` for a slot that is not held."""
        if how == "back":
            raise UsageError("a daemon goes forward only; record it, and debug the recording")
        hold = self._hold_of(slot)
        if hold is None:
            raise UsageError("only a request that is held can step")
        await self._release(hold, StepSlot(hold))
        return None

    async def _release(self, hold: int, verb: ContinueHold | StepSlot) -> None:
        async with self._asking:
            await self._session.ask(verb)
            self._let_go.add(hold)

    def _hold_of(self, slot: int | None) -> int | None:
        held = None if slot is None else self.state.slots.get(slot)
        return None if held is None else held.hold

    async def close(self) -> None:
        """End the session, and with it its breakpoints and holds."""
        self._closed = True
        await self._session.close()


def hold_ns(text: str) -> int:
    """A hold's longest time as ``30s``. Raises ``UsageError``; the core refuses what is out of bounds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s", text)
    if match is None:
        raise UsageError(f"maxHold must be seconds such as 30s, got {text!r}")
    return round(float(match[1]) * SECOND_NS)
