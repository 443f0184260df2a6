"""The command palette: commands, found by a few letters, each with its key or with the reason why it is not available.

Law of this file: the palette lists every command, also unavailable ones with their reason. Enter carries out the
command next to the prompt and never another.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.stream.verbs import PALETTE, PaletteEntry

from .debugging import refusal, request
from .desk import FINISHED, SLOT, Desk
from .draw.frame import TAB_KEYS, TABS
from .draw.spans import Line, Row
from .model.breaks import parse_breakpoint
from .model.numbers import MINUTE, MS, US, S, cut, plain, plural
from .prompts import Prompt

NAME_FROM: Final = 2
"""Letters from which requests are looked for."""
SHOWN_MAX: Final = 10
"""Commands above the prompt."""
_TIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?(us|µs|ms|s|m)")
_UNITS_NS: Final = {"us": US, "µs": US, "ms": MS, "s": S, "m": MINUTE}


class Command(msgspec.Struct, frozen=True):
    """A command. ``takes`` names its argument, empty without an argument; ``why_not`` is empty when it is available."""

    name: str
    about: str
    run: Callable[[str], None]
    key: str = ""
    takes: str = ""
    why_not: str = ""


Press = Callable[[Desk, str], None]
"""Answers a key."""


def commands(desk: Desk, press: Press) -> list[Command]:
    """All commands, as they stand now; those that have a key of every view are done by ``press``."""
    actions = desk.actions

    def presses(key: str) -> Callable[[str], None]:
        def run(text: str) -> None:
            desk.prompt = None
            press(desk, key)
        return run

    found = [Command(f"view {name.lower()}", "show this view", _does(desk.go, index), TAB_KEYS[index])
             for index, (name, _) in enumerate(TABS)]
    found += [
        Command("warnings", "problems that need a person, with evidence", _does(desk.go, len(TABS)), "!"),
        Command("filter", "narrow the list", presses("/"), "/",
                why_not="" if desk.view.schema is not None else "nothing to filter in this view"),
        Command("export", "text, picture and CSV of the view", presses("e"), "e"),
        Command("finished", "requests that ended last: the slowest, first token, hits", _does(desk.go, FINISHED), "d"),
        Command("help", "keys of this view", presses("?"), "?"),
        Command("mark", "set or take away a mark here", presses("m"), "m"),
    ]
    return [*found, *_debugger(desk), *_recording(desk), *_targets(desk),
            Command("quit", "leave the console", lambda text: actions.quit(), "q")]


def _debugger(desk: Desk) -> list[Command]:
    state = desk.mirror.state
    holds = state.holds if state is not None else {}

    def command(entry: PaletteEntry, name: str, run: Callable[[str], None]) -> Command:
        senseless = entry.refusal(state)
        key = "" if senseless and entry.key == "F" else entry.key
        about = entry.about.format(holds=plural(len(holds), "hold"))
        takes = entry.takes if entry.takes in _PARSERS else ""
        return Command(name, about, run, key, takes, refusal(desk) or senseless)

    def typed(entry: PaletteEntry) -> Callable[[str], None]:
        parse = _PARSERS.get(entry.takes)
        return lambda text: request(desk, entry, *(() if parse is None else (parse(text),)))

    def on_hold(entry: PaletteEntry, hold: int) -> Callable[[str], None]:
        return lambda text: request(desk, entry, hold)

    found = [command(entry, entry.name, typed(entry)) for entry in PALETTE if entry.takes != "HOLD"]
    for number, hold in list(holds.items())[:SHOWN_MAX]:
        assert state is not None
        name = plain(state.slots[hold.slot].request)
        found += [command(entry, f"{entry.name} {name}", on_hold(entry, number))
                  for entry in PALETTE if entry.takes == "HOLD"]
    return found


def _does(act: Callable[[int], None], number: int) -> Callable[[str], None]:
    return lambda text: act(number)


def _recording(desk: Desk) -> list[Command]:
    playback = desk.actions.playback
    why = "" if playback is not None else "only a recording can do that"

    def seek(text: str) -> None:
        assert playback is not None
        seq = playback.seq_of(text.replace(",", ""), utc=desk.times.utc)
        playback.seek(min(playback.last_seq, max(playback.first_seq, seq)))

    def speed(text: str) -> None:
        assert playback is not None
        playback.set_speed(float(text))

    live = [Command("live", "back to the present", lambda text: desk.to_live(), "→")] if desk.looks_back else []
    return [
        *live,
        Command("seek", "go to an event, 60s, -60s, a time of day, end", seek, takes="PLACE", why_not=why),
        Command("speed", "play so many times as fast", speed, "< >", "N", why),
        Command("next hit", "continue to the next hit", lambda text: desk.actions.seek_hit(False), "c", why_not=why),
        Command("previous hit", "continue backwards", lambda text: desk.actions.seek_hit(True), "C", why_not=why),
    ]


def _targets(desk: Desk) -> list[Command]:
    names = desk.targets
    if len(names) < 2:
        return []
    return [Command(f"target {name}", "show this target", _does(desk.actions.show_target, index), "}")
            for index, name in enumerate(names)]


def requests_named(desk: Desk, typed: str) -> list[Command]:
    """Live and finished requests with the typed text in their names, live ones first."""
    typed = typed.strip().lower()
    if len(typed) < NAME_FROM:
        return []

    def opens(request: str) -> Callable[[str], None]:
        def run(text: str) -> None:
            desk.select(request)
            desk.go(SLOT)
        return run

    lives = itertools.chain(desk.mirror.lives.values(), reversed(desk.mirror.past))
    named = (life for life in lives if typed in life.request.lower())
    return [
        Command(plain(life.request), f"request, {life.state.words if life.closed_ns is None else 'finished'}",
                opens(life.request))
        for life in itertools.islice(named, SHOWN_MAX)
    ]


def _time(text: str) -> int:
    """Nanoseconds of ``200ms``."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"expected a time with a unit such as 200ms or 5s, got {text!r}")
    return round(float(match[1]) * _UNITS_NS[match[2]])


