"""The control verbs: each request of a debugger session, declared once.

A verb is a class. Its docstring and its fields are the message of the same name in ``console.proto``, which is
generated from here; its type argument is its answer. ``verb`` names its field in ``ControlRequest`` and the method of
``debug.sessions.Sessions`` that carries it out. Client, server, console and shell know verbs only through this table:

    answer = await controls.ask(StepSlot(3))      # any implementation of ``stream.feed.Controls``
    StepSlot(3).told(answer)                      # "hold 3: stepped", as the console shows it

A new verb is a class here with the next free tag, its method in ``Sessions``, ``make proto`` and a test. An entry in
``PALETTE`` shows it in the console.

Law of this file: a tag or field is never renumbered or reused, and new fields go to the end with a default.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import msgspec

from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.holds import answer_text
from kvbm_console.core.ids import ResetMode, Site, SlotState
from kvbm_console.core.instructions import BreakpointVerdict, DrainAnswer, ResetAnswer

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState

A = TypeVar("A")

FREEZE_NS: Final = 30 * SECOND_NS
"""Longest freeze unless another is asked for: as long as a hold lasts by default."""


class Verb(msgspec.Struct, Generic[A]):
    """A request of a session, answered by an ``A``."""

    verb: ClassVar[str] = ""

    @property
    def subject(self) -> str:
        """The part of the target that the verb is about, for notices."""
        return "target"

    def told(self, answer: A) -> str:
        """The answer as a notice for a person."""
        return f"{self.subject}: {answer_text(str(answer))}"


class OpenSession(Verb[Any], tag=2):
    """The first request of every session."""

    verb: ClassVar[str] = "open"
    name: str
    """The name of the session on the record, for people. At most 64 bytes."""
    lease: bool
    """True if the session holds slots itself and keeps them with its lease. Otherwise its breakpoints belong to the
    daemon, outlive the session, and only ``max_hold_ns`` ends their holds."""
    owner: str
    """The owner of an earlier session of this client whose stream was lost. The session takes it up again if its lease
    is gone."""


class RenewLease(Verb[str], tag=3):
    """Keep the lease for its whole duration again. A lost lease is granted anew; its breakpoints stay disabled."""

    verb: ClassVar[str] = "renew"


# --- breakpoints ---


class SetBreakpoint(Verb[BreakpointVerdict], tag=4):
    """Add a breakpoint to this session (to the daemon, without a lease)."""

    verb: ClassVar[str] = "set"
    spec: BreakpointSpec

    def told(self, answer: BreakpointVerdict) -> str:
        """The breakpoint and its description, or the reason why it cannot work."""
        if answer.verified:
            return f"breakpoint {answer.id} set: {self.spec.describe()}"
        return f"breakpoint {answer.id} cannot work: {answer.message}"


class ReplaceBreakpoints(Verb[tuple[BreakpointVerdict, ...]], tag=15):
    """Replace all breakpoints of this session. Saying it twice changes nothing.

    Ids keep their hits, and a one-shot breakpoint that was hit stays disabled.
    """

    verb: ClassVar[str] = "replace"
    specs: tuple[BreakpointSpec, ...]


class RemoveBreakpoint(Verb[str], tag=5):
    """Remove a breakpoint of any owner."""

    verb: ClassVar[str] = "remove"
    breakpoint: int | None = None
    """Absent: all breakpoints of all owners."""

    def told(self, answer: str) -> str:
        """The breakpoint that is gone."""
        return f"breakpoint {self.breakpoint} removed"


class EnableBreakpoint(Verb[str], tag=6):
    """Arm or mute a breakpoint of any owner."""

    verb: ClassVar[str] = "enable"
    breakpoint: int
    enabled: bool

    def told(self, answer: str) -> str:
        """The breakpoint and its new state."""
        return f"breakpoint {self.breakpoint} {'armed' if self.enabled else 'muted'}"


# --- holds ---


class ContinueHold(Verb[str], tag=7):
    """Let a held slot go on. A lost race is answered ``already_continued``."""

    verb: ClassVar[str] = "continue_hold"
    hold: int | None = None
    """Absent: all holds."""
    until: SlotState | None = None
    """Stop the same slot once more when it enters this state."""
    until_site: Site | None = None
    """Stop the same slot once more when it passes this site."""

    @property
    def subject(self) -> str:
        """The hold."""
        return "all holds" if self.hold is None else f"hold {self.hold}"

    def told(self, answer: str) -> str:
        """The outcome, and the state at which the slot stops again."""
        lost = answer_text(answer) != answer
        return super().told(answer) + ("" if lost or self.until is None else f", until {self.until.label}")


class StepSlot(Verb[str], tag=8):
    """Let a held slot go on to its next site, and stop it there again."""

    verb: ClassVar[str] = "step"
    hold: int

    @property
    def subject(self) -> str:
        """The hold."""
        return f"hold {self.hold}"


class SkipCandidate(Verb[str], tag=12):
    """Resolve the candidates of a held slot to no work, and let it go on."""

    verb: ClassVar[str] = "skip"
    hold: int

    @property
    def subject(self) -> str:
        """The hold."""
        return f"hold {self.hold}"


# --- the whole target ---


class Disarm(Verb[str], tag=9):
    """Mute every breakpoint, release every hold, end a freeze."""

    verb: ClassVar[str] = "disarm"

    def told(self, answer: str) -> str:
        """The state now."""
        return "every breakpoint is muted, every hold released"


class StepPipeline(Verb[str], tag=10):
    """Let one candidate through its evaluation, while the pipeline is closed."""

    verb: ClassVar[str] = "step_pipeline"

    @property
    def subject(self) -> str:
        """The pipeline."""
        return "pipeline"


class RunFor(Verb[str], tag=11):
    """Go on for this much of the engine's time, as 200ms, and freeze again."""

    verb: ClassVar[str] = "run_for"
    duration_ns: int
    max_hold_ns: int = FREEZE_NS
    """Longest freeze after the run; at most 120 s."""

    def told(self, answer: str) -> str:
        """The target runs, for a while."""
        return f"{super().told(answer)}, then frozen"


