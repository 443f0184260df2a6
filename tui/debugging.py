"""Keys of the debugger: breakpoints and holds on a live target, and the transport of a recording.

Law of this file: nothing acts on a target without control, and an action that would stop more than one slot asks first.
On a recording every key ends at a place whose facts are exact.
"""

from collections.abc import Callable, Iterator
from fnmatch import translate
from re import compile as compile_pattern
from typing import Any, Final, cast

import msgspec

from kvbm_console.analysis.lints import Level
from kvbm_console.core.breakpoints import Moment
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import SlotMoved
from kvbm_console.core.expression import ExpressionError, compile_condition
from kvbm_console.core.ids import Site, SlotState
from kvbm_console.core.slots import SlotFacts
from kvbm_console.stream.verbs import (
    ContinueHold,
    Disarm,
    Freeze,
    PaletteEntry,
    SetBreakpoint,
    SkipCandidate,
    StepPipeline,
    StepSlot,
    Thaw,
    Verb,
)

from .desk import BREAKS, Desk
from .model.breaks import NEXT, NO_REQUESTS, complete_breakpoint, parse_breakpoint
from .model.filters import FilterError
from .model.lints import slot_level
from .model.numbers import S, count, plural
from .prompts import Prompt

KEYS: Final = frozenset("bcCsSuXDF")
VERDICT_NS: Final = 60 * S
"""The time over which the editor of a breakpoint counts its past hits."""
SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
"""Steps of the speed of a recording."""


def press(desk: Desk, key: str) -> None:
    """Answer a key of the debugger."""
    if desk.recording:
        _on_recording(desk, key)
        return
    why = refusal(desk)
    if why:
        desk.tell(f"{key}: not here, {why}", "muted")
        return
    match key:
        case "b":
            edit_breakpoint(desk)
        case "c":
            _continue(desk)
        case "C":
            _continue_all(desk)
        case "s":
            _on_hold(desk, StepSlot, "step")
        case "S":
            desk.actions.ask(StepPipeline())
        case "u":
            _until(desk)
        case "X":
            _on_hold(desk, SkipCandidate, "skip the candidates of")
        case "D":
            confirm(desk, "Disarm all breakpoints and release all holds?", lambda: desk.actions.ask(Disarm()),
                    "nothing was disarmed")
        case "F" if desk.mirror.state is not None and desk.mirror.state.frozen is not None:
            desk.actions.ask(Thaw())
        case "F":
            confirm(desk, "Freeze the target for at most 30 s?", lambda: desk.actions.ask(Freeze()),
                    "nothing was frozen")


def refusal(desk: Desk) -> str:
    """Why keys of the debugger do not work here; empty when they do."""
    if not desk.may_control:
        if desk.looks_back:
            return "the past cannot be stopped, come back to live first"
        return "a recording cannot be stopped" if desk.recording else (
            "read-only" if desk.read_only else "this session only observes")
    return ""


def _on_recording(desk: Desk, key: str) -> None:
    if key in ("c", "C"):
        desk.actions.seek_hit(key == "C")
    elif key in ("s", "S"):
        along_slot(desk, back=key == "S")
    elif key == "b":
        edit_breakpoint(desk)
    elif key == "u":
        run_to_cursor(desk)
    elif key == "D":
        desk.actions.watch([])
        desk.tell("only the hits of the recorded run are looked for")
    else:
        desk.tell(f"{key}: not here, {refusal(desk)}", "muted")


def confirm(desk: Desk, question: str, act: Callable[[], None], otherwise: str) -> None:
    """Ask a question; any answer but yes shows ``otherwise``."""
    def answer(text: str) -> None:
        if text.strip().lower() in ("y", "yes"):
            act()
        else:
            desk.tell(otherwise, "muted")

    desk.prompt = Prompt(f"{question} y/n ", "", answer)


# --- the palette's commands ---


def request(desk: Desk, entry: PaletteEntry, *arguments: Any) -> None:
    """Carry out a command of the palette, after its question if it has a question."""
    verb = entry.make(*arguments)
    if entry.question:
        time = f"{arguments[0] / S:g} s" if entry.takes == "TIME" else ""
        question = entry.question.format(time=time, live=_live(desk))
        confirm(desk, question, lambda: desk.actions.ask(verb), entry.declined)
    else:
        desk.actions.ask(verb)


