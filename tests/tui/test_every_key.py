"""Every key of every view, pressed as a terminal sends it: it does something that is seen, or asks the target.

The keys are read out of the code that answers them, so that a new one without a place here fails.

Law of this file: what a key did is the difference between two frames or a call; a key without either is a bug.
"""

import ast
import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from textual import events
from textual.pilot import Pilot

from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.core.columns import pack_hashes
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.events import PoolKnown
from kvbm_console.core.ids import Authority, SlotState, Tier
from kvbm_console.planning.what_if import Counterfactual, Remedy, ReplayedRequest, Trouble
from kvbm_console.recording.reader import Recording
from kvbm_console.stream.feed import Disconnected, FeedItem, PastSeen
from kvbm_console.stream.verbs import Verb
from tests.tui.desks import FakeActions, FakeTransport, desk_of
from tests.tui.script import Mono, S, Script, connected, story
from tui import debugging
from tui.app import ConsoleApp
from tui.desk import Desk
from tui.draw.frame import NAMES
from tui.draw.table import MOVES
from tui.keys import press
from tui.model.places import Mark
from tui.source import TargetSession

ROOT: Final = Path(__file__).resolve().parents[2] / "tui"
RECORDINGS: Final = ROOT.parent / "recordings"
SIZE: Final = (120, 40)
FILES: Final = ("overview", "slots", "slot", "timeline", "transfers", "tiers", "breaks", "record", "log", "prefixes",
                "warnings", "why", "finished", "misses", "what_if")
"""The views by their number, as files."""
NAMED: Final = {
    "?": "question_mark", "/": "slash", ":": "colon", "!": "exclamation_mark", "[": "left_square_bracket",
    "]": "right_square_bracket", "'": "apostrophe", ",": "comma", ".": "full_stop", "<": "less_than_sign",
    ">": "greater_than_sign", "{": "left_curly_bracket", "}": "right_curly_bracket", "+": "plus", "-": "minus",
    "=": "equals_sign", "_": "underscore",
}
"""Keys as Textual names them."""


def keys_in(file: str, function: str) -> set[str]:
    """The keys that a function compares with: by ``match``, ``==`` and ``in``."""
    found: set[str] = set()

    def take(node: ast.AST) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Tuple):
            for one in node.elts:
                take(one)
        elif isinstance(node, ast.Name) and node.id == "MOVES":
            found.update(MOVES)
        elif isinstance(node, ast.MatchValue):
            take(node.value)
        elif isinstance(node, ast.MatchOr):
            for pattern in node.patterns:
                take(pattern)

    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for function_node in ast.walk(tree):
        if not isinstance(function_node, ast.FunctionDef) or function_node.name != function:
            continue
        for node in ast.walk(function_node):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "key":
                for operator, one in zip(node.ops, node.comparators, strict=True):
                    if isinstance(operator, ast.In) and isinstance(one, ast.Constant):
                        found.update(one.value)  # characters of a string
                    else:
                        take(one)
            elif isinstance(node, ast.Match) and isinstance(node.subject, ast.Name) and node.subject.id == "key":
                for case in node.cases:
                    take(case.pattern)
    return found


@cache
def busy() -> Script:
    """The story with enough requests, breakpoints and warnings that lists can be walked."""
    script = story()
    for number in range(60):
        script.open(f"more-{number:04}.1", 2)
    script.set_breakpoint(BreakpointSpec(id=2, to_state=SlotState.FINISHING), "dev")
    script.wait(20 * S)
    late = script.run("late-0001.1", 5)
    for _ in range(4):
        script.offload(late, 1)
    return script


@cache
def watched() -> Script:
    """The story beside so many engines that are followed that the tiers scroll."""
    script = story()
    for rank in range(12):
        number = len(script.state.pools)
        script.emit(PoolKnown, number, 2 + rank, rank, 0, Tier.G1, "GPU", None, 16, Authority.STREAM)
    return script


@cache
def explained() -> Any:
    """Why a real request missed what it missed, with several runs of blocks."""
    return explain(evidence_of(Recording.open(RECORDINGS / "preempt-and-resume.mcap")), "long-b")


