"""Record and replay: the state of the recorder, or the position on a recording.

Law of this file: synced events and events that are only written are told apart, and lost events are never hidden.
"""

from collections import deque
from collections.abc import Sequence

from kvbm_console.analysis.lints import LINTS, Level
from kvbm_console.core.state import Totals
from kvbm_console.stream.feed import why_lost
from kvbm_console.stream.tape import TapeGap

from ..desk import LOG, SLOT, SLOTS, TIERS, TRANSFERS, Desk, View
from ..draw import bars, table, words
from ..draw.frame import Hint, bar_at
from ..draw.spans import BLANK, Line, Row
from ..draw.table import MOVES, Table, moved
from ..model.numbers import UNKNOWN, S, count, cut, cut_middle, duration, plain, plural, size
from ..model.places import distance
from ..model.seeks import moment_of
from ..model.series import resample

MARKS_SHOWN = 6
FINDINGS_SHOWN = 4
"""Findings shown at least."""
OTHER_ROWS = 32
"""Rows of view 8 without findings on a tall screen."""
VIEWS = {"log": LOG, "slots": SLOTS, "tiers": TIERS, "transfers": TRANSFERS}
"""The view of a finding that is not about one request."""
SIZES_KEPT = 16
"""Sizes of the recording over which its growth is told: half a minute."""
SPECS_SHOWN = 4


