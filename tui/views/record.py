"""Record and replay: is what happens being kept, and on a recording, where we are in it.

Law of this file: what is on disk (synced) and what is only written are told apart, and lost events are never hidden.
"""

from kvbm_console.core.state import Totals

from ..desk import Desk
from ..draw import bars
from ..draw.frame import Hint, bar_at
from ..draw.spans import BLANK, Line, Row
from ..model.numbers import clock, count, duration, plain, plural
from ..model.series import resample


class Record:
    """View 8."""

    schema = None

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The recorder of a live target, or the whole recording."""
        lines = self._replay(desk, width) if desk.recording else self._live(desk, width)
        lines += [*([BLANK] if desk.tall else []), *_gaps(desk, width)]
        lines += [*([BLANK] if desk.tall else []), *_totals(desk, width)]
        return lines[:height]

    def _live(self, desk: Desk, width: int) -> list[Line]:
        beat = desk.mirror.heartbeat
        state = beat.recorder if beat is not None else None
        lines = [desk.title("RECORDER", state or "off")]
        if beat is None or state is None:
            text = " Nothing is recorded. The daemon records with --record DIR."
            return [*lines, Row().put(text, "muted").line()]
        synced = None if beat.synced_age_ns is None else (
            beat.synced_age_ns + (desk.mirror.progress.silence_ns(desk.mono()) or 0))
        facts = [
            ("published", f"seq {count(beat.head_seq)}", "text"),
            ("written", f"seq {count(beat.written_seq)}", "text"),
            ("synced", f"seq {count(beat.synced_seq)}, {duration(synced)} ago", "text"),
            ("not recorded", plural(beat.not_recorded, "event"), "fault" if beat.not_recorded else "text"),
            ("subscribers", count(beat.subscribers), "text"),
        ]
        return [*lines, *[Row().put(f" {name}", "muted").to(16).put(text, role).line() for name, text, role in facts]]

    def _replay(self, desk: Desk, width: int) -> list[Line]:
        playback = desk.actions.playback
        target = desk.mirror.connected
        lines = [desk.title("REPLAY", plain(target.target) if target is not None else "")]
        if playback is None:
            return lines
        transport = desk.transport()
        cells = width - 3
        row = Row().put(" ")
        bar_at(row, transport, cells, desk.glyphs.full, desk.glyphs.knob)
        values: list[float | None] = [float(value) for value in playback.density(cells)]
        density = Row().put(" ").spans(bars.trend(resample(values, cells, mean=False), desk.glyphs))
        lines += [density.line(), row.line()]
        facts = [
            ("state", transport.state), ("position", f"seq {count(transport.seq)} of {count(transport.first_seq)} to "
                                                     f"{count(transport.last_seq)}"),
            ("clock", clock(transport.at_ns, millis=True)), ("speed", f"{playback.speed:g}×"),
        ]
        return [*lines, *[Row().put(f" {name}", "muted").to(16).put(text, "text").line() for name, text in facts]]

    def hints(self, desk: Desk) -> list[Hint]:
        """Keys of the transport."""
        if not desk.recording:
            return [("space", "pause view")]
        return [("space", "play"), (",.", "event back, on"), ("<>", "slower, faster"), (":", "seek N")]

    def press(self, desk: Desk, key: str) -> bool:
        """Nothing but the keys that work everywhere."""
        return False


def _gaps(desk: Desk, width: int) -> list[Line]:
    gaps = list(desk.mirror.gaps)
    lines = [desk.title("GAPS", "none seen by this console" if not gaps else plural(len(gaps), "gap"))]
    for gap in gaps[-6:]:
        row = Row().put(f" {desk.glyphs.gap * 2} ", "gap").put(f" {count(gap.count)} events", "caution")
        row.put(f", {count(gap.first)} to {count(gap.last)}, {plain(gap.reason)}", "muted")
        lines.append(row.line("", width - 1))
    return lines


def _totals(desk: Desk, width: int) -> list[Line]:
    """Counts since the incarnation began, as the facts keep them."""
    state = desk.mirror.state
    assert state is not None
    totals: Totals = state.totals
    lines = [desk.title("TOTALS", "since the incarnation began")]
    pairs = [
        ("requests", count(totals.slots_opened)), ("finished", count(sum(totals.finished))),
        ("preemptions", count(totals.preemptions)), ("prompt blocks", count(totals.prompt_blocks)),
        ("hit blocks", count(sum(totals.hit_blocks))), ("lost hits", count(totals.lost_blocks)),
        ("evicted", count(sum(totals.evicted_blocks))), ("moved", count(sum(totals.moved_blocks.values()))),
        ("thrash", count(totals.thrash_blocks)), ("skipped", count(sum(totals.skipped))),
        ("rejected", count(totals.rejected)), ("refused reports", count(totals.completions_refused)),
        ("holds", count(totals.holds)), ("holds denied", count(totals.hold_denied)),
        ("violations", count(totals.violations)), ("epoch", count(state.epoch)),
    ]
    across = 2 if width < 110 else 4
    for start in range(0, len(pairs), across):
        row = Row()
        for index, (name, value) in enumerate(pairs[start : start + across]):
            row.to(1 + index * 30).put(name, "muted").right(value, index * 30 + 27, "text")
        lines.append(row.line("", width - 1))
    return lines
