"""Why: the blocks that a request missed, each with the deciding event, and the parts of its time.

Law of this file: it shows the explanation of the library and adds nothing. A gap in the evidence is named.
"""

from typing import TYPE_CHECKING

from ..desk import LOG, SLOT, Desk, View
from ..draw import bars, words
from ..draw.frame import Hint
from ..draw.spans import BLANK, Line, Row
from ..draw.table import MOVES, Table, moved, text_of
from ..model.numbers import count, cut, cut_middle, duration, plain, plural, tenth, wrap

if TYPE_CHECKING:
    from kvbm_console.analysis.explain import Admission, Explanation, MissedRun


class Why(View):
    """The panel behind ``w``."""

    needs_requests = "Why explains the misses of a request."
    words = (
        ("never_stored", "no request had computed this block before"),
        ("other_context", "its tokens were there under another LoRA, salt or image"),
        ("evicted", "the block was there and gave its place"),
    )

    def __init__(self) -> None:
        self.at = 0
        """The chosen miss."""
        self.top = 0

    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        """The explanation, scrolled to the chosen miss."""
        explanation = desk.actions.explained
        if explanation is None:
            name = cut_middle(plain(desk.selected or ""), width - 10)
            missing = desk.actions.unexplained
            row = Row().put(f" {plain(missing) or 'looking at the evidence …'}", "caution" if missing else "muted")
            return [desk.title("WHY", name), row.line("", width)]
        lines, places = self._lines(desk, explanation, width)
        at = places[min(self.at, len(places) - 1)] if places else 0
        self.top = max(0, min(self.top, at), at - height + 4)
        return lines[self.top : self.top + height]

    def _lines(self, desk: Desk, explanation: "Explanation", width: int) -> tuple[list[Line], list[int]]:
        """All lines, and the line of each miss."""
        told = (f"  slot {explanation.slot}, {explanation.state}; {count(explanation.prompt_tokens)} tokens, "
                f"{plural(explanation.prompt_blocks, 'full block')}")
        name = words.request(explanation.request, max(words.REQUEST_MIN, width - len(told) - 9))
        head = Row().put(" WHY", "title").put(f"   {name.text}", "strong").put(told, "muted")
        lines = [head.line("" if desk.tall else "bar", width)]
        if explanation.occurrences > 1:
            text = f" {explanation.occurrences} slots had this name; the last of them is shown"
            lines.append(Row().put(text, "muted").line())
        places: list[int] = []
        for sentence in explanation.remarks:
            lines += [Row().put(f" {piece}", "text").line() for piece in wrap(plain(sentence), width - 3)]
        if not explanation.admissions and explanation.clone is None:
            lines.append(Row().put(" no look-up and no admission is in the evidence", "muted").line())
        for admission in explanation.admissions:
            lines.append(_admission(admission, width))
            for run in admission.misses:
                chosen = len(places) == self.at
                places.append(len(lines))
                lines += _run(desk, run, width, chosen=chosen)
        lines += [BLANK, *_spent(desk, explanation, width)]
        return lines, places

    def hints(self, desk: Desk) -> list[Hint]:
        return [("↑↓", "choose"), ("enter", "the deciding event"), ("esc", "back"), ("e", "export")]

    def press(self, desk: Desk, key: str) -> bool:
        """Choose a miss; enter goes to the event that decided it."""
        explanation = desk.actions.explained
        runs = _runs(explanation) if explanation is not None else []
        if key in MOVES and runs:
            self.at = moved(min(self.at, len(runs) - 1), key, len(runs), 5)
        elif key.startswith("row:"):
            self.at = int(key[4:])
        elif key == "enter" and runs:
            self._open(desk, runs[min(self.at, len(runs) - 1)])
        else:
            return False
        return True

    def _open(self, desk: Desk, run: "MissedRun") -> None:
        if run.seq is None:
            desk.tell("no single event decided this", "muted")
            return
        if desk.actions.playback is not None:
            desk.actions.playback.seek(run.seq)
            desk.go(SLOT)
            return
        event = desk.mirror.event(run.seq)
        if event is None:
            desk.tell(f"seq {count(run.seq)} is older than the events that this console keeps", "muted")
            return
        desk.go(LOG)
        desk.reveal(event)

    def rows(self, desk: Desk) -> Table | None:
        """Every run of missed blocks."""
        explanation = desk.actions.explained
        if explanation is None:
            return None
        names = ["first", "last", "blocks", "tokens", "reason", "seq", "event", "tier", "for_request", "text"]
        return names, [[
            text_of(run.first), text_of(run.last), str(run.blocks), str(run.tokens), run.reason.value, text_of(run.seq),
            run.event or "", run.tier or "", run.for_request or "", run.text,
        ] for run in _runs(explanation)]


def _runs(explanation: "Explanation") -> "list[MissedRun]":
    return [run for admission in explanation.admissions for run in admission.misses]


def _admission(admission: "Admission", width: int) -> Line:
    found = ", ".join(f"G{at + 1} {count(hits)}" for at, hits in enumerate(admission.hits) if hits) or "nothing"
    outcome = "admitted again" if admission.after_preemption else (
        "admitted" if admission.admitted else "looked up, not admitted yet")
    row = Row().put(f" {outcome}", "text").put(f"  seq {count(admission.seq)}   found {found}; ", "muted")
    row.put(f"{count(admission.missed)} of {count(sum(admission.hits) + admission.missed)} blocks missed", "text")
    if admission.asked_again:
        row.put(f"   asked again {admission.asked_again} ×", "muted")
    return row.line("", width - 1)


def _run(desk: Desk, run: "MissedRun", width: int, *, chosen: bool) -> list[Line]:
    which = f"{run.tokens} tokens" if run.first is None else f"{run.first}" if run.blocks == 1 else (
        f"{run.first}–{run.last}")
    lines = []
    for index, piece in enumerate(wrap(plain(run.text), width - 38)):
        row = Row().put(desk.glyphs.select if chosen and index == 0 else " ", "selbar")
        if index == 0:
            row.put(" ").put(cut(which, 14), "strong").to(18).put(run.reason.value.replace("_", " "), "caution")
        row.to(35).put(piece, "text" if chosen else "muted")
        lines.append(row.line("", width - 1))
    return lines


def _spent(desk: Desk, explanation: "Explanation", width: int) -> list[Line]:
    spent = explanation.spent
    total = max(1, spent.total_ns)
    text = f"{duration(spent.total_ns)}" + ("" if spent.ended else " until here") + (
        "" if spent.complete else ", its beginning is not in the evidence")
    lines = [desk.title("TIME", text)]
    for part in spent.parts:
        row = Row().put(f" {part.what}", "text").right(duration(part.ns), 30, "text")
        row.right(f"{tenth(part.ns, total)} %", 39, "muted").put("  ")
        row.spans(bars.level(part.ns / total, max(8, min(30, width - 44)), desk.glyphs, "trend"))
        lines.append(row.line("", width - 1))
    return lines