def _live(desk: Desk) -> str:
    state = desk.mirror.state
    return plural(len(state.slots) if state is not None else 0, "live request")


# --- breakpoints -----------------------------------------------------------------------------------------------------


def edit_breakpoint(desk: Desk) -> None:
    """Open a prompt with a breakpoint on the selection, its verdict below."""
    ask_for_breakpoint(desk, _on_selection(desk), 0)


def _on_selection(desk: Desk) -> str:
    """The proposal of the view, else a breakpoint on the selected slot, else on every slot that is loaded."""
    proposal = desk.view.proposal(desk)
    if proposal:
        return proposal
    slot = _selected(desk)
    if slot is None:
        return f"to {SlotState.ONBOARDING.label} request *"
    if stops_next(desk) and desk.mirror.state is not None:
        kind = slot.request[: next(at for at, char in enumerate(f"{slot.request}0") if char in "0123456789*?[")]
        copies = [desk.mirror.state.candidates[number] for number in sorted(slot.outstanding)]
        where = f"site {Site.DISPATCH_WILL.label} route {copies[0].route.label}" if copies else f"to {slot.state.label}"
        return f"{where} request {kind}* once"
    return f"to {NEXT[slot.state].label} request {slot.request}"


def _selected(desk: Desk) -> SlotFacts | None:
    state, request = desk.mirror.state, desk.shown_request()
    return state.slot_named(request) if state is not None and request else None


def stops_next(desk: Desk) -> bool:
    """True if the selected request is stuck, so that ``b`` proposes to stop the next request of its kind there."""
    slot = _selected(desk)
    return slot is not None and slot.state is not SlotState.INITIALIZED and (
        slot_level(desk.mirror, slot, desk.now_ns) in (Level.FAULT, Level.CAUTION)
    )


def ask_for_breakpoint(desk: Desk, text: str, number: int) -> None:
    """The editor with this text. ``number`` is the breakpoint to replace; 0 sets a new breakpoint."""
    def submit(typed: str) -> None:
        try:
            spec = msgspec.structs.replace(parse_breakpoint(typed), id=number)
            if desk.recording:
                desk.actions.watch([*desk.actions.hits.specs, spec])
                desk.tell(f"looking for {spec.describe()}; c next hit, C previous")
            else:
                desk.actions.ask(SetBreakpoint(spec))
        except UsageError as error:
            desk.tell(str(error), "fault")

    def check(typed: str) -> str:
        try:
            return verdict(desk, parse_breakpoint(typed))
        except ExpressionError as error:
            raise FilterError(error.column - 1, error.message) from None
        except UsageError as error:
            raise ValueError(str(error)) from None

    desk.prompt = Prompt("break ", text, submit, check, desk.histories.setdefault("break", []),
                         complete=complete_breakpoint)


def verdict(desk: Desk, spec: BreakpointSpec) -> str:
    """``ok, would have hit 3 times in the last 60 s``, or of how many live slots the condition is true."""
    state = desk.mirror.state
    if desk.recording or state is None:
        return f"ok, {spec.describe()}"
    if state.streams_only:
        raise ValueError(NO_REQUESTS)
    named = compile_pattern(translate(spec.request)).match
    if spec.condition:
        holds = compile_condition(spec.condition)
        live = [slot for slot in state.slots.values() if named(slot.request)]
        true = sum(
            holds(slot, state, Moment(spec.site, slot.slot, slot.request, slot.state, spec.to_state or slot.state))
            for slot in live
        )
        return f"ok, true now of {true} of {plural(len(live), 'live slot')} that it names"
    if spec.site in (Site.TRANSITION_WILL, Site.TRANSITION_DID):
        found = sum(1 for move in _recent_moves(desk) if (
            (spec.from_state is None or move.old is spec.from_state)
            and (spec.to_state is None or move.new is spec.to_state)
            and named(_request_of(desk, move.slot))
        ))
        return f"ok, would have hit {plural(found, 'time')} in the last 60 s"
    return f"ok, {spec.describe()}"


def _recent_moves(desk: Desk) -> Iterator[SlotMoved]:
    edge = desk.now_ns - VERDICT_NS
    for event in reversed(desk.mirror.log):
        if event.at_ns < edge:
            return
        if isinstance(event, SlotMoved):
            yield event