def fresh(view: int, *, recording: bool = False) -> tuple[Desk, FakeActions]:
    """A desk that shows a view, something selected where the view is about one request."""
    script, mono = watched() if view == 5 else busy(), Mono()
    actions = FakeActions(FakeTransport() if recording else None)
    items: list[FeedItem] | None = [connected(recording=True, control=False), script.snapshot()] if recording else None
    desk = desk_of(script, mono=mono, items=items, actions=actions)
    actions.explained = explained()
    if view == 14:
        remedies = [Remedy(f"--kv-cpu-blocks {number}", ReplayedRequest(7, 0, 1.0), 1, 2**20, None)
                    for number in range(60)]
        actions.spared = Counterfactual(
            "", "long-b", "tape", [], 7, ReplayedRequest(5, 1, 2.0), True, 1.0,
            [Trouble("preemption", "preempted once", remedies, 61, None, None, "from the beginning on")])
    if view in (2, 8, 11):
        desk.select("rag-0002.7")
    if view == 9:  # two prompts that share their beginning, wide enough to be the first box
        for number in range(100):
            column = pack_hashes([7, 8, 9 + number % 2])
            desk.mirror.prefixes.opened(1_000 + number, f"shared-{number}", column, script.state.at_ns)
    if view == 13:
        for fate, series in desk.mirror.fates.series.items():
            series.add(script.state.at_ns, 5)
            desk.mirror.fates.blocks[fate] = 5
            desk.mirror.fates.askers[fate].update({f"r{number}": 1 for number in range(60)})
    if view == 7:
        for seq in range(5, 60, 5):
            desk.marks.toggle(Mark(seq, script.events[seq].at_ns))
    desk.current = view
    desk.draw(*SIZE)
    return desk, actions


class Silent:
    """A feed that says nothing: the desks are made by hand."""

    async def items(self) -> AsyncIterator[FeedItem]:
        return
        yield


class Counting(ConsoleApp):
    """A console that tells when a key was answered: the pilot waits for an idle process, which a busy machine fakes."""

    answered = 0
    more: asyncio.Event

    async def on_event(self, event: events.Event) -> None:
        await super().on_event(event)
        if isinstance(event, events.Key) and not event.is_forwarded:
            self.answered += 1
            self.more.set()


class Keyboard:
    """Presses keys, and returns when each was answered."""

    def __init__(self, app: Counting, pilot: "Pilot[int]") -> None:
        self.app = app
        self._pilot = pilot
        app.more = asyncio.Event()

    async def press(self, *keys: str) -> None:
        wanted = self.app.answered + len(keys)
        await self._pilot.press(*keys)
        async with asyncio.timeout(30):
            while self.app.answered < wanted:
                self.app.more.clear()
                await self.app.more.wait()


@asynccontextmanager
async def headless() -> AsyncIterator[Keyboard]:
    app = Counting(TargetSession(Silent()))
    async with app.run_test(size=SIZE) as pilot:
        yield Keyboard(app, pilot)


def seen(desk: Desk, actions: FakeActions) -> object:
    """Everything that a key may change: the frame with its roles, what was asked, the transport."""
    playback = actions.playback
    transport = (playback.playing, playback.speed, list(playback.calls)) if playback is not None else None
    return [*desk.draw(*SIZE)], list(actions.calls), actions.paused, transport


