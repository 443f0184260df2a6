"""The session: a feed folded into the mirror, and the questions and verbs for the target.

Law of this file: the console never awaits the network. Items are folded in slices, and keys are answered between two
slices. Calls to the target run in tasks and answer with a notice. A paused view catches up from the reel.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import KvbmConsoleError, RecordingError
from kvbm_console.core.events import Event
from kvbm_console.stream.feed import (
    Accounting,
    BatchArrived,
    Connected,
    Controls,
    Disconnected,
    EventsArrived,
    Feed,
    FeedItem,
    Heartbeat,
    PastSeen,
    Refreshing,
    Remembering,
    SnapshotTaken,
)
from kvbm_console.stream.tape import RunTape
from kvbm_console.stream.verbs import Verb
from kvbm_console.wire.batches import MalformedBatch

from .draw.table import Table
from .model.coverage import SamplingPace, SeenGap
from .model.history import Names, take_past
from .model.mirror import Mirror
from .model.numbers import count, plural
from .model.older import FAR_RECORDING, NO_RECORDING, Older, older_than
from .model.places import TapeHits, recorded_hits
from .model.reel import Reel
from .model.seeks import SLICE_EVENTS, TapeIndex, stand
from .model.sources import Told, watched
from .model.trail import Trail, Way

if TYPE_CHECKING:  # both open recordings: loaded with the first explanation or recording
    from kvbm_console.analysis.explain import Explanation
    from kvbm_console.planning.what_if import Counterfactual
    from kvbm_console.recording.playback import Playback

Spawner = Callable[[Awaitable[None], str], None]
"""Runs a task under a name; the application owns it."""
Explain = Callable[[str], Awaitable["Explanation"]]
"""Explains the misses of a request; raises KvbmConsoleError with a sentence."""
Search = Callable[[str, Callable[[str], None]], Awaitable["Counterfactual"]]
"""Searches the change that would have spared a request its trouble, and tells its progress in lines; raises
KvbmConsoleError with a sentence. It ends when its task is cancelled."""
FindHits = Callable[[Sequence[BreakpointSpec]], Awaitable[list[int]]]
"""The events behind which these breakpoints would have hit; raises KvbmConsoleError with a sentence."""

Show = Callable[["TargetSession"], None]
"""Shows the past of the target."""

CALLS_MAX: Final = 16
"""Verbs without an answer; more keys than that on a dead connection are refused."""
ACCOUNTS_EVERY_S: Final = 2.0
"""How often a target with real engines is asked for their accounts: its answer has every open copy in it."""


_PLACES: Final = itertools.count(1)
"""Every place that is reached on a tape has a number of its own, whichever the tape."""


BREATH_NS: Final = 2_000_000
"""Work between two turns of the application's keys. A turn costs as much as passing over a batch."""


async def _yield() -> None:
    await asyncio.sleep(0)


class _Breath:
    """Gives the application its turn when ``BREATH_NS`` of this thread's work lie behind the last turn."""

    def __init__(self) -> None:
        self._last_ns = time.thread_time_ns()

    async def __call__(self) -> None:
        if time.thread_time_ns() - self._last_ns >= BREATH_NS:
            await _yield()
            self._last_ns = time.thread_time_ns()


class Kept(msgspec.Struct, frozen=True):
    """The part of a session that this console has recorded."""

    place: str
    events: int
    size_bytes: int
    missing: int = 0
    """Events that could not be written."""


class Keeper(Protocol):
    """Records a session; the command line has it, because it depends on the writer of recordings."""

    @property
    def kept(self) -> Kept:
        """The recording so far."""
        ...

    def take(self, item: FeedItem, mirror: Mirror) -> None:
        """Record an item that was folded just now."""
        ...