class Freeze(Verb[str], tag=13):
    """Freeze the target: no candidate is evaluated, and the engines are paused."""

    verb: ClassVar[str] = "freeze"
    max_hold_ns: int = FREEZE_NS
    """Longest freeze; at most 120 s."""


class Thaw(Verb[str], tag=14):
    """End a freeze."""

    verb: ClassVar[str] = "thaw"


class Reset(Verb[ResetAnswer], tag=16):
    """Forget the content of all tiers at once. Since 1.1.

    Requests are ended, running copies quarantine their places, the epoch rises.
    """

    verb: ClassVar[str] = "reset"
    mode: ResetMode = ResetMode.LOGICAL
    """``RESET_MODE_PHYSICAL`` also overwrites the bytes."""

    def told(self, answer: ResetAnswer) -> str:
        """The new epoch, and the requests that were ended."""
        return f"{self.mode.label} reset, epoch {answer.epoch}: {_requests(answer.aborted_requests)} ended"


class Drain(Verb[DrainAnswer], tag=17):
    """Take no new request, wait until nothing is in flight, then reset. Since 1.1.

    Requests that are live after the deadline are ended. New requests are taken again behind the reset. The session
    need not live so long.
    """

    verb: ClassVar[str] = "drain"
    deadline_ns: int
    """Longest wait, of the engine's time."""

    def told(self, answer: DrainAnswer) -> str:
        """The live requests at the beginning."""
        return f"draining {_requests(answer.live_requests)}; new requests are taken again after the drain"


VERBS: Final[tuple[type[Verb[Any]], ...]] = tuple(Verb.__subclasses__())


def _requests(count: int) -> str:
    return f"{count:,} request{'' if count == 1 else 's'}"


# --- the console's palette ---


def _held(state: "CacheState | None") -> str:
    return "" if state is not None and state.holds else "nothing is held"


def _frozen(state: "CacheState | None") -> str:
    return "" if state is not None and state.frozen is not None else "nothing is frozen"


def _running(state: "CacheState | None") -> str:
    return "it is frozen" if state is not None and state.frozen is not None else ""


def _not_draining(state: "CacheState | None") -> str:
    return "it drains already" if state is not None and state.draining else ""


class PaletteEntry(NamedTuple):
    """A command of the palette.

    ``takes`` names the argument typed behind the name: ``SPEC``, ``N`` (a breakpoint) or ``TIME``. With ``HOLD``
    the command is offered once for each hold. ``make`` makes the verb of the argument.
    """

    name: str
    about: str
    make: Callable[..., Verb[Any]]
    key: str = ""
    takes: str = ""
    refusal: Callable[["CacheState | None"], str] = lambda state: ""
    """The reason why the command makes no sense now; empty when it makes sense."""
    question: str = ""
    """The question to confirm, with ``{live}`` requests and the typed ``{time}``; empty without a question."""
    declined: str = ""
    """The notice after a no."""


PALETTE: Final = (
    PaletteEntry("break", "set a breakpoint, as with b", SetBreakpoint, "b", "SPEC"),
    PaletteEntry("delete", "remove a breakpoint", RemoveBreakpoint, "x", "N"),
    PaletteEntry("enable", "arm a breakpoint", lambda number: EnableBreakpoint(number, True), "B", "N"),
    PaletteEntry("disable", "mute a breakpoint", lambda number: EnableBreakpoint(number, False), "B", "N"),
    PaletteEntry("continue all", "{holds}", ContinueHold, "C", refusal=_held),
    PaletteEntry("step pipeline", "let one candidate through its evaluation", StepPipeline, "S"),
    PaletteEntry("freeze the target", "30 s at most", Freeze, "F", refusal=_running),
    PaletteEntry("thaw the target", "end a freeze", Thaw, "F", refusal=_frozen),
    PaletteEntry("run for", "so long of the engine's time, then freeze", RunFor, takes="TIME"),
    PaletteEntry("disarm", "mute every breakpoint, release every hold", Disarm, "D"),
    PaletteEntry("drain", "take no new request, wait so long at most, then reset", Drain, takes="TIME",
                 refusal=_not_draining, declined="nothing is drained",
                 question="Take no new request, wait {time} at most for {live}, then reset?"),
    PaletteEntry("reset", "forget what all tiers hold, end every request", Reset, declined="nothing was reset",
                 question="Forget what all tiers hold and end {live}?"),
    PaletteEntry("reset physical", "the same, and overwrite the bytes", lambda: Reset(ResetMode.PHYSICAL),
                 question="Overwrite and forget what all tiers hold and end {live}?", declined="nothing was reset"),
    PaletteEntry("continue", "held", ContinueHold, "c", "HOLD"),
    PaletteEntry("step", "to its next site", StepSlot, "s", "HOLD"),
    PaletteEntry("skip", "its open candidates", SkipCandidate, "X", "HOLD"),
)
"""The debugger's commands, in the order in which they are listed."""
