"""What keys and clicks do everywhere: views, prompts, and the verbs of the debugger.

Law of this file: a key that needs the target says so when it may not act, and one that means nothing does nothing.
"""

from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import SlotState

from .desk import BREAKS, LOG, OVERVIEW, SLOT, SLOTS, TIERS, TIMELINE, TRANSFERS, Desk
from .draw.frame import TABS
from .draw.spans import Action
from .model.breaks import NEXT, parse_breakpoint
from .model.filters import Filter, completions, plain_text
from .model.numbers import plain, plural
from .prompts import Prompt

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
"""Steps of the speed of a recording."""


def press(desk: Desk, key: str) -> None:
    """Answer a key: the prompt first, then the view, then the keys that work everywhere."""
    if desk.prompt is not None:
        prompt = desk.prompt
        if not prompt.press(key) and desk.prompt is prompt:
            desk.prompt = None
        return
    if desk.help:
        desk.help = False
        if key in ("?", "escape", "enter"):
            return
    if desk.view.press(desk, key):
        return
    _everywhere(desk, key)


def _everywhere(desk: Desk, key: str) -> None:
    match key:
        case "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9":
            desk.go(int(key) - 1)
        case "q" | "ctrl+c":
            desk.actions.quit()
        case "?":
            desk.help = True
        case "escape":
            _back(desk)
        case "/":
            _filter(desk)
        case ":" | "ctrl+p":
            _command(desk)
        case "!":
            desk.go(OVERVIEW)
        case "H":
            _newest_hold(desk)
        case "t":
            desk.go(TIMELINE)
        case "space":
            _pause(desk)
        case "y":
            _copy(desk)
        case "e":
            seq = desk.mirror.state.seq - 1 if desk.mirror.state is not None else 0
            desk.actions.export(f"kvbm-console-{TABS[desk.current][0].lower()}-{max(0, seq)}")
        case "r":
            if desk.mirror.disconnected is not None:
                desk.actions.retry()
                desk.tell("trying now")
        case "b" | "c" | "C" | "s" | "D":
            _debug(desk, key)
        case "," | "." | "<" | ">":
            _transport(desk, key)


def _back(desk: Desk) -> None:
    if desk.current in desk.filters:
        del desk.filters[desk.current]
    elif desk.crumbs:
        desk.current = desk.crumbs.pop()


def _copy(desk: Desk) -> None:
    """The selected request's name, else what the view shows."""
    if desk.selected is not None:
        desk.actions.copy(desk.selected)
        desk.tell(f"copied {plain(desk.selected)}")
    else:
        lines = desk.draw(desk.width, desk.height)
        desk.actions.copy("\n".join(line.text.rstrip() for line in lines))
        desk.tell("copied the screen")


def _pause(desk: Desk) -> None:
    if desk.actions.playback is not None:
        desk.actions.playback.toggle()
    elif not desk.recording:
        desk.actions.pause(not desk.actions.paused)


def _transport(desk: Desk, key: str) -> None:
    playback = desk.actions.playback
    if playback is None:
        return
    if key in ",.":
        playback.step(-1 if key == "," else 1)
        return
    nearest = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - playback.speed))
    index = min(len(SPEEDS) - 1, max(0, nearest + (1 if key == ">" else -1)))
    playback.set_speed(SPEEDS[index])


def _newest_hold(desk: Desk) -> None:
    state = desk.mirror.state
    if state is None or not state.holds:
        desk.tell("nothing is held")
        return
    desk.select(state.slots[state.holds[max(state.holds)].slot].request)
    desk.go(SLOT)


# --- the debugger ----------------------------------------------------------------------------------------------------


def _debug(desk: Desk, key: str) -> None:
    if not desk.may_control:
        why = "a recording cannot be stopped" if desk.recording else (
            "read-only" if desk.read_only else "this session only observes")
        desk.tell(f"{key}: not here, {why}", "muted")
        return
    if key == "b":
        _break(desk)
    elif key == "c":
        _continue(desk)
    elif key == "C":
        _continue_all(desk)
    elif key == "s":
        _step(desk)
    else:
        question = "Disarm all breakpoints and release all holds? y/n "
        desk.prompt = Prompt(question, "", lambda text: _disarm(desk, text))


def _disarm(desk: Desk, text: str) -> None:
    if text.strip().lower() in ("y", "yes"):
        desk.actions.disarm()
    else:
        desk.tell("nothing was disarmed", "muted")


def _break(desk: Desk) -> None:
    state = desk.mirror.state
    slot = state.slot_named(desk.selected) if state is not None and desk.selected else None
    target = NEXT[slot.state] if slot is not None else SlotState.ONBOARDING
    text = f"to {target.label} request {slot.request if slot is not None else '*'}"

    def submit(typed: str) -> None:
        try:
            desk.actions.add_breakpoint(parse_breakpoint(typed))
        except UsageError as error:
            desk.tell(str(error), "fault")

    def check(typed: str) -> str:
        try:
            return parse_breakpoint(typed).describe()
        except UsageError as error:
            raise ValueError(str(error)) from None

    desk.prompt = Prompt("break ", text, submit, check, desk.histories.setdefault("break", []))