def _number(text: str) -> int:
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise UsageError(f"expected a number, got {text!r}") from None


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {"SPEC": parse_breakpoint, "N": _number, "TIME": _time}
"""The kind of argument to its parser."""


# --- finding ---------------------------------------------------------------------------------------------------------


def score(typed: str, name: str) -> int | None:
    """How well a name fits the typed text, larger is better; None when it does not.

    >>> [score("ca", name) is not None for name in ("continue all", "view tiers")]
    [True, False]
    >>> score("cont", "continue all") > score("cont", "disconnect")
    True
    """
    typed, name = typed.lower().replace(" ", ""), name.lower()
    if not typed:
        return 0
    total, at, run = 0, -1, 0
    for character in typed:
        found = name.find(character, at + 1)
        if found < 0:
            return None
        run = run + 1 if found == at + 1 else 0
        starts = found == 0 or name[found - 1] == " "
        total += 2 * run + (8 if starts else 0) + (4 if found == 0 else 0)
        at = found
    return total * 8 - len(name)


def matching(typed: str, known: list[Command]) -> list[Command]:
    """Commands that fit, the best first; ``name argument`` fits the command with that argument."""
    typed = typed.strip()
    scored = []
    for order, command in enumerate(known):
        if command.takes and typed.lower().startswith(command.name + " "):
            scored.append((10_000, order, command))
            continue
        points = score(typed, command.name)
        if points is not None:
            scored.append((points - (4 if command.why_not else 0), order, command))
    scored.sort(key=lambda item: (-item[0], item[1]))
    return [command for _, _, command in scored]


def argument(typed: str, command: Command) -> str:
    """The text behind the command's name."""
    typed = typed.strip()
    return typed[len(command.name) :].strip() if typed.lower().startswith(command.name + " ") else ""


class Palette(Prompt):
    """The prompt with the commands above it, the best next to it."""

    def __init__(self, desk: Desk, press: Press, history: list[str]) -> None:
        self._desk = desk
        self._known = commands(desk, press)
        self.index = 0
        self.found: list[Command] = []
        super().__init__(":", "", lambda text: None, None, history)
        self._look()

    def _look(self) -> None:
        found = matching(self.text, self._known)
        named = requests_named(self._desk, self.text)
        exact = sum(self.text.strip().lower() in command.name for command in found) if named else 0
        self.found = [*found[:exact], *named, *found[exact:]]
        self.index = min(self.index, max(0, len(self.found) - 1))

    def press(self, key: str) -> bool:
        """Up and down choose, tab takes the name over, enter does it."""
        chosen = self.found[self.index] if self.found else None
        if key == "up" and (self.text or self.index or not self._history):
            self.index = min(len(self.found) - 1, self.index + 1) if self.found else 0
            return True
        if key == "down" and self.index:
            self.index -= 1
            return True
        if key in ("tab", "shift+tab"):
            if chosen is not None:
                self._take(chosen)
            return True
        if key == "enter":
            return self._enter(chosen)
        over = super().press(key)
        self.index = 0
        self._look()
        return over

    def _take(self, command: Command) -> None:
        self.text = command.name + (" " if command.takes else "")
        self.at = len(self.text)
        self.index = 0
        self._look()

    def _enter(self, chosen: Command | None) -> bool:
        if chosen is not None and chosen.takes and not chosen.why_not and not argument(self.text, chosen):
            self._take(chosen)
            return True
        text = self.text.strip()
        if chosen is None and not text:
            return False
        self.remember(text or (chosen.name if chosen is not None else ""))
        self._desk.prompt = None
        if chosen is None:
            self._desk.tell(f":{text}: no command fits; : lists them", "fault")
        else:
            do(self._desk, chosen, argument(text, chosen), text)
        return False

    def lines(self, width: int, height: int) -> list[Line]:
        """Commands from the bottom up, then the typed text."""
        rows = []
        room = max(1, min(SHOWN_MAX, height - 1))
        first = max(0, self.index - room + 1)
        for offset, command in enumerate(self.found[first : first + room]):
            rows.append(self._row(command, width, chosen=first + offset == self.index))
        rows.reverse()
        rows = rows or [Row().put(" no command fits", "muted").line("bar", width)]
        return [*rows, self._text_line(width)]

    def _row(self, command: Command, width: int, *, chosen: bool) -> Line:
        row = Row().put(self._desk.glyphs.select if chosen else " ", "selbar")
        name = command.name + (f" {command.takes}" if command.takes else "")
        row.put(cut(name, max(8, width // 2 - 4)), "faint" if command.why_not else "strong" if chosen else "text")
        row.to(max(26, width // 2 - 8) - 1).put(" ")
        row.put(command.key.ljust(4), "key" if not command.why_not else "faint")
        role = "muted" if not command.why_not else "caution" if chosen else "faint"
        row.put(cut(command.why_not or command.about, max(0, width - 2 - row.x)), role)
        return row.to(width).line("sel" if chosen else "bar", width)


def open_palette(desk: Desk, press: Press) -> None:
    """Show the palette."""
    desk.prompt = Palette(desk, press, desk.histories.setdefault("command", []))


def do(desk: Desk, command: Command, text: str, typed: str) -> None:
    """Do a command; a mistake is told in the key row."""
    if command.why_not:
        desk.tell(f":{typed or command.name}: {command.why_not}", "muted")
        return
    try:
        command.run(text)
    except (UsageError, ValueError) as error:
        desk.tell(f":{typed}: {error}", "fault")