class TargetSession:
    """One target: a feed, perhaps controls, perhaps the transport of a recording."""

    def __init__(
        self, feed: Feed, controls: Controls | None = None, playback: "Playback | None" = None, *,
        socket: str = "", mono: Callable[[], int] = time.monotonic_ns, explain: Explain | None = None,
        keeper: Keeper | None = None, find_hits: FindHits | None = None, wall: Callable[[], int] = time.time_ns,
        index: TapeIndex | None = None, what_if: Search | None = None,
    ) -> None:
        self.controls = controls
        """None: every verb answers that this session only observes."""
        self._spawn: Spawner | None = None
        self._tell: Callable[[str, str], None] = lambda text, role: None
        self._calls = 0
        """Verbs that the target has not answered."""
        self.feed = feed
        self.playback = playback
        self.socket = socket
        self.mono = mono
        self.wall = wall
        self.explain = explain
        """Explains a request; None when there is nothing to look at."""
        self.keeper = keeper
        """Records the session; None without ``--record``."""
        self.find_hits = find_hits
        """Finds the hits of breakpoints on the recording; None when only the hits of the recorded run are known."""
        self.explained: Explanation | None = None
        self.unexplained = ""
        self.search = what_if
        """Searches what would have spared a request its trouble; None when there is nothing to replay."""
        self.spared: Counterfactual | None = None
        """The answer of the last search."""
        self.spared_text = ""
        """How far the search is, or why there is no answer."""
        self._replays: asyncio.Task[None] | None = None
        self.mirror = Mirror()
        self.paused = False
        self.ended = False
        """True if the feed said that nothing more will come."""
        self._behind = False
        """True if the reel has items that were not folded, because the view was paused."""
        self._connection: Connected | Disconnected | None = None
        """The last of these items."""
        self.quit: Callable[[], None] = lambda: None
        """Leaves the console."""
        self.copy: Callable[[str], None] = lambda text: None
        """Puts text on the terminal's clipboard."""
        self.export: Callable[[str, Table | None, str | None], None] = lambda name, table, picture: None
        """Writes the screen as text and as a picture, and the rows of its list as CSV."""
        self.show_target: Callable[[int], None] = lambda number: None
        """Shows another target of this console."""
        self._asks_recorder = False
        self._resubscribe = False
        self.pace = SamplingPace()
        self._refreshing = feed if isinstance(feed, Refreshing) and keeper is None else None
        """The feed, if it can send facts again and no keeper needs every event."""
        self.hits = TapeHits()
        self._searching = False
        self._keep_past(index)
        if isinstance(feed, Refreshing):
            feed.unread = True  # the reel keeps the bytes as they come
        self.looking = False
        """True if older events are being asked for."""

    def _keep_past(self, index: TapeIndex | None) -> None:
        self.reel = Reel() if self.playback is None else None
        """The past of a live target; None on a tape."""
        self.index = index or TapeIndex()
        """Facts about the tape as a whole."""
        self.past: TargetSession | None = None
        """The session on the reel, while this console looks back."""
        self.stood = asyncio.Event()
        """Set when a place of the tape was reached for the first time."""
        self.told: dict[int, Told] | None = None
        """Answers of the live target about its engines; None unless this console looks back at it."""
        self._daemons: RunTape | None = None
        """The daemon's own recording on this machine, once events older than its ring were asked for."""
        self._older: Older | None = None
        """The past before the reel, once somebody went there."""
        self._asking = False
        self._short = False
        """True if the past of this place is shorter than it will be when the tape is indexed."""

    @property
    def kept(self) -> Kept | None:
        """The recording of this console; None without ``--record``."""
        return self.keeper.kept if self.keeper is not None else None

    @property
    def control(self) -> bool:
        """True if this session may act on the target."""
        connected = self.mirror.connected
        return self.controls is not None and connected is not None and connected.control

    def attach(
        self, spawn: Spawner, tell: Callable[[str, str], None], quit_: Callable[[], None],
        copy: Callable[[str], None], export: Callable[[str, Table | None, str | None], None],
        show: Callable[[int], None] = lambda number: None,
    ) -> None:
        """Connect the session to an application."""
        self._spawn, self._tell, self.quit, self.copy, self.export = spawn, tell, quit_, copy, export
        self.show_target = show

    # --- the feed ----------------------------------------------------------------------------------------------------

    async def run(self, breathe: Callable[[], Awaitable[None]] | None = None) -> None:
        """Fold the feed until it ends. ``breathe`` lets the application answer keys between slices."""
        breathe = breathe if breathe is not None else _Breath()
        if isinstance(self.feed, Accounting) and self._spawn is not None:
            self._spawn(self._account(self.feed), "accounts")
        while True:
            self._resubscribe = self._behind = False
            async for item in self.feed.items():
                if self.paused or self._behind:
                    self._keep(item)
                else:
                    await self._take(item, breathe)
                if self._resubscribe:
                    break
                await breathe()
            if not self._resubscribe:
                self.ended = True
                return

    def ask_recorder(self) -> None:
        """Ask for the path and the size of the recording; the answer appears in the mirror."""
        self._asks_recorder = True

    async def _account(self, feed: Accounting) -> None:
        """Ask for facts that no event has: names of engines and the cost of taps. A lost answer is asked for again."""
        while not self.ended:
            state = self.mirror.state
            if state is not None and (watched(state) or self._asks_recorder) and not self.paused:
                self._asks_recorder = False
                with contextlib.suppress(KvbmConsoleError):
                    self.mirror.sources.tell(await feed.accounts())
                    self.mirror.version += 1
            await asyncio.sleep(ACCOUNTS_EVERY_S if state is not None else ACCOUNTS_EVERY_S / 8)

    async def _take(self, item: FeedItem, breathe: Callable[[], Awaitable[None]]) -> None:
        mirror = self.mirror
        if self.reel is not None:
            self.reel.add(item, self.mono)
        if isinstance(item, BatchArrived) and mirror.reads:
            item = self._read(item)
        if isinstance(item, EventsArrived) and len(item.events) > SLICE_EVENTS:
            events = item.events
            for start in range(0, len(events), SLICE_EVENTS):
                self._fold(EventsArrived(events[start : start + SLICE_EVENTS]))
                await breathe()
        elif isinstance(item, Disconnected):
            if self.controls is not None and mirror.state is not None:
                self.controls.saw({number: known.armed_at_home for number, known in mirror.state.breakpoints.items()})
            mirror.take(item, self.mono())
        elif isinstance(item, PastSeen):
            for _ in take_past(mirror, item, self.mono()):
                await breathe()
        elif isinstance(item, SnapshotTaken) and self.playback is not None:
            tape = self.playback.recording
            self._short = not await stand(mirror, tape, item.state, self.index.spines, self.mono, breathe)
            if self.told is not None:
                mirror.sources.told = self.told
            mirror.progress.reset(self.mono())  # the events before the place did not arrive now
            mirror.places = next(_PLACES)
            self.stood.set()
        else:
            self._fold(item)
            if isinstance(item, Connected) and self.playback is not None and self.index.walks and self._spawn:
                self._spawn(self._read_tape(self.playback, item), "index")
        if self.reel is not None:
            self.reel.look(mirror, self.mono)
        if mirror.broken is not None and not self._resubscribe:
            self._renew(f"{mirror.broken}; asking for a snapshot")

    def _read(self, item: BatchArrived) -> FeedItem:
        """The events of a batch, which can then be taken in slices. An unreadable batch stays as it is."""
        began = time.thread_time_ns()
        try:
            return EventsArrived(item.batch.read())
        except MalformedBatch:
            return item
        finally:
            self.pace.worked(0, time.thread_time_ns() - began, self.mono())

    def _fold(self, item: FeedItem) -> None:
        """Take an item and measure its cost: above a share of a core, facts are sampled from snapshots."""
        mirror, pace = self.mirror, self.pace
        began = time.thread_time_ns()
        mirror.take(item, self.mono())
        cost, now = time.thread_time_ns() - began, self.mono()
        feed = self._refreshing
        if isinstance(item, SnapshotTaken):
            pace.snapshot(cost, now)
            mirror.affords = True
        elif feed is not None and isinstance(item, EventsArrived | BatchArrived | Heartbeat):
            pace.worked(events_in(item), cost, now)
            mirror.sampling, mirror.affords = pace.sampling, pace.affords
            if mirror.sampled and pace.due(now, urgent=mirror.wants_facts):
                mirror.wants_facts = False
                feed.refresh()
        if self.keeper is not None and self.mirror.broken is None:
            self.keeper.take(item, self.mirror)

    @property
    def buffered(self) -> int:
        """Events that a paused view has not shown."""
        return max(0, self.reel.next_seq - self.mirror.next_seq) if self._behind and self.reel is not None else 0

    @property
    def overflowed(self) -> bool:
        """True if a paused view can no longer catch up: a loss, or more events than the reel keeps."""
        return self._behind and self.reel is not None and not self.reel.follows(self.mirror.next_seq)

    def _keep(self, item: FeedItem) -> None:
        """Keep an item that comes while the view is paused, or behind events that it has not caught up with."""
        assert self.reel is not None
        if not self._behind:
            self._behind, self._connection = True, None
        self.reel.add(item, self.mono)
        if isinstance(item, Connected | Disconnected):
            self._connection = item
        elif isinstance(item, SnapshotTaken) and not self.paused and self.reel.next_seq == item.state.seq:
            self.mirror.skip_to(item.state, self.mono())
            self._behind = False

    def pause(self, paused: bool) -> None:
        """Stop drawing new events, or go on; the target does not notice. Without facts there is nothing to stop."""
        self.paused = paused and self.mirror.state is not None
        if not paused and self._behind and self._spawn is not None:
            self._spawn(self._catch_up(), "unpause")

    async def _catch_up(self) -> None:
        """Fold the events of the reel, while the feed goes on adding events to them.

        When they are so many that facts are sampled, the next snapshot ends it.
        """
        reel, mirror = self.reel, self.mirror
        assert reel is not None
        while self._behind and not self.paused and not self._resubscribe:
            if mirror.broken is not None:
                self._renew(f"{mirror.broken}; asking for a snapshot")
            elif reel.incarnation != mirror.incarnation or not reel.follows(mirror.next_seq):
                self._renew("the paused view lost events; the next snapshot is exact")
            elif reel.next_seq > mirror.next_seq:
                await self._fold_kept(reel)
            else:
                self._behind = False
                if self._connection is not None:
                    await self._take(self._connection, _yield)

    async def _fold_kept(self, reel: Reel) -> None:
        mirror = self.mirror
        try:
            for events in reel.events(mirror.next_seq):
                for first in range(0, len(events), SLICE_EVENTS):
                    if events[first].seq != mirror.next_seq or self.paused or not self._behind:
                        return
                    self._fold(EventsArrived(events[first : first + SLICE_EVENTS]))
                    await _yield()
        except MalformedBatch as error:
            mirror.broken = str(error)

    def _renew(self, text: str) -> None:
        """Say why, and subscribe again behind the next item."""
        self._tell(text, "caution")
        self._resubscribe = True

    # --- events older than the log ---------------------------------------------------------------------------------

    def look_back(self, way: Way, at: int | None, rows: int) -> None:
        """Ask for older events, in a task; a question at a time."""
        trail, spawn = self.mirror.trail, self._spawn
        if self.looking or spawn is None or not (self.playback is not None or isinstance(self.feed, Remembering)):
            return
        self.looking = True
        spawn(self._look_back(trail, way, at, rows), "log")

    async def _look_back(self, trail: Trail, way: Way, at: int | None, rows: int) -> None:
        if self.playback is not None:
            trail.gaps = [SeenGap(gap.first, gap.last, gap.reason, 0, 0, 0) for gap in self.playback.recording.gaps]
        try:
            await trail.find(self.mirror, self._stretch, way, at, rows)
        except KvbmConsoleError as error:
            trail.failed = str(error)
        finally:
            self.looking = False
            self.mirror.version += 1

    async def _stretch(self, first: int, last: int) -> tuple[list[Event], int]:
        """Older events from a tape that has them, else from the target; the number of the oldest anywhere."""
        self.mirror.version += 1
        await asyncio.sleep(0)
        tapes: list[RunTape] = [] if self.playback is None else [self.playback.recording]
        oldest = []
        if self.playback is None:
            assert isinstance(self.feed, Remembering)
            tapes += [] if self.reel is None or not self.reel.begun else [self.reel]
            recorded = await self._recorded()
            tapes += [] if recorded is None else [recorded]
            _, ring_oldest = await self.feed.between(0, 0)
            oldest.append(ring_oldest)
        oldest += [tape.first_seq for tape in tapes]
        has = next((tape for tape in tapes if tape.first_seq <= first), None)
        if has is None and self.playback is None and (first >= oldest[0] or min(oldest) == oldest[0]):
            assert isinstance(self.feed, Remembering)
            found, _ = await self.feed.between(first, last)
            return found, min(oldest)
        has = has or min(tapes, key=lambda tape: tape.first_seq)
        return _between(has, first, last), min(oldest)

    async def _recorded(self) -> "RunTape | None":
        """The daemon's own recording, where it lies on this machine and can be read."""
        if self._daemons is None and isinstance(self.feed, Accounting) and self.mirror.heartbeat is not None and (
            self.mirror.heartbeat.recorder is not None
        ):
            place = ((await self.feed.accounts()).get("recorder") or {}).get("path")
            if isinstance(place, str):
                from kvbm_console.recording.reader import Recording

                self._daemons = Recording.of_daemon(Path(place), self.mirror.incarnation)
        if self._daemons is not None and self._daemons.incarnation != self.mirror.incarnation:
            self._daemons = None
        return self._daemons

    # --- explanations ------------------------------------------------------------------------------------------------

    def why(self, request: str) -> None:
        """Explain the misses of a request, in a task: keys are answered meanwhile."""
        work, spawn = self.explain, self._spawn
        if work is None or spawn is None:
            self.explained, self.unexplained = None, "No evidence here: why needs a recording or a daemon."
        elif self._searching:
            self._tell("still looking", "muted")
        else:
            self._searching = True
            self.explained, self.unexplained = None, ""
            spawn(self._explain(work, request), "why")

    async def _explain(self, work: Explain, request: str) -> None:
        try:
            self.explained = await work(request)
        except KvbmConsoleError as error:
            self.unexplained = str(error)
        finally:
            self._searching = False

    def what_if(self, request: str) -> None:
        """Search the least change that would have spared a request its trouble, in a task that ``escape`` ends."""
        work, spawn = self.search, self._spawn
        if work is None or spawn is None:
            self.spared, self.spared_text = None, "Nothing to replay here: this needs a recording or a daemon."
            return
        self.stop_replays()
        self.spared, self.spared_text = None, "reading the recording …"
        self._replays = asyncio.ensure_future(self._what_if(work, request))
        spawn(asyncio.gather(self._replays, return_exceptions=True), "what if")  # type: ignore[arg-type]

    async def _what_if(self, work: Search, request: str) -> None:
        def tell(text: str) -> None:
            self.spared_text = text
            self.mirror.version += 1

        try:
            self.spared = await work(request, tell)
        except KvbmConsoleError as error:
            tell(str(error))
        finally:
            self._replays = None
            self.mirror.version += 1

    @property
    def replays(self) -> bool:
        """True while the search runs."""
        return self._replays is not None

    def stop_replays(self) -> bool:
        """End the search; False when none runs."""
        task, self._replays = self._replays, None
        if task is None:
            return False
        task.cancel()
        self.spared_text = "stopped; W searches again"
        return True

    # --- looking back -----------------------------------------------------------------------------------------------

    def go_back(self, ns: int, show: Show) -> None:
        """Go so far back from now, in a session on a tape of the past; ``show`` gets it when it stands there."""
        reel = self.reel
        if reel is None or self._spawn is None or self.mirror.state is None or not reel.begun:
            self._tell("nothing is kept yet to look back at", "muted")
        else:
            self._stand_at(reel, self.mirror.now_ns(self.mono()) - ns, show)

    def move(self, ns: int, show: Show) -> bool:
        """Move through the past, from tape to tape; False when the present is reached."""
        reel, past = self.reel, self.past
        assert reel is not None
        if past is None or past.playback is None:
            return False
        tape, at_ns = past.playback.recording, past.playback.at_ns + ns
        if at_ns >= max(tape.last_ns, reel.last_ns):
            return False
        if tape.first_ns <= at_ns < tape.last_ns:
            past.scrub(ns)
        else:
            self._stand_at(reel, at_ns, show)
        return True

    def play_on(self, show: Show) -> bool:
        """Go on playing on the reel behind an older tape; False when the present is reached."""
        reel, past = self.reel, self.past
        if reel is None or past is None or past.playback is None or past.playback.recording is reel:
            return False
        at_ns = past.playback.at_ns
        past.playback.pause()
        self._stand_at(reel, max(at_ns, reel.first_ns), show)
        if self.past is not None and self.past.playback is not None:
            self.past.playback.play()
        return True

    def _stand_at(self, reel: Reel, at_ns: int, show: Show) -> None:
        """Show the moment: on the reel, or before its beginning on an older tape, for which the target is asked."""
        assert self._spawn is not None
        older = self._older
        if older is not None and not older.reaches(reel):
            older = self._older = None
        tape = older.tape if older is not None and older.tape is not None and at_ns < reel.first_ns else reel
        if self.past is None or self.past.playback is None or self.past.playback.recording is not tape:
            self.to_live()
            self.past = self._on_tape(tape)
            self._spawn(self._show_past(self.past, show), "look back")
        playback = self.past.playback
        assert playback is not None
        playback.seek(tape.seq_at(at_ns))
        if at_ns >= tape.first_ns:
            return
        if older is not None or not isinstance(self.feed, Remembering):
            self._tell("this console keeps nothing older" if older is None else older.edge, "muted")
        elif not self._asking:
            self._asking = True
            self._tell("asking the target for what is older …", "muted")
            work = self._find_older(reel, self.feed, at_ns, show, playback, playback.position_seq)
            self._spawn(work, "older")

    async def _find_older(
        self, reel: Reel, feed: Remembering, at_ns: int, show: Show, playback: "Playback", stood: int
    ) -> None:
        """Ask the target, and show the moment, unless the user has moved while the target answered."""
        try:
            recorded = await self._recorded()
            beat = self.mirror.heartbeat
            missing = "" if recorded is not None else (
                NO_RECORDING if beat is not None and beat.recorder is None else FAR_RECORDING)
            self._older = await older_than(reel, feed, recorded, missing, _yield)
        except KvbmConsoleError as error:
            self._tell(str(error), "fault")
            return
        finally:
            self._asking = False
        if self.past is not None and self.past.playback is playback and playback.position_seq == stood:
            self._stand_at(reel, at_ns, show)

    def _on_tape(self, tape: RunTape) -> "TargetSession":
        from kvbm_console.recording.playback import Playback, RecordingFeed

        playback = Playback(tape, follow=True)
        past = TargetSession(
            RecordingFeed(playback), None, playback, socket=self.socket, mono=self.mono, explain=self.explain,
            what_if=self.search, wall=self.wall, index=TapeIndex(tape if isinstance(tape, Reel) else None),
        )
        past.told = self.mirror.sources.told
        past._spawn, past._tell, past.quit, past.copy = self._spawn, self._tell, self.quit, self.copy
        past.export, past.show_target = self.export, self.show_target
        return past

    async def _show_past(self, past: "TargetSession", show: Show) -> None:
        assert self._spawn is not None
        self._spawn(past.run(), "past")
        await past.stood.wait()
        if self.past is past:
            show(past)

    def to_live(self) -> None:
        """Leave the past."""
        if self.past is not None and self.past.playback is not None:
            self.past.playback.close()
        self.past = None

    def scrub(self, ns: int) -> bool:
        """Move along the tape by a time; False at an end of the tape."""
        playback = self.playback
        assert playback is not None
        tape, here = playback.recording, playback.position_seq
        wanted = tape.seq_at(playback.at_ns + ns)
        if ns > 0:
            wanted = max(wanted, here + 1)  # nothing happened for so long
        playback.seek(wanted)
        return tape.first_seq <= wanted <= tape.last_seq

    # --- along a recording -------------------------------------------------------------------------------------------

    def watch(self, specs: list[BreakpointSpec]) -> None:
        """Look for the hits of these breakpoints on the recording from now on."""
        self.hits.change(specs)

    def seek_hit(self, back: bool) -> None:
        """Seek to the next or previous hit, as soon as the tape has been read for hits."""
        playback, spawn = self.playback, self._spawn
        if playback is None or spawn is None:
            return
        if self.hits.complete:
            self._to_hit(playback, back)
        elif self._searching:
            self._tell("still looking for hits", "muted")
        else:
            self._searching = True
            self._tell("looking for hits …", "muted")
            spawn(self._search(playback, back), "hits")

    async def _read_tape(self, playback: "Playback", connected: Connected) -> None:
        """Index the tape in the background. A place that was reached before gets its whole past afterwards."""
        await self.index.read(playback.recording, connected, self.mono, _yield)
        if not self.hits.specs:
            self.hits.take(self.index.hits)
        self.mirror.version += 1
        if self._short and not playback.playing:
            playback.seek(playback.position_seq)

    async def _search(self, playback: "Playback", back: bool) -> None:
        try:
            while not self.hits.complete:
                generation, specs = self.hits.generation, list(self.hits.specs)
                known = self.index.hits if self.index.complete else await recorded_hits(playback.recording, _yield)
                found = [*known]
                if specs and self.find_hits is not None:
                    found += await self.find_hits(specs)
                if generation == self.hits.generation:
                    self.hits.take(found)
        except KvbmConsoleError as error:
            self._tell(str(error), "fault")
            return
        finally:
            self._searching = False
        self._to_hit(playback, back)

    def _to_hit(self, playback: "Playback", back: bool) -> None:
        here = playback.position_seq
        found = self.hits.previous(here) if back else self.hits.next(here)
        total = len(self.hits.seqs) + self.hits.dropped
        if found is None:
            where = "in front of" if back else "behind"
            self._tell(f"no hit {where} seq {count(here)}; {plural(total, 'hit')} on this recording", "text")
            return
        playback.seek(found)
        self._tell(f"hit {self.hits.seqs.index(found) + 1} of {count(total)}, seq {count(found)}", "text")

    def seek_slot(self, slot: int) -> None:
        """Seek to the next event of a slot."""
        playback, spawn = self.playback, self._spawn
        if playback is not None and spawn is not None and not self._searching:
            self._searching = True
            spawn(self._next_of(playback, slot), "slot")

    async def _next_of(self, playback: "Playback", slot: int) -> None:
        here = playback.position_seq
        names = Names(self.mirror.state)
        try:
            for events in playback.recording.events(here + 1):
                names.learn(events)
                for event in events:
                    found = getattr(event, "slot", None)
                    if found is None:
                        found = names.slot_of(getattr(event, "candidate", None), getattr(event, "operation", None))
                    if found == slot and event.seq > here:
                        playback.seek(event.seq)
                        return
                await _yield()
        except RecordingError as error:
            self._tell(str(error), "fault")
            return
        finally:
            self._searching = False
        self._tell("no later event of this request on the recording", "text")

    # --- verbs -------------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[Controls], Awaitable[str]]) -> None:
        controls = self.controls
        if controls is None or self._spawn is None:
            self._tell("this session only observes", "muted")
            return
        if self._calls >= CALLS_MAX:
            self._tell("the target has not answered the calls before", "caution")
            return
        self._calls += 1

        async def run() -> None:
            try:
                text, role = await work(controls), "text"
            except KvbmConsoleError as error:
                text, role = str(error), "fault"
            finally:
                self._calls -= 1
            self._tell(text, role)

        self._spawn(run(), "call")

    def ask(self, verb: Verb[Any]) -> None:
        """Carry out a verb; its answer comes as a notice."""
        async def work(controls: Controls) -> str:
            return verb.told(await controls.ask(verb))
        self._call(work)

    def retry(self) -> None:
        """Reconnect at once."""
        async def work(controls: Controls) -> str:
            await controls.retry_now()
            return "trying now"
        self._call(work)


def _between(tape: RunTape, first: int, last: int) -> list[Event]:
    """The events of a tape from ``first`` up to ``last``."""
    found: list[Event] = []
    for events in tape.events(first) if first < last else ():
        found += [event for event in events if event.seq < last]
        if events[-1].seq >= last - 1:
            break
    return found


def events_in(item: FeedItem) -> int:
    """Events that an item brings."""
    if isinstance(item, EventsArrived):
        return len(item.events)
    return item.batch.count if isinstance(item, BatchArrived) else 0
