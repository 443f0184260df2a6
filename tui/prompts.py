"""Prompts in the key row: a line that is edited, with history, completion and the verdict below it.

Law of this file: the mouse never takes the focus from a prompt, and a mistake is told where it is, before enter.
"""

import re
from collections.abc import Callable
from typing import Final

from .draw.spans import Line, Row
from .model.filters import FILTER_MAX, FilterError
from .model.numbers import cut

HISTORY_MAX: Final = 50
OFFERED_MAX: Final = 12
"""Most completions in the row below."""
_WORD: Final = re.compile(r"[\w.*?\[\]\-]*$")
"""The unfinished word before the cursor."""


class Prompt:
    """``check`` gets the text after every key and raises or returns the verdict; ``submit`` gets it on enter.

    ``complete`` gets the text before the cursor and returns words that may replace its last word. A prompt with a
    verdict has two rows, else a single row.
    """

    def __init__(
        self, label: str, text: str, submit: Callable[[str], None], check: Callable[[str], str] | None = None,
        history: list[str] | None = None, live: Callable[[str], None] | None = None,
        cancel: Callable[[], None] | None = None, complete: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.label = label
        self.text = text
        self.at = len(text)
        self.verdict = ""
        self.wrong = False
        """True if the text is a mistake: enter does nothing."""
        self.wrong_column: int | None = None
        """The column of the mistake; None for a mistake without a place."""
        self._submit = submit
        self._check = check
        self._live = live
        self._cancel = cancel
        self._complete = complete
        self._history = history if history is not None else []
        self._back = 0
        self._offer: tuple[str, str, list[str], int] | None = None
        """While tab is pressed repeatedly: text before the word, text after it, the words, the index of the word."""
        self._judge()

    def _judge(self) -> None:
        self.verdict, self.wrong, self.wrong_column = "", False, None
        if self._check is None:
            return
        try:
            self.verdict = self._check(self.text)
        except FilterError as error:
            self.verdict, self.wrong_column = f"column {error.column + 1}: {error}", error.column
            self.wrong = True
        except ValueError as error:
            self.verdict, self.wrong = str(error), True

    # --- keys --------------------------------------------------------------------------------------------------------

    def press(self, key: str) -> bool:
        """Take a key; False when the prompt is over (enter was accepted, or esc)."""
        if key in ("escape", "ctrl+c"):
            if self._cancel is not None:
                self._cancel()
            return False
        if key == "enter":
            if self.wrong:
                return True
            self.remember(self.text)
            self._submit(self.text)
            return False
        if key in ("tab", "shift+tab"):
            self._tab(1 if key == "tab" else -1)
        else:
            self._offer = None
            self._edit(key)
        self._judge()
        if self._live is not None and not self.wrong:
            self._live(self.text)
        return True

    def remember(self, text: str) -> None:
        """Keep an entered text for ``up``."""
        if text.strip() and text not in self._history[-1:]:
            self._history.append(text)
            del self._history[:-HISTORY_MAX]

    def _tab(self, step: int) -> None:
        """Put in the next completion; a single completion is finished with a blank."""
        if self._offer is None:
            head = self.text[: self.at]
            words = self.offered()
            if not words:
                return
            word = _WORD.search(head)
            start = word.start() if word is not None else len(head)
            if start == len(head) and head and not head.endswith((" ", "(")):
                head, start = head + " ", start + 1
            self._offer = (head[:start], self.text[self.at :], words, -1 if step > 0 else 0)
        before, rest, words, index = self._offer
        index = (index + step) % len(words)
        text = before + words[index] + (" " if len(words) == 1 and not rest.startswith(" ") else "")
        if len(text) + len(rest) > FILTER_MAX:
            return
        self.text, self.at = text + rest, len(text)
        self._offer = (before, rest, words, index) if len(words) > 1 else None

    def offered(self) -> list[str]:
        """Words that tab would put in now."""
        if self._offer is not None:
            return self._offer[2]
        return self._complete(self.text[: self.at]) if self._complete is not None else []

    def _edit(self, key: str) -> None:
        match key:
            case "left":
                self.at = max(0, self.at - 1)
            case "right":
                self.at = min(len(self.text), self.at + 1)
            case "home" | "ctrl+a":
                self.at = 0
            case "end" | "ctrl+e":
                self.at = len(self.text)
            case "backspace":
                if self.at:
                    self.text = self.text[: self.at - 1] + self.text[self.at :]
                    self.at -= 1
            case "delete":
                self.text = self.text[: self.at] + self.text[self.at + 1 :]
            case "ctrl+u":
                self.text, self.at = self.text[self.at :], 0
            case "ctrl+w":
                head = self.text[: self.at].rstrip().rpartition(" ")[0]
                self.text, self.at = head + self.text[self.at :], len(head)
            case "up" | "down":
                self._recall(1 if key == "up" else -1)
            case _:
                character = " " if key == "space" else key
                if len(character) == 1 and character.isprintable() and len(self.text) < FILTER_MAX:
                    self.text = self.text[: self.at] + character + self.text[self.at :]
                    self.at += 1

    def _recall(self, step: int) -> None:
        self._back = min(len(self._history), max(0, self._back + step))
        self.text = self._history[-self._back] if self._back else ""
        self.at = len(self.text)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[Line]:
        """The last rows of the screen while the prompt is open, at most ``height``."""
        if self._check is None and self._complete is None:
            return [self._text_line(width)]
        return [self._text_line(width), self._verdict_line(width)]

    def _shift(self, width: int) -> tuple[int, int]:
        """(first shown character, room for the text)."""
        room = max(10, width - len(self.label) - 3)
        return max(0, self.at - room + 1), room

    def _text_line(self, width: int) -> Line:
        first, room = self._shift(width)
        shown, at = self.text[first : first + room], self.at - first
        row = Row().put(" ").put(self.label, "key")
        row.put(shown[:at], "text").put(shown[at : at + 1] or " ", "cursor").put(shown[at + 1 :], "text")
        return row.line("bar", width)

    def _verdict_line(self, width: int) -> Line:
        """The mistake under its column, or the possible next words, or the meaning of the text."""
        blank = not self.text.strip()
        if self.wrong and self.wrong_column is None and self._offer is None and not blank:
            row = Row().put(" " * (1 + len(self.label)))
            return row.put(cut(self.verdict, max(0, width - 1 - row.x)), "fault").line("bar", width)
        if self.wrong_column is not None and self._offer is None:
            column = 1 + len(self.label) + max(0, self.wrong_column - self._shift(width)[0])
            text = cut(self.verdict, width - 4)
            if column + 2 + len(text) <= width - 1:
                return Row().to(column).put("^ ", "fault").put(text, "fault").line("bar", width)
            if len(text) + 2 <= column < width - 1:
                return Row().to(column - len(text) - 1).put(f"{text} ^", "fault").line("bar", width)
            return Row().put(" ").put(text, "fault").line("bar", width)
        words = self.offered()[:OFFERED_MAX]
        row = Row().put(" " * (1 + len(self.label)))
        if words and (self._offer is not None or not self.verdict or blank):
            row.put("tab", "key").put("  ", "text")
            for index, word in enumerate(words):
                role = "strong" if self._offer is not None and self._offer[3] == index else "muted"
                row.put(word, role).put("  ")
        else:
            row.put(cut(self.verdict, max(0, width - 1 - row.x)), "muted")
        return row.line("bar", width)
