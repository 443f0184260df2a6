"""The prompt in the key row: one line that is edited, with a history and the verdict under way.

Law of this file: the mouse never takes the focus from a prompt, and a mistake is told where it is, before enter.
"""

from collections.abc import Callable
from typing import Final

from .draw.spans import Line, Row
from .model.filters import FILTER_MAX, FilterError

HISTORY_MAX: Final = 50


class Prompt:
    """``check`` gets the text after every key and raises or returns the verdict; ``submit`` gets it on enter."""

    def __init__(
        self, label: str, text: str, submit: Callable[[str], None], check: Callable[[str], str] | None = None,
        history: list[str] | None = None, live: Callable[[str], None] | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self.label = label
        self.text = text
        self.at = len(text)
        self.verdict = ""
        self.wrong_column: int | None = None
        self._submit = submit
        self._check = check
        self._live = live
        self._cancel = cancel
        self._history = history if history is not None else []
        self._back = 0
        self._judge()

    def _judge(self) -> None:
        self.verdict, self.wrong_column = "", None
        if self._check is None:
            return
        try:
            self.verdict = self._check(self.text)
        except FilterError as error:
            self.verdict, self.wrong_column = f"column {error.column + 1}: {error}", error.column
        except ValueError as error:
            self.verdict, self.wrong_column = str(error), 0

    def press(self, key: str) -> bool:
        """Take a key; False when the prompt is over (enter was accepted, or esc)."""
        if key == "escape":
            if self._cancel is not None:
                self._cancel()
            return False
        if key == "enter":
            if self.wrong_column is not None:
                return True
            if self.text.strip() and self.text not in self._history[-1:]:
                self._history.append(self.text)
                del self._history[:-HISTORY_MAX]
            self._submit(self.text)
            return False
        self._edit(key)
        self._judge()
        if self._live is not None and self.wrong_column is None:
            self._live(self.text)
        return True

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

    def line(self, width: int) -> Line:
        """The key row while the prompt is open."""
        row = Row().put(" ").put(self.label, "key")
        shown, at = self.text, self.at
        room = max(10, width - row.x - 2)
        if at >= room:
            shown, at = shown[at - room + 1 :], room - 1
        row.put(shown[:at], "text").put(shown[at : at + 1] or " ", "cursor").put(shown[at + 1 : room], "text")
        if self.verdict:
            row.put("   ").put(self.verdict, "fault" if self.wrong_column is not None else "muted")
        return row.line("bar", width)
