"""What is typed to set a breakpoint: ``to onboarding request chat-* once max 20s when age > 5 ms``.

Law of this file: a word that is not known is an error with the words that are.
"""

import re
from typing import Final, TypeVar, cast

from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import CONDITION, ExpressionError, compile_condition, compile_log, complete
from kvbm_console.core.ids import (
    BreakpointAction,
    CandidateStatus,
    OnTimeout,
    Route,
    Site,
    SlotState,
    Suspend,
    Tier,
    Word,
)

W = TypeVar("W", bound=Word)
WORDS: Final = (
    "to", "from", "request", "site", "tier", "route", "status", "max", "once", "log", "snapshot", "freeze", "ignore",
    "hits", "suspend", "after", "timeout", "expires", "persist", "say", "name", "when",
)
_ACTIONS: Final = {
    "log": BreakpointAction.LOG, "snapshot": BreakpointAction.SNAPSHOT, "freeze": BreakpointAction.FREEZE,
}
_FLAGS: Final = ("once", "persist", *_ACTIONS)
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_PLAIN: Final = BreakpointSpec()
NEXT: Final = {
    SlotState.INITIALIZED: SlotState.PREFILLING, SlotState.ONBOARD_STAGED: SlotState.ONBOARDING,
    SlotState.ONBOARDING: SlotState.PREFILLING, SlotState.PREFILLING: SlotState.DECODING,
    SlotState.SKIPPED_PREFILL: SlotState.PREFILLING, SlotState.DECODING: SlotState.FINISHING,
    SlotState.SKIPPED_DECODE: SlotState.DECODING, SlotState.PREEMPTED: SlotState.PREFILLING,
    SlotState.FINISHING: SlotState.FINISHED, SlotState.FINISHED: SlotState.FINISHED,
}
"""The state a slot is likely to enter next: what a breakpoint on it is prefilled with."""


def parse_breakpoint(text: str) -> BreakpointSpec:
    """The specification; raises UsageError with one sentence, and ExpressionError with the column in the whole text.

    >>> parse_breakpoint("to onboarding request chat-* once").describe()
    'transition.did chat-* → onboarding'
    """
    given: dict[str, str] = {}
    flags: set[str] = set()
    tokens = iter(_TOKEN.finditer(text))
    when = ""
    for token in tokens:
        word = token[0]
        if word == "when":
            when = text[token.end() :]
            if not when.strip():
                raise UsageError("`when` needs a condition")
            break
        if word not in WORDS:
            raise UsageError(f"no word `{word}`; words are {', '.join(WORDS)}")
        if word in _FLAGS:
            flags.add(word)
            continue
        value = next(tokens, None)
        if value is None:
            raise UsageError(f"`{word}` needs a value")
        given[word] = _unquoted(value[0])
    actions = [_ACTIONS[flag] for flag in _ACTIONS if flag in flags]
    if len(actions) > 1:
        raise UsageError(f"one of {', '.join(_ACTIONS)}, got {len(actions)} of them")
    return BreakpointSpec(
        site=_named(Site, given.get("site", "transition.did"), "site"),
        request=given.get("request", "*"),
        from_state=_named(SlotState, given["from"], "from") if "from" in given else None,
        to_state=_named(SlotState, given["to"], "to") if "to" in given else None,
        tier=_named(Tier, given["tier"], "tier") if "tier" in given else None,
        route=_named(Route, given["route"], "route") if "route" in given else None,
        status=_named(CandidateStatus, given["status"], "status") if "status" in given else None,
        action=actions[0] if actions else BreakpointAction.HOLD,
        ignore_count=_number(given["ignore"], "ignore") if "ignore" in given else 0,
        hit_condition=given.get("hits", ""),
        name=given.get("name", ""),
        condition=_condition(when, len(text) - len(when.lstrip())),
        log=_template(given.get("say", "")),
        suspend=_named(Suspend, given.get("suspend", "slot"), "suspend"),
        depends_on=_number(given["after"], "after") if "after" in given else 0,
        on_timeout=_named(OnTimeout, given.get("timeout", "continue"), "timeout"),
        one_shot="once" in flags,
        persist="persist" in flags,
        max_hold_ns=_seconds(given["max"], "max") if "max" in given else _PLAIN.max_hold_ns,
        expires_ns=_seconds(given["expires"], "expires") if "expires" in given else _PLAIN.expires_ns,
    )


def spell(spec: BreakpointSpec) -> str:
    """What would be typed to set it: ``parse_breakpoint`` gives the same again, but for its id.

    >>> spell(parse_breakpoint("once to onboarding when age > 5 ms"))
    'to onboarding once when age > 5 ms'
    """
    said: list[tuple[str, str]] = [
        (word, value.label) for word, value in (
            ("site", spec.site if spec.site is not _PLAIN.site else None), ("from", spec.from_state),
            ("to", spec.to_state), ("tier", spec.tier), ("route", spec.route), ("status", spec.status),
            ("suspend", spec.suspend if spec.suspend is not _PLAIN.suspend else None),
            ("timeout", spec.on_timeout if spec.on_timeout is not _PLAIN.on_timeout else None),
        ) if value is not None
    ]
    said += [
        (word, _quoted(str(value))) for word, value, plain in (
            ("request", spec.request, "*"), ("ignore", spec.ignore_count, 0), ("hits", spec.hit_condition, ""),
            ("after", spec.depends_on, 0), ("say", spec.log, ""), ("name", spec.name, ""),
        ) if value != plain
    ]
    said += [
        (word, f"{value / SECOND_NS:.9f}".rstrip("0").rstrip(".") + "s") for word, value, plain in (
            ("max", spec.max_hold_ns, _PLAIN.max_hold_ns), ("expires", spec.expires_ns, _PLAIN.expires_ns),
        ) if value != plain
    ]
    flags = [word for word, action in _ACTIONS.items() if action is spec.action]
    flags += [word for word, there in (("once", spec.one_shot), ("persist", spec.persist)) if there]
    when = f" when {spec.condition}" if spec.condition else ""
    return " ".join([*(f"{word} {value}" for word, value in said), *flags]) + when


def _quoted(text: str) -> str:
    plain = _TOKEN.fullmatch(text) is not None and '"' not in text
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquoted(token: str) -> str:
    quoted = len(token) > 1 and token[0] == token[-1] == '"'
    return re.sub(r"\\(.)", r"\1", token[1:-1]) if quoted else token


def _condition(text: str, before: int) -> str:
    condition = text.strip()
    if condition:
        try:
            compile_condition(condition)
        except ExpressionError as error:
            raise ExpressionError(error.column + before, error.message) from None
    return condition


def _template(text: str) -> str:
    if text:
        compile_log(text)
    return text


def _number(text: str, word: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{word} must be a number, got {text!r}") from None


_LABELS: Final[dict[str, type[Word]]] = {
    "to": SlotState, "from": SlotState, "site": Site, "tier": Tier, "route": Route, "status": CandidateStatus,
    "suspend": Suspend, "timeout": OnTimeout,
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


def _seconds(text: str, word: str) -> int:
    try:
        return round(float(text.removesuffix("s")) * SECOND_NS)
    except (ValueError, OverflowError):
        raise UsageError(f"{word} must be seconds like 20s, got {text!r}") from None