def _request_of(desk: Desk, slot: int) -> str:
    life = desk.mirror.lives.get(slot)
    if life is None:
        life = next((past for past in desk.mirror.past if past.slot == slot), None)
    return "" if life is None else life.request


# --- holds -----------------------------------------------------------------------------------------------------------


def hold_to_act_on(desk: Desk) -> int | None:
    """The hold of the selected slot, else the only hold; None when there are several."""
    state = desk.mirror.state
    if state is None:
        return None
    slot = state.slot_named(desk.selected) if desk.selected else None
    if slot is not None and slot.hold is not None:
        return slot.hold
    return next(iter(state.holds)) if len(state.holds) == 1 else None


def _continue(desk: Desk) -> None:
    hold = hold_to_act_on(desk)
    if hold is not None:
        desk.actions.ask(ContinueHold(hold))
    elif desk.mirror.state is not None and desk.mirror.state.holds:
        desk.go(BREAKS)
    else:
        desk.tell("nothing is held")


def _continue_all(desk: Desk) -> None:
    state = desk.mirror.state
    if state is not None and state.holds:
        desk.actions.ask(ContinueHold())
        desk.tell(f"continuing {plural(len(state.holds), 'hold')}")
    else:
        desk.tell("nothing is held")


def _on_hold(desk: Desk, make: Callable[[int], Verb[str]], verb: str) -> None:
    hold = hold_to_act_on(desk)
    if hold is None:
        desk.tell(f"select a held slot to {verb} it")
    else:
        desk.actions.ask(make(hold))


def _until(desk: Desk) -> None:
    """Continue the hold and stop the same slot again at a state."""
    hold = hold_to_act_on(desk)
    if hold is None:
        desk.tell("select a held slot to let it go until a state")
        return
    labels = [state.label for state in SlotState]

    def check(typed: str) -> str:
        if typed.strip() not in labels:
            raise ValueError(f"a state: {', '.join(labels)}")
        return f"ok, continues and stops once more when it is {typed.strip()}"

    def submit(typed: str) -> None:
        desk.actions.ask(ContinueHold(hold, cast(SlotState, SlotState.labelled(typed.strip()))))

    state = desk.mirror.state
    slot = state.slots.get(state.holds[hold].slot) if state is not None and hold in state.holds else None
    first = NEXT[slot.state].label if slot is not None else SlotState.DECODING.label
    desk.prompt = Prompt(
        "continue until ", first, submit, check, desk.histories.setdefault("until", []),
        complete=lambda typed: [label for label in labels if label.startswith(typed.strip())],
    )


def transport_key(desk: Desk, key: str) -> None:
    """``,`` and ``.`` by events, ``<`` and ``>`` the speed."""
    playback = desk.actions.playback
    if playback is None:
        return
    if key in ",.":
        playback.step(-1 if key == "," else 1)
        return
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - playback.speed))
    index = min(len(SPEEDS) - 1, max(0, nearest + (1 if key == ">" else -1)))
    playback.set_speed(SPEEDS[index])


def along_slot(desk: Desk, *, back: bool) -> None:
    """Go to the next or previous event of the selected request; without a request, of the whole tape."""
    playback = desk.actions.playback
    if playback is None:
        return
    life = desk.life
    if life is None:
        playback.step(-1 if back else 1)
        return
    if not back:
        desk.actions.seek_slot(life.slot)
        return
    here = playback.position_seq
    seqs = [event.seq for event in life.story] + [move.seq for move in life.moves if move.seq is not None]
    before = max((seq for seq in seqs if seq < here), default=None)
    if before is None:
        desk.tell(f"nothing of this request is kept in front of seq {count(here)}", "muted")
    else:
        playback.seek(before)


def run_to_cursor(desk: Desk) -> None:
    """Seek to the cursor, or to the chosen event; forwards at most to the next known hit."""
    playback, state = desk.actions.playback, desk.mirror.state
    if playback is None or state is None:
        return
    place = desk.place()
    if place is None or place[0] == state.seq - 1:
        desk.tell("put the cursor on a place first: in the timeline, the story or the log", "muted")
        return
    here, target = playback.position_seq, place[0]
    hit = desk.actions.hits.next(here)
    if hit is not None and here < hit < target:
        target = hit
        desk.tell(f"stopped at a hit in front of the cursor, seq {count(hit)}")
    playback.seek(target)
