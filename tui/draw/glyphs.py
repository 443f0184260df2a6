"""The glyph tables: one for Unicode terminals, one for ASCII.

Law of this file: only Latin-1, arrows, box drawing, block elements and geometric shapes, each one cell wide. The shape
is the phase, a filled shape progresses, a hollow shape waits.
"""

from typing import Final

import msgspec

from kvbm_console.core.ids import CandidateStatus, SlotState, Tier

_S = SlotState
_C = CandidateStatus
TRANSLATE: Final = str.maketrans({
    "→": ">", "←": "<", "↑": "^", "↓": "v", "–": "-", "−": "-", "…": "~", "×": "x", "·": ".", "µ": "u", "‖": "#",
    "Δ": "d", "≥": ">", "◊": "*", "±": "~",
    "●": "*", "○": "o",
})
"""Characters of sentences, for terminals that have only ASCII."""
ORDER: Final = (
    _S.PREFILLING, _S.DECODING, _S.ONBOARDING, _S.ONBOARD_STAGED, _S.SKIPPED_DECODE, _S.SKIPPED_PREFILL, _S.PREEMPTED,
    _S.FINISHING, _S.INITIALIZED,
)
"""The order of states in counts and bars: work first."""
FILL: Final = {
    _S.INITIALIZED: "state.initialized", _S.ONBOARD_STAGED: "fill.onboard", _S.ONBOARDING: "fill.onboard",
    _S.SKIPPED_PREFILL: "fill.prefill", _S.PREFILLING: "fill.prefill", _S.SKIPPED_DECODE: "fill.decode",
    _S.DECODING: "fill.decode", _S.PREEMPTED: "state.preempted", _S.FINISHING: "state.finishing",
    _S.FINISHED: "state.finished",
}
"""Role of a state's texture: fills are quieter than glyphs and text."""


class Glyphs(msgspec.Struct, frozen=True):
    """Every special character that the screens use."""

    ascii: bool
    state: dict[SlotState, str]
    life: dict[SlotState, str]
    """The texture of a state on a timeline."""
    candidate: dict[CandidateStatus, str]
    held: str
    hatch: str
    gap: str
    late: str
    """A stay past its limit."""
    queued: str
    wire: str
    prompt: dict[Tier, str]
    computed: str
    todo: str
    trend: str
    """Six levels, lowest first."""
    eighths: str
    """Eight levels of a chart cell, lowest first."""
    full: str
    half: str
    track: str
    select: str
    cursor: str
    cursor_top: str
    mark: str
    branch: str
    window: tuple[str, str]
    rule: str
    miss: str
    knob: str
    pixels: bool
    """True if half a cell can have a colour of its own."""
    map: tuple[str, str, str, str, str]
    """Empty, cached, referenced, writing, quarantined."""

    def keys(self, text: str) -> str:
        """Cursor keys in a text: arrows, and by name where there are none (``<`` and ``>`` are other keys)."""
        if self.ascii:
            for arrows, name in _CURSOR_KEYS:
                text = text.replace(arrows, name)
        return text


_CURSOR_KEYS: Final = (
    ("↑ ↓ j k", "arrows j k"), ("↑ ↓", "up or down"), ("↑↓", "up/down"), ("←→", "left/right"), ("← →", "left, right"),
    ("←", "left"),
)
UNICODE: Final = Glyphs(
    ascii=False,
    state={
        _S.INITIALIZED: "·", _S.ONBOARD_STAGED: "◇", _S.ONBOARDING: "◆", _S.SKIPPED_PREFILL: "△", _S.PREFILLING: "▲",
        _S.SKIPPED_DECODE: "○", _S.DECODING: "●", _S.PREEMPTED: "×", _S.FINISHING: "□", _S.FINISHED: "■",
    },
    life={
        _S.INITIALIZED: "·", _S.ONBOARD_STAGED: "░", _S.ONBOARDING: "▒", _S.SKIPPED_PREFILL: "▁", _S.PREFILLING: "█",
        _S.SKIPPED_DECODE: "▁", _S.DECODING: "▄", _S.PREEMPTED: "╍", _S.FINISHING: "┄", _S.FINISHED: " ",
    },
    candidate={
        _C.PENDING_EVALUATION: "○", _C.PROMOTED: "●", _C.COMPLETED: "■", _C.SKIPPED: "–", _C.CANCELLED: "×",
        _C.FAILED: "!",
    },
    held="‖", hatch="╱", gap="░", late="┅", queued="┄", wire="━",
    prompt={Tier.G1: "▆", Tier.G2: "▄", Tier.G3: "▂", Tier.G4: "▁"}, computed="━", todo="·",
    trend="▁▂▃▄▅▆", eighths="▁▂▃▄▅▆▇█", full="━", half="╸", track="─", select="▌", cursor="┆", cursor_top="┬",
    mark="◊", branch="└", window=("▕", "▏"), rule="─", miss="─", knob="●", pixels=True, map=("·", "▄", "█", "▒", "¦"),
)
NO_PIXELS: Final = msgspec.structs.replace(UNICODE, pixels=False)
"""For a terminal without colours: textures tell what colours would."""
ASCII: Final = Glyphs(
    ascii=True,
    state={
        _S.INITIALIZED: ".", _S.ONBOARD_STAGED: "o", _S.ONBOARDING: "O", _S.SKIPPED_PREFILL: "p", _S.PREFILLING: "P",
        _S.SKIPPED_DECODE: "d", _S.DECODING: "D", _S.PREEMPTED: "x", _S.FINISHING: "f", _S.FINISHED: "F",
    },
    life={
        _S.INITIALIZED: ".", _S.ONBOARD_STAGED: "o", _S.ONBOARDING: "O", _S.SKIPPED_PREFILL: "p", _S.PREFILLING: "P",
        _S.SKIPPED_DECODE: "d", _S.DECODING: "D", _S.PREEMPTED: "x", _S.FINISHING: "f", _S.FINISHED: " ",
    },
    candidate={
        _C.PENDING_EVALUATION: "o", _C.PROMOTED: "O", _C.COMPLETED: "F", _C.SKIPPED: "-", _C.CANCELLED: "x",
        _C.FAILED: "!",
    },
    held="#", hatch="#", gap="?", late="!", queued="-", wire="=",
    prompt={Tier.G1: "1", Tier.G2: "2", Tier.G3: "3", Tier.G4: "4"}, computed="+", todo=".",
    trend="_.-=+*", eighths="_.-=+*##", full="=", half="=", track="-", select=">", cursor="|", cursor_top="|",
    mark="*", branch="`", window=("[", "]"), rule="-", miss="-", knob="o", pixels=False, map=(".", "c", "R", "w", "q"),
)


def state_role(state: SlotState) -> str:
    """Role of a state's glyph and name."""
    return f"state.{state.label}"