def hold_to_act_on(desk: Desk) -> int | None:
    """The hold of the selected slot, else the only one; None when it is not clear which."""
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
        desk.actions.continue_hold(hold)
    elif desk.mirror.state is not None and desk.mirror.state.holds:
        desk.go(BREAKS)
    else:
        desk.tell("nothing is held")


def _continue_all(desk: Desk) -> None:
    state = desk.mirror.state
    if state is not None and state.holds:
        desk.actions.continue_hold(None)
        desk.tell(f"continuing {plural(len(state.holds), 'hold')}")
    else:
        desk.tell("nothing is held")


def _step(desk: Desk) -> None:
    hold = hold_to_act_on(desk)
    if hold is None:
        desk.tell("select a held slot to step it")
    else:
        desk.actions.step(hold)


# --- filter and commands ---------------------------------------------------------------------------------------------


def _filter(desk: Desk) -> None:
    view, schema = desk.current, desk.view.schema
    if schema is None:
        desk.tell("nothing to filter here", "muted")
        return
    before = desk.filters.get(view)

    def apply(text: str) -> None:
        if text.strip():
            desk.filters[view] = Filter.parse(text.strip(), schema)
        else:
            desk.filters.pop(view, None)

    def check(text: str) -> str:
        if text.strip():
            Filter.parse(text, schema)
            plain_ = plain_text(text, schema)
            return "" if plain_ is None else f"requests named {plain_}; tab completes a field"
        return f"text of a request, or {', '.join(list(schema.fields)[:5])} …; tab completes, up recalls"

    desk.prompt = Prompt("/ ", before.text if before is not None else "", apply, check,
                         desk.histories.setdefault("filter", []), live=apply,
                         cancel=lambda: apply(before.text if before is not None else ""),
                         complete=lambda text: completions(text, schema))


COMMANDS = {
    "quit": "leave the console",
    "seek N": "recording: go to event N",
    "speed N": "recording: play N times as fast",
    "view N": "show view 1 to 9",
    "break …": "set a breakpoint, as with b",
    "delete N": "remove breakpoint N",
    "enable N": "arm breakpoint N",
    "disable N": "mute breakpoint N",
    "continue all": "release every hold",
    "disarm": "mute every breakpoint and release every hold",
}
"""What can be typed after the colon, and what it does."""


def _command(desk: Desk) -> None:
    def check(text: str) -> str:
        words = [name for name in COMMANDS if name.startswith(text.split(" ")[0])] if text.strip() else list(COMMANDS)
        return "  ".join(words[:6]) if words else "no such command"

    desk.prompt = Prompt(":", "", lambda text: run_command(desk, text), check,
                         desk.histories.setdefault("command", []))


def run_command(desk: Desk, text: str) -> None:
    """Do what was typed after the colon; a mistake is told in the key row."""
    word, _, rest = text.strip().partition(" ")
    try:
        _run(desk, word, rest.strip())
    except (UsageError, ValueError) as error:
        desk.tell(f":{text.strip()}: {error}", "fault")


def _run(desk: Desk, word: str, rest: str) -> None:
    playback = desk.actions.playback
    if word in ("q", "quit"):
        desk.actions.quit()
    elif word in ("seek", "speed"):
        if playback is None:
            raise UsageError("only a recording can do that")
        if word == "seek":
            seq = int(rest.replace(",", ""))
            playback.seek(min(playback.last_seq, max(playback.first_seq, seq)))
        else:
            playback.set_speed(float(rest))
    elif word == "view":
        desk.go(min(8, max(0, int(rest) - 1)))
    elif word in ("break", "delete", "enable", "disable", "continue", "disarm"):
        if not desk.may_control:
            raise UsageError("needs control; this session only observes")
        _run_debug(desk, word, rest)
    elif word:
        raise UsageError(f"no command `{word}`; try {', '.join(name.split()[0] for name in COMMANDS)}")


def _run_debug(desk: Desk, word: str, rest: str) -> None:
    if word == "break":
        desk.actions.add_breakpoint(parse_breakpoint(rest))
    elif word == "delete":
        desk.actions.remove_breakpoint(int(rest))
    elif word in ("enable", "disable"):
        desk.actions.enable_breakpoint(int(rest), word == "enable")
    elif word == "continue":
        desk.actions.continue_hold(None if rest in ("", "all") else int(rest))
    else:
        desk.actions.disarm()


# --- clicks ----------------------------------------------------------------------------------------------------------


def act(desk: Desk, action: Action, x: int) -> None:
    """Do what a clicked zone asks for."""
    match action:
        case ("view", int(number)):
            desk.go(number)
        case ("select", str(request)):
            if desk.selected == request:
                desk.go(SLOT)
            else:
                desk.select(request)
        case ("open", str(request)):
            desk.select(request)
            desk.go(SLOT)
        case ("key", str(key)):
            press(desk, key)
        case ("badge", str(text)):
            desk.go(BREAKS if text.startswith("‖") else OVERVIEW)
        case ("seek", int(start), int(cells)):
            playback = desk.actions.playback
            if playback is not None and cells > 1:
                span = playback.last_seq - playback.first_seq
                playback.seek(playback.first_seq + span * (x - start) // (cells - 1))
        case ("row", int(row)):
            desk.view.press(desk, f"row:{row}")


__all__ = ["LOG", "SLOTS", "TIERS", "TRANSFERS", "act", "press", "run_command"]