UP: Final = frozenset({"up", "k", "pageup", "g", "home"})
BEFORE: Final[dict[tuple[int, str], tuple[str, ...]]] = {
    (0, "k"): ("down",), (0, "up"): ("down",),
    (1, "escape"): ("down",),
    (2, "escape"): ("down",), (2, "G"): ("g",),
    (3, "0"): ("down",), (3, "enter"): ("down",), (3, "escape"): ("h",), (3, "f"): ("h",),
    (3, "n"): ("down",), (3, "N"): ("down", "n", "n"),
    (4, "enter"): ("down",), (4, "escape"): ("down",),
    (6, "B"): ("down",), (6, "x"): ("down",), (6, "escape"): ("down",),
    (8, "G"): ("up",), (8, "end"): ("up",), (8, "f"): ("up",), (8, "escape"): ("up",), (8, "enter"): ("up",),
    (8, "pagedown"): ("g",),
    **{(12, key): () for key in UP},  # the story has one finished request
    **{(9, key): ("down",) for key in ("up", "k")}, **{(9, key): ("l",) for key in ("h", "shift+tab")},
    (13, "escape"): ("enter",), (9, "Z"): ("z",), (9, "0"): ("-",), (9, "escape"): ("enter",),
    (9, "+"): ("-",), (9, "="): ("-",),
}
"""The keys that have to be pressed before a key does something, by view and key."""
LIVE: Final[dict[str, tuple[int, tuple[str, ...], str]]] = {
    **{str(number + 1): (10, (), word) for number, word in enumerate((
        "NEEDS YOU", "sorted by need", "STORY", "whole run", "TRANSFERS", "referenced", "BREAKPOINTS", "RECORDER",
        "LOG",
    ))},
    "q": (0, (), "call quit"), "ctrl+c": (0, (), "call quit"), "?": (0, (), "EVERYWHERE"),
    "escape": (0, ("2",), "NEEDS YOU"), "/": (1, (), " / "), ":": (0, (), "show this view"),
    "ctrl+p": (0, (), "show this view"),
    "!": (0, (), "WARNINGS"), "H": (0, (), "HELD"), "t": (0, (), "whole run"), "p": (0, (), "PREFIXES"),
    "d": (0, (), "FINISHED"),
    "M": (0, (), "FATE"),
    "space": (0, (), "PAUSED"),
    "[": (8, ("up",), ""), "]": (2, ("G",), ""), "w": (2, (), "call why"),
    "W": (2, (), "call what_if"), "{": (0, (), "call show_target"),
    "}": (0, (), "call show_target"), "m": (8, (), "' comes back to it"), "'": (8, ("m", "g"), "seq"),
    "y": (1, ("down",), "call copy"), "e": (1, (), "call export"), "r": (0, (), "call retry"),
    "b": (2, (), "break to"), "c": (6, (), "call continue_hold"), "C": (0, (), "call continue_hold"),
    "s": (6, ("tab",), "call step"), "S": (0, (), "call step_pipeline"), "u": (6, ("tab",), "until"),
    "left": (0, (), "call go_back"), "shift+left": (0, (), "call go_back"), "right": (0, (), "this is live"),
    "shift+right": (0, (), "this is live"),
    "X": (6, ("tab",), "call skip"), "D": (0, (), "Disarm all"), "F": (0, (), "Freeze the target"),
}
"""Keys that work in every view: from which view, after which keys, and what is then on the screen or asked."""
TAPE: Final[dict[str, tuple[int, tuple[str, ...], str]]] = {
    ",": (0, (), "call step"), ".": (0, (), "call step"), "<": (0, (), "speed 0.5"), ">": (0, (), "speed 2.0"),
    "space": (0, (), "PLAY"), "c": (0, (), "call seek_hit"), "C": (0, (), "call seek_hit"), "b": (0, (), " "),
    "s": (2, (), "call"), "S": (0, (), "call step"),
    **dict.fromkeys(("left", "right", "shift+left", "shift+right"), (0, (), "call scrub")),
}
"""The same on a recording."""


def pressed_before(view: int, key: str) -> tuple[str, ...]:
    if (view, key) in BEFORE:
        return BEFORE[view, key]
    return ("G",) if key in UP else ()


def of_views() -> Iterator[tuple[int, str]]:
    for view, file in enumerate(FILES):
        for key in sorted(keys_in(f"views/{file}.py", "press")):
            yield view, key


@pytest.mark.asyncio
@pytest.mark.parametrize("view", range(len(FILES)), ids=FILES)
async def test_every_key_of_a_view_does_something(view: int) -> None:
    idle = []
    async with headless() as keyboard:
        for key in [key for number, key in of_views() if number == view]:
            desk, actions = fresh(view)
            keyboard.app.desks[0] = desk
            before = pressed_before(view, key)
            await keyboard.press(*(NAMED.get(one, one) for one in before))
            was = seen(desk, actions)
            await keyboard.press(NAMED.get(key, key))
            if seen(desk, actions) == was:
                idle.append(key)
    assert " ".join(idle) == ""