class Record(View):
    """View 8."""

    words = (
        ("written", "survives when the daemon is killed"), ("synced", "survives when the power fails"),
        ("lost hits", "blocks that were found and gone before they could be used"),
        ("thrash", "blocks that came back within the window after their eviction"),
        ("epoch", "resets of the cache so far"),
        ("rejected", "calls that the core refused"),
    )

    def __init__(self) -> None:
        self.at = 0
        """The chosen place: a finding, or behind the findings a bookmark."""
        self._sizes: deque[tuple[int, int]] = deque(maxlen=SIZES_KEPT)
        """(local time, bytes that the recorder had written)."""

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The recorder of a live target, or the whole recording."""
        lines = self._replay(desk, width) if desk.recording else self._live(desk, width)
        if desk.recording and desk.actions.index.walks:
            lines += [*([BLANK] if desk.tall else []), *self._findings(desk, width, height)]
        lines += [*([BLANK] if desk.tall else []), *self._places(desk, width)]
        lines += [*([BLANK] if desk.tall else []), *_gaps(desk, width)]
        lines += [*([BLANK] if desk.tall else []), *_totals(desk, width)]
        return lines[:height]

    def _live(self, desk: Desk, width: int) -> list[Line]:
        beat = desk.mirror.heartbeat
        state = beat.recorder if beat is not None else None
        lines = [*_here(desk, width), *_past(desk), desk.title("RECORDER", f"of the daemon: {state or 'off'}")]
        if beat is None or state is None:
            text = " The daemon records nothing; serve --record DIR or rec start DIR begins."
            return [*lines, Row().put(text, "muted").line("", width - 1)]
        synced = None if beat.synced_age_ns is None else (
            beat.synced_age_ns + (desk.mirror.progress.silence_ns(desk.mono()) or 0))
        desk.actions.ask_recorder()
        facts = [
            *self._file(desk, width),
            ("published", f"seq {count(beat.head_seq)}", "text"),
            ("written", f"seq {count(beat.written_seq)}", "text"),
            ("synced", f"seq {count(beat.synced_seq)}, {duration(synced)} ago", "text"),
            ("not recorded", plural(beat.not_recorded, "event"), "fault" if beat.not_recorded else "text"),
            ("subscribers", count(beat.subscribers), "text"),
        ]
        return [*lines, *_facts(facts)]

    def _file(self, desk: Desk, width: int) -> list[tuple[str, str, str]]:
        """The path of the recording, its size and its growth; nothing until the target has answered."""
        told, mono = desk.mirror.sources.recorder, desk.mono()
        if told is None:
            self._sizes.clear()
            return []
        path, written = told
        if not self._sizes or self._sizes[-1][1] != written:
            self._sizes.append((mono, written))
        (first_ns, first), (last_ns, last) = self._sizes[0], self._sizes[-1]
        rate = "" if last_ns - first_ns < S else f", {size((last - first) * S / (last_ns - first_ns))}/s"
        return [("file", cut_middle(plain(path), max(8, width - 18)), "text"), ("size", size(written) + rate, "text")]

    def _replay(self, desk: Desk, width: int) -> list[Line]:
        playback = desk.actions.playback
        target = desk.mirror.connected
        lines = [desk.title("REPLAY", plain(target.target) if target is not None else "")]
        if playback is None:
            return lines
        transport = desk.transport()
        cells = width - 3
        row = Row().put(" ")
        bar_at(row, transport, cells, desk.glyphs)
        values: list[float | None] = [float(value) for value in playback.density(cells)]
        density = Row().put(" ").spans(bars.trend(resample(values, cells, mean=False), desk.glyphs))
        lines += [density.line(), row.line()]
        facts = [
            ("state", transport.state), ("position", f"seq {count(transport.seq)} of {count(transport.first_seq)} to "
                                                     f"{count(transport.last_seq)}"),
            ("clock", desk.times.whole(playback.at_ns)), ("speed", f"{playback.speed:g}×"),
        ]
        return [*lines, *_facts([(name, text, "text") for name, text in facts])]

    def _findings(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The problems of the whole recording, worst first, as far as it has been read."""
        index, playback = desk.actions.index, desk.actions.playback
        found = index.findings
        told = f"{count(len(found))} on the whole recording, worst first; enter goes there" if found else (
            "nothing on this recording needs a person")
        if not index.complete and playback is not None:
            share = (index.read_seq - playback.first_seq) * 100 // max(1, playback.last_seq - playback.first_seq)
            told = f"reading the recording … {max(0, share)} %"
        lines = [desk.title("FINDINGS", told)]
        shown = max(FINDINGS_SHOWN, height - OTHER_ROWS)
        first = table.window(len(found), min(self.at, len(found)), 0, shown)
        for at, finding in enumerate(found[first : first + shown], first):
            chosen = at == self.at
            row = Row().put(desk.glyphs.select if chosen else " ", "selbar")
            row.spans(words.mark(None if finding.level is Level.NOTE else finding.level, desk.glyphs)).put(" ")
            row.put(cut(plain(finding.who), 24 if width < 100 else 32), "strong").put("  ")
            row.put(cut(plain(finding.what), 30), words.LEVEL_ROLE.get(finding.level, "text")).put("  ")
            row.put(cut(plain(finding.because), max(0, width - 12 - row.x)), "muted")
            if finding.since_ns:
                row.right(desk.times.text(finding.since_ns), width - 1, "muted")
            lines.append(row.zone(0, ("row", at), width).line("sel" if chosen else "", width))
        return lines

    def _places(self, desk: Desk, width: int) -> list[Line]:
        """Bookmarks, and the hits around the position."""
        marks = desk.marks.places
        lines = [desk.title("BOOKMARKS", plural(len(marks), "mark") if marks else "none; m sets one here")]
        here = desk.place()
        before = len(desk.actions.index.findings)
        self.at = min(self.at, max(0, before + len(marks) - 1))
        first = table.window(len(marks), max(0, self.at - before), 0, MARKS_SHOWN)
        for index, mark in enumerate(marks[first : first + MARKS_SHOWN], first):
            chosen = before + index == self.at
            row = Row().put(desk.glyphs.select if chosen else " ", "selbar").put(f"{desk.glyphs.mark} ", "strong")
            row.put(f"{desk.times.text(mark.at_ns, millis=True)}  seq {count(mark.seq)}", "text").to(36)
            row.put(cut(mark.note, 24), "muted").to(62)
            if here is not None:
                row.put(distance(mark, *here), "muted")
            row.zone(0, ("row", before + index), width)
            lines.append(row.to(width - 1 if chosen else row.x).line("sel" if chosen else "", width))
        if not desk.recording:
            return lines
        hits, position = desk.actions.hits, here[0] if here is not None else 0
        if not hits.complete:
            told = "c looks for the next hit, C for the previous hit"
        else:
            before = sum(seq < position for seq in hits.seqs)
            told = f"{count(len(hits.seqs) + hits.dropped)}, {count(before)} in front of here"
        lines += [*([BLANK] if desk.tall else []), desk.title("HITS", told)]
        for spec in hits.specs[:SPECS_SHOWN]:
            lines.append(Row().put(f" {plain(spec.describe())}", "text").line("", width - 1))
        return lines

    def hints(self, desk: Desk) -> list[Hint]:
        marked = bool(desk.marks.places)
        if not desk.recording:
            return [("←", "look back"), ("m", "mark"), *([("enter", "to the mark")] if marked else []),
                    ("space", "pause view")]
        places = marked or desk.actions.index.findings
        return [*([("enter", "go there")] if places else []), ("space", "play"), (",.", "event back, on"),
                ("<>", "slower, faster"), ("c", "next hit"), ("C", "previous hit"), ("m", "mark"), (":", "seek")]

    def press(self, desk: Desk, key: str) -> bool:
        """Choose a finding or a bookmark, and go there."""
        marks, findings = desk.marks.places, desk.actions.index.findings
        total = len(findings) + len(marks)
        if not total:
            return False
        self.at = min(self.at, total - 1)  # a place may go while nothing is drawn
        if key in MOVES:
            self.at = moved(self.at, key, total, MARKS_SHOWN)
        elif key == "enter":
            self._go(desk)
        elif key == "x" and self.at >= len(findings):
            desk.marks.toggle(marks[self.at - len(findings)])
        elif key.startswith("row:"):
            self.at = min(int(key[4:]), total - 1)
            self._go(desk)
        else:
            return False
        return True

    def _go(self, desk: Desk) -> None:
        """Go to the chosen place."""
        findings, playback = desk.actions.index.findings, desk.actions.playback
        if self.at >= len(findings) or playback is None:
            desk.to_mark(desk.marks.places[self.at - len(findings)])
            return
        finding = findings[self.at]
        playback.seek(moment_of(finding, playback.recording))
        if finding.request is not None:
            desk.select(finding.request)
        desk.event = finding.seq
        desk.go(SLOT if finding.request is not None else VIEWS[LINTS[finding.lint].view])

    def rows(self, desk: Desk) -> Table | None:
        """The bookmarks."""
        return ["seq", "at_ns", "note"], [[str(mark.seq), str(mark.at_ns), mark.note] for mark in desk.marks.places]


