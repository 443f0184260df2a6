"""Keys of a recording's transport: event by event, along one slot, from hit to hit, slower and faster.

Law of this file: every key ends at a place of the tape whose facts are exact; nothing is approximated on the way.
"""

from typing import Final

from .desk import Desk
from .model.numbers import count

SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
"""Steps of the speed of a recording."""


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
    """To the next or previous event of the selected request; without one, of the whole tape."""
    playback = desk.actions.playback
    if playback is None:
        return
    life = desk.mirror.life_of(desk.selected) if desk.selected else None
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


def to_hit(desk: Desk, *, back: bool) -> None:
    """Continue to the next hit of a breakpoint, or back to the previous one."""
    if desk.actions.playback is not None:
        desk.actions.seek_hit(back)


def run_to_cursor(desk: Desk) -> None:
    """To the place of the cursor, or of the chosen event; forwards at most to the next hit that is known."""
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
