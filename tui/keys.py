"""Keys and clicks that work everywhere: views, prompts, cause and effect, marks, copies, the transport.

Law of this file: a key that needs the target says so when it may not act, and an unknown key does nothing.
"""

from typing import Final

from kvbm_console.core.expression import complete

from . import debugging
from .commands import open_palette
from .debugging import transport_key
from .desk import BREAKS, COPY_AGAIN_NS, FINISHED, LOG, MISSES, PREFIXES, SLOT, TIMELINE, WARNINGS, WHAT_IF, WHY, Desk
from .draw.frame import NAMES
from .draw.spans import Action, Line
from .model.events import cause_of, effect_of
from .model.filters import Filter, plain_text
from .model.numbers import S, count, plain, shown
from .model.places import Mark, distance
from .model.sources import blocks_only
from .prompts import Prompt

NEAR_NS: Final = 10 * S
"""A step of ``←`` and ``→`` through time."""
FAR_NS: Final = 60 * S
"""The same with ``shift``."""


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
    if desk.press(key):
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
            open_palette(desk, press)
        case "!":
            desk.go(WARNINGS)
        case "H":
            _newest_hold(desk)
        case "t":
            desk.go(TIMELINE)
        case "p":
            desk.go(PREFIXES)
        case "d":
            desk.go(FINISHED)
        case "M":
            desk.go(MISSES)
        case "space":
            _pause(desk)
        case "[" | "]":
            _trace(desk, back=key == "[")
        case "w":
            _ask_about(desk, WHY)
        case "W":
            _ask_about(desk, WHAT_IF)
        case "{" | "}":
            if len(desk.targets) > 1:
                desk.actions.show_target((desk.target + (1 if key == "}" else -1)) % len(desk.targets))
        case "m":
            _mark(desk)
        case "'":
            _to_mark(desk)
        case "y":
            _copy(desk)
        case "e":
            _export(desk)
        case "r":
            if desk.present.disconnected is not None:
                desk.live.retry()
                desk.tell("trying now")
        case "," | "." | "<" | ">":
            transport_key(desk, key)
        case "left" | "right" | "shift+left" | "shift+right":
            _scrub(desk, (FAR_NS if key.startswith("shift") else NEAR_NS) * (-1 if key.endswith("left") else 1))
        case _ if key in debugging.KEYS:
            debugging.press(desk, key)


def _back(desk: Desk) -> None:
    if desk.current in desk.filters:
        del desk.filters[desk.current]
    elif desk.crumbs:
        desk.current = desk.crumbs.pop()


def _pause(desk: Desk) -> None:
    if desk.actions.playback is not None:
        desk.actions.playback.toggle()
    elif not desk.recording:
        desk.actions.pause(not desk.actions.paused)


def _scrub(desk: Desk, ns: int) -> None:
    """Move through time: from live back into what this console keeps, along a recording, and back to live."""
    if desk.live.past is not None:  # shown, or not reached yet
        if not desk.live.move(ns, desk.show):
            desk.to_live()
    elif desk.actions.playback is not None:
        if not desk.actions.scrub(ns):
            desk.tell("the recording begins here" if ns < 0 else "the recording ends here", "muted")
    elif ns < 0:
        desk.actions.go_back(-ns, desk.show)
    else:
        desk.tell(f"{'nothing newer is known' if desk.silent else 'this is live'}; ← goes back", "muted")


def _newest_hold(desk: Desk) -> None:
    state = desk.mirror.state
    if state is None or not state.holds:
        desk.tell("nothing is held")
        return
    desk.select(state.slots[state.holds[max(state.holds)].slot].request)
    desk.go(SLOT)


# --- cause, effect, marks --------------------------------------------------------------------------------------------


def _trace(desk: Desk, *, back: bool) -> None:
    """Go to the event that led to the chosen event, or to its first effect."""
    event = desk.chosen_event()
    if event is None:
        desk.tell("choose an event first: n in the timeline, or ↑ ↓ in the log", "muted")
        return
    found = cause_of(event, desk.mirror) if back else effect_of(event, desk.mirror)
    if found is None:
        if back:
            desk.tell(f"seq {count(event.seq)} follows from stimulus {count(event.cause)}; nothing before it is kept")
        else:
            desk.tell(f"nothing here follows from seq {count(event.seq)} yet")
        return
    if desk.current not in (SLOT, TIMELINE, LOG):
        desk.go(LOG)
    desk.reveal(found)


