"""What is typed to set a breakpoint: ``to onboarding request chat-* once max 20s when age > 5 ms``.

Law of this file: a word that is not known is an error with the words that are.
"""

from typing import Final, TypeVar, cast

from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import CONDITION, compile_condition, complete
from kvbm_console.core.ids import BreakpointAction, CandidateStatus, Route, Site, SlotState, Tier, Word

W = TypeVar("W", bound=Word)
WORDS: Final = (
    "to", "from", "request", "site", "tier", "route", "status", "max", "once", "log", "snapshot", "ignore", "hits",
    "name", "when",
)
_FLAGS: Final = ("once", "log", "snapshot")
NEXT: Final = {
    SlotState.INITIALIZED: SlotState.PREFILLING, SlotState.ONBOARD_STAGED: SlotState.ONBOARDING,
    SlotState.ONBOARDING: SlotState.PREFILLING, SlotState.PREFILLING: SlotState.DECODING,
    SlotState.SKIPPED_PREFILL: SlotState.PREFILLING, SlotState.DECODING: SlotState.FINISHING,
    SlotState.SKIPPED_DECODE: SlotState.DECODING, SlotState.PREEMPTED: SlotState.PREFILLING,
    SlotState.FINISHING: SlotState.FINISHED, SlotState.FINISHED: SlotState.FINISHED,
}
"""The state a slot is likely to enter next: what a breakpoint on it is prefilled with."""


def parse_breakpoint(text: str) -> BreakpointSpec:
    """The specification; raises UsageError with one sentence.

    >>> parse_breakpoint("to onboarding request chat-* once").describe()
    'transition.did chat-* → onboarding'
    """
    words = text.split()
    given: dict[str, str] = {}
    flags: set[str] = set()
    index = 0
    while index < len(words):
        word = words[index]
        if word == "when":
            given[word] = " ".join(words[index + 1 :])
            if not given[word]:
                raise UsageError("`when` needs a condition")
            break
        if word in _FLAGS:
            flags.add(word)
            index += 1
            continue
        if word not in WORDS:
            raise UsageError(f"no word `{word}`; words are {', '.join(WORDS)}")
        if index + 1 >= len(words):
            raise UsageError(f"`{word}` needs a value")
        given[word] = words[index + 1]
        index += 2
    return BreakpointSpec(
        site=_named(Site, given.get("site", "transition.did"), "site"),
        request=given.get("request", "*"),
        from_state=_named(SlotState, given["from"], "from") if "from" in given else None,
        to_state=_named(SlotState, given["to"], "to") if "to" in given else None,
        tier=_named(Tier, given["tier"], "tier") if "tier" in given else None,
        route=_named(Route, given["route"], "route") if "route" in given else None,
        status=_named(CandidateStatus, given["status"], "status") if "status" in given else None,
        action=_action(flags),
        ignore_count=_number(given["ignore"], "ignore") if "ignore" in given else 0,
        hit_condition=given.get("hits", ""),
        name=given.get("name", ""),
        condition=_condition(given.get("when", "")),
        one_shot="once" in flags,
        max_hold_ns=_seconds(given["max"]) if "max" in given else 30 * SECOND_NS,
    )


def _action(flags: set[str]) -> BreakpointAction:
    if "snapshot" in flags:
        return BreakpointAction.SNAPSHOT
    return BreakpointAction.LOG if "log" in flags else BreakpointAction.HOLD


def _condition(text: str) -> str:
    if text:
        compile_condition(text)
    return text


def _number(text: str, word: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{word} must be a number, got {text!r}") from None


_LABELS: Final[dict[str, type[Word]]] = {
    "to": SlotState, "from": SlotState, "site": Site, "tier": Tier, "route": Route, "status": CandidateStatus,
}


def complete_breakpoint(text: str) -> list[str]:
    """Words that may stand at the end of what was typed.

    >>> complete_breakpoint("to onb"), complete_breakpoint("to decoding wh")
    (['onboard_staged', 'onboarding'], ['when'])
    """
    head, when, condition = text.partition(" when ")
    if when:
        return complete(condition, CONDITION)
    words = head.split()
    typed = words.pop() if words and not text.endswith(" ") else ""
    kind = _LABELS.get(words[-1]) if words else None
    offered = [member.label for member in kind] if kind is not None else [
        word for word in WORDS if word not in words]
    if words and kind is None and words[-1] in WORDS and words[-1] not in _FLAGS:
        return []
    return [word for word in offered if word.startswith(typed) and word != typed]


def _named(kind: type[W], label: str, word: str) -> W:
    try:
        return cast(W, kind.labelled(label))
    except KeyError:
        names = ", ".join(member.label for member in kind)
        raise UsageError(f"{word} must be one of {names}, got {label!r}") from None


def _seconds(text: str) -> int:
    try:
        return int(float(text.removesuffix("s")) * SECOND_NS)
    except ValueError:
        raise UsageError(f"max must be seconds like 20s, got {text!r}") from None