def _here(desk: Desk, width: int) -> list[Line]:
    """The recording that this console makes."""
    kept = desk.actions.kept
    if kept is None:
        return []
    facts = [("file", cut_middle(plain(kept.place), max(8, width - 18)), "text"),
             ("events", f"{count(kept.events)}, {size(kept.size_bytes)}", "text")]
    if kept.missing:
        facts.append(("not recorded", plural(kept.missing, "event"), "fault"))
    return [desk.title("THIS CONSOLE", "records what it sees"), *_facts(facts), *([BLANK] if desk.tall else [])]


def _past(desk: Desk) -> list[Line]:
    """How far this console can look back."""
    reel = desk.actions.reel
    if reel is None or not reel.begun:
        return []
    kept = f"{duration(desk.now_ns - reel.first_ns)}, {plural(reel.kept_events, 'event')}"
    row = Row().put(f" {desk.glyphs.keys('←')}", "key").to(16)
    row.put(f"{kept}, {reel.bytes * 100 // reel.bytes_max} % of {size(reel.bytes_max)}", "text")
    return [desk.title("LOOK BACK", "at what this console keeps"), row.line(), *([BLANK] if desk.tall else [])]


def _gaps(desk: Desk, width: int) -> list[Line]:
    """The gaps of the whole tape on a recording; live, the gaps that this console saw."""
    playback = desk.actions.playback
    gaps: Sequence[TapeGap] = desk.mirror.gaps if playback is None else [
        gap for gap in playback.recording.gaps if gap.count]
    none = "none on this recording" if playback is not None else "none seen by this console"
    lines = [desk.title("GAPS", plural(len(gaps), "gap") if gaps else none)]
    for gap in list(gaps)[-6:]:
        row = Row().put(f" {desk.glyphs.gap * 2} ", "gap").put(f" {count(gap.count)} events", "caution")
        row.put(f", {count(gap.first)} to {count(gap.last)}, {plain(why_lost(gap.reason))}", "muted")
        lines.append(row.line("", width - 1))
    return lines


def _totals(desk: Desk, width: int) -> list[Line]:
    """Counts since the incarnation began, as the facts keep them. A stream leaves those of requests unknown."""
    state = desk.mirror.facts
    totals: Totals = state.totals
    lines = [desk.title("TOTALS", "since the incarnation began")]
    told = not state.streams_only
    finishing = sum(slot.reason is not None for slot in state.slots.values())
    counts = [
        ("requests", told, totals.slots_opened), ("finished", told, sum(totals.finished) - finishing),
        ("preemptions", told, totals.preemptions), ("prompt blocks", told, totals.prompt_blocks),
        ("hit blocks", told, sum(totals.hit_blocks)), ("lost hits", told, totals.lost_blocks),
        ("evicted", True, sum(totals.evicted_blocks)), ("moved", told, sum(totals.moved_blocks.values())),
        ("thrash", told, sum(totals.returned_blocks)), ("skipped", told, sum(totals.skipped)),
        ("rejected", True, totals.rejected), ("refused reports", True, totals.completions_refused),
        ("holds", True, totals.holds), ("holds denied", True, totals.hold_denied),
        ("violations", True, totals.violations), ("epoch", True, state.epoch),
    ]
    pairs = [(name, count(number) if known else UNKNOWN) for name, known, number in counts]
    across = 2 if width < 110 else 4
    for start in range(0, len(pairs), across):
        row = Row()
        for index, (name, value) in enumerate(pairs[start : start + across]):
            row.to(1 + index * 30).put(name, "muted").right(value, index * 30 + 27, "text")
        lines.append(row.line("", width - 1))
    return lines


def _facts(facts: list[tuple[str, str, str]]) -> list[Line]:
    """(name, value, role) in two columns."""
    return [Row().put(f" {name}", "muted").to(16).put(text, role).line() for name, text, role in facts]