def _ask_about(desk: Desk, view: int) -> None:
    """Ask why the selected request missed blocks, or what would have spared it its trouble."""
    request = desk.shown_request()
    state = desk.mirror.state
    if request is None and state is not None and blocks_only(state):
        desk.go(view)  # the panel says how to get requests
        return
    if request is None:
        desk.tell("choose a request first", "muted")
        return
    desk.select(request)
    if view == WHY:
        desk.actions.why(request)
    else:
        desk.actions.what_if(request)
    desk.go(view)


def _mark(desk: Desk) -> None:
    place = desk.place()
    if place is None:
        return
    seq, at_ns = place
    note = plain(desk.selected) if desk.selected else ""
    if desk.marks.toggle(Mark(seq, at_ns, note)):
        desk.tell(f"mark {desk.glyphs.mark} at seq {count(seq)}; ' comes back to it")
    else:
        desk.tell(f"mark at seq {count(seq)} taken away")


def _to_mark(desk: Desk) -> None:
    place = desk.place()
    mark = desk.marks.next_from(*place) if place is not None else None
    if place is None or mark is None:
        desk.tell("no mark yet; m sets a mark", "muted")
        return
    told = distance(mark, *place)
    desk.to_mark(mark)
    desk.tell(f"{desk.glyphs.mark} seq {count(mark.seq)}  {told}")


# --- copies ----------------------------------------------------------------------------------------------------------


def _copy(desk: Desk) -> None:
    """The name of the selected request; pressed again its row, then all rows."""
    mono = desk.mono()
    again = mono - desk.copied_mono < COPY_AGAIN_NS
    desk.copied = (desk.copied + 1) % 3 if again else 0
    if desk.selected is None and desk.copied < 2:
        desk.copied = 2
    desk.copied_mono = mono
    if desk.copied == 0 and desk.selected is not None:
        desk.actions.copy(desk.selected)
        desk.tell(f"copied {plain(desk.selected)}; y again its row, again the view")
        return
    rows = [shown(line.text).rstrip() for line in desk.shown]
    if desk.copied == 1 and desk.selected is not None:
        name = shown(plain(desk.selected))
        row = next((row for row in rows[2:] if row.startswith(desk.glyphs.select)),
                   next((row for row in rows[2:] if name in row), ""))
        desk.actions.copy(row.lstrip(desk.glyphs.select).strip())
        desk.tell("copied the row; y again the view")
        return
    desk.actions.copy("\n".join(rows))
    desk.tell("copied the view")


def _export(desk: Desk) -> None:
    if desk.mirror.state is None:
        desk.tell("nothing is known yet", "muted")
        return
    name = f"kvbm-console-{NAMES[desk.current].lower()}-{max(0, desk.mirror.state.seq - 1)}"
    desk.actions.export(name, desk.view.rows(desk), desk.view.picture(desk))


# --- filter ----------------------------------------------------------------------------------------------------------


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
            name = plain_text(text, schema)
            return "" if name is None else f"requests named {name}; tab completes a field"
        fields = list(schema.fields)[: 8 if desk.width >= 110 else 3]
        return f"text of a request, or {', '.join(fields)} …; tab completes, up recalls"

    desk.prompt = Prompt(
        "/ ", before.text if before is not None else "", apply, check, desk.histories.setdefault("filter", []),
        live=apply, cancel=lambda: apply(before.text if before is not None else ""),
        complete=lambda text: complete(text, schema),
    )


# --- clicks ----------------------------------------------------------------------------------------------------------


def click(desk: Desk, x: int, line: Line) -> None:
    """Answer a click on cell ``x`` of a row: the smallest zone there acts. An open prompt ignores clicks."""
    hits = [zone for zone in line.zones if zone.start <= x < zone.end]
    if hits and desk.prompt is None:
        act(desk, min(hits, key=lambda zone: zone.end - zone.start).action, x)


def act(desk: Desk, action: Action, x: int) -> None:
    """Carry out the action of a clicked zone."""
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
            desk.go(BREAKS if text.startswith("‖") else WARNINGS)
        case ("seek", int(start), int(cells)):
            playback = desk.actions.playback
            if playback is not None and cells > 1:
                span = playback.last_seq - playback.first_seq
                playback.seek(playback.first_seq + span * (x - start) // (cells - 1))
        case ("row", int(row)):
            desk.press(f"row:{row}")
        case ("sort", str(name)):
            desk.press(f"sort:{name}")
        case ("target", int(number)):
            desk.actions.show_target(number)