def test_every_key_that_works_everywhere_has_a_case() -> None:
    answered = keys_in("keys.py", "_everywhere") | set(debugging.KEYS)
    assert answered == set(LIVE) | (set(TAPE) & set(",.<>"))
    assert len(FILES) == len(NAMES)


def asked(actions: FakeActions) -> list[str]:
    """The questions that a key asked, in words."""
    playback = actions.playback
    calls = [*actions.calls, *(playback.calls if playback is not None else [])]
    told = [f"call {call.verb if isinstance(call, Verb) else call[0]}" for call in calls]
    return [*told, f"speed {playback.speed}"] if playback is not None else told


@pytest.mark.asyncio
@pytest.mark.parametrize("recording", [False, True], ids=["live", "recording"])
async def test_every_key_that_works_everywhere_does_what_it_says(recording: bool) -> None:
    wrong = []
    async with headless() as keyboard:
        for key, (view, before, wanted) in (TAPE if recording else LIVE).items():
            desk, actions = fresh(view, recording=recording)
            if key in "{}":
                desk.targets = ["one", "two"]
            if key == "r":
                desk.mirror.take(Disconnected("gone", 3.0), desk.mono())
            keyboard.app.desks[0] = desk
            await keyboard.press(*(NAMED.get(one, one) for one in before))
            was = seen(desk, actions)
            await keyboard.press(NAMED.get(key, key))
            shown = [line.text for line in desk.draw(*SIZE)]
            if seen(desk, actions) == was or not any(wanted in one for one in [*shown, *asked(actions)]):
                wrong.append(f"{key}: {asked(actions)}, {shown[-1].strip()}")
    assert "\n".join(wrong) == ""


NOTHING_YET: Final[dict[str, list[FeedItem]]] = {
    "connecting": [], "connected": [connected()], "reading": [connected(recording=True, control=False)],
    "gone": [Disconnected("nobody listens", 3.0)],
    "past": [connected(), PastSeen(story().events, story().state)],
}
"""Items that a console may have heard before the first facts."""


@pytest.mark.parametrize("heard", NOTHING_YET)
def test_no_key_of_any_view_fails_before_the_first_facts(heard: str) -> None:
    keys = keys_in("keys.py", "_everywhere") | debugging.KEYS | {key for _, key in of_views()}
    actions = FakeActions(FakeTransport() if heard == "reading" else None)
    desk = desk_of(items=NOTHING_YET[heard], actions=actions, late_ns=0)
    for view in range(len(FILES)):
        for key in sorted(keys):
            desk.current, desk.prompt = view, None
            press(desk, key)
            assert len(desk.draw(*SIZE)) == SIZE[1]
    assert all(call[0] != "export" for call in actions.calls if isinstance(call, tuple)), "there is no view to export"


TYPED: Final = {"right": ("left",), "end": ("left",), "ctrl+e": ("left",), "delete": ("left",), "down": ("up", "up")}
"""The keys that have to be pressed before a key of the prompt does something."""


@pytest.mark.asyncio
@pytest.mark.parametrize("key", sorted(keys_in("prompts.py", "press") | keys_in("prompts.py", "_edit")))
async def test_every_key_of_a_prompt(key: str) -> None:
    async with headless() as keyboard:
        desk, actions = fresh(1)
        keyboard.app.desks[0] = desk
        await keyboard.press("slash", *"age", "enter", "slash", "ctrl+u", *"stat", *TYPED.get(key, ()))
        was = seen(desk, actions)
        await keyboard.press(key)
        idle = seen(desk, actions) == was
    assert not idle


def test_a_key_that_nobody_answers_is_missed_by_these_tests() -> None:
    assert {"n", "N", "+", "=", "h", "shift+tab"} <= keys_in("views/timeline.py", "press")
    assert "f" in keys_in("views/log.py", "press")
    assert {"pageup", "x"} <= keys_in("views/record.py", "press")
