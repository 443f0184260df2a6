"""The language for a breakpoint: ``to onboarding request chat-* once max 20s when age > 5 ms``.

Law of this file: a mistake is told with its column and the nearest valid name.
"""

import re
from typing import Final, TypeVar, cast

from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import CONDITION, ExpressionError, compile_condition, compile_log, complete
from kvbm_console.core.expression.schema import nearest, short
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
_WORDS: Final = dict.fromkeys(WORDS)
_Given = dict[str, tuple[str, int]]
"""Word to the text behind it, and the column of that text."""
_ACTIONS: Final = {
    "log": BreakpointAction.LOG, "snapshot": BreakpointAction.SNAPSHOT, "freeze": BreakpointAction.FREEZE,
}
_FLAGS: Final = ("once", "persist", *_ACTIONS)
NO_REQUESTS: Final = "A stream names no request, so nothing can be held."
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_PLAIN: Final = BreakpointSpec()
NEXT: Final = {
    SlotState.INITIALIZED: SlotState.PREFILLING, SlotState.ONBOARD_STAGED: SlotState.ONBOARDING,
    SlotState.ONBOARDING: SlotState.PREFILLING, SlotState.PREFILLING: SlotState.DECODING,
    SlotState.SKIPPED_PREFILL: SlotState.PREFILLING, SlotState.DECODING: SlotState.FINISHING,
    SlotState.SKIPPED_DECODE: SlotState.DECODING, SlotState.PREEMPTED: SlotState.PREFILLING,
    SlotState.FINISHING: SlotState.FINISHED, SlotState.FINISHED: SlotState.FINISHED,
}
"""The state that a slot is likely to enter next, as the proposal for a breakpoint on it."""


def parse_breakpoint(text: str) -> BreakpointSpec:
    """The specification. Raises ExpressionError with the column of a mistake in the whole text. Raises UsageError for a
    value out of bounds, and for a text that stops everything.

    >>> parse_breakpoint("to onboarding request chat-* once").describe()
    'transition.did chat-* → onboarding'
    """
    given: _Given = {}
    flags: set[str] = set()
    tokens = iter(_TOKEN.finditer(text))
    when = ""
    for token in tokens:
        word = token[0]
        if word == "when":
            when = text[token.end() :]
            if not when.strip():
                raise ExpressionError(token.start() + 1, "`when` needs a condition")
            break
        if word not in WORDS:
            raise ExpressionError(token.start() + 1, f"no word `{short(word)}`; {nearest(word, _WORDS)}")
        if word in _FLAGS:
            flags.add(word)
            continue
        value = next(tokens, None)
        if value is None:
            raise ExpressionError(token.start() + 1, f"`{word}` needs a value")
        given[word] = _unquoted(value[0]), value.start() + 1
    actions = [_ACTIONS[flag] for flag in _ACTIONS if flag in flags]
    if len(actions) > 1:
        raise UsageError(f"one of {', '.join(_ACTIONS)}, got {len(actions)} of them")
    spec = BreakpointSpec(
        site=_PLAIN.site if "site" not in given else _known(Site, given, "site"),
        request=given["request"][0] if "request" in given else "*",
        from_state=_named(SlotState, given, "from"),
        to_state=_named(SlotState, given, "to"),
        tier=_named(Tier, given, "tier"),
        route=_named(Route, given, "route"),
        status=_named(CandidateStatus, given, "status"),
        action=actions[0] if actions else BreakpointAction.HOLD,
        ignore_count=_number(given, "ignore"),
        hit_condition=given["hits"][0] if "hits" in given else "",
        name=given["name"][0] if "name" in given else "",
        condition=_condition(when, len(text) - len(when.lstrip())),
        log=_template(given),
        suspend=_PLAIN.suspend if "suspend" not in given else _known(Suspend, given, "suspend"),
        depends_on=_number(given, "after"),
        on_timeout=_PLAIN.on_timeout if "timeout" not in given else _known(OnTimeout, given, "timeout"),
        one_shot="once" in flags,
        persist="persist" in flags,
        max_hold_ns=_seconds(given, "max", _PLAIN.max_hold_ns),
        expires_ns=_seconds(given, "expires", _PLAIN.expires_ns),
    )
    if not spec.narrowed:
        raise UsageError("say where: to, from, request, site, tier, route, status or when")
    return spec


def spell(spec: BreakpointSpec) -> str:
    """The text that sets it: ``parse_breakpoint`` returns the same specification again, but for its id.

    >>> spell(parse_breakpoint("once to onboarding when age > 5 ms"))
    'to onboarding once when age > 5 ms'
    """
    clauses: list[tuple[str, str]] = [
        (word, value.label) for word, value in (
            ("site", spec.site if spec.site is not _PLAIN.site else None), ("from", spec.from_state),
            ("to", spec.to_state), ("tier", spec.tier), ("route", spec.route), ("status", spec.status),
            ("suspend", spec.suspend if spec.suspend is not _PLAIN.suspend else None),
            ("timeout", spec.on_timeout if spec.on_timeout is not _PLAIN.on_timeout else None),
        ) if value is not None
    ]
    clauses += [
        (word, _quoted(str(value))) for word, value, plain in (
            ("request", spec.request, "*"), ("ignore", spec.ignore_count, 0), ("hits", spec.hit_condition, ""),
            ("after", spec.depends_on, 0), ("say", spec.log, ""), ("name", spec.name, ""),
        ) if value != plain
    ]
    clauses += [
        (word, f"{value / SECOND_NS:.9f}".rstrip("0").rstrip(".") + "s") for word, value, plain in (
            ("max", spec.max_hold_ns, _PLAIN.max_hold_ns), ("expires", spec.expires_ns, _PLAIN.expires_ns),
        ) if value != plain
    ]
    flags = [word for word, action in _ACTIONS.items() if action is spec.action]
    flags += [word for word, present in (("once", spec.one_shot), ("persist", spec.persist)) if present]
    when = f" when {spec.condition}" if spec.condition else ""
    return " ".join([*(f"{word} {value}" for word, value in clauses), *flags]) + when


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


def _template(given: _Given) -> str:
    text, column = given.get("say", ("", 1))
    if text:
        try:
            compile_log(text)
        except ExpressionError as error:
            raise ExpressionError(column, f"say: {error.message}") from None
    return text


def _number(given: _Given, word: str) -> int:
    text, column = given.get(word, ("0", 1))
    try:
        return int(text)
    except ValueError:
        raise ExpressionError(column, f"{word} must be a number, got {text!r}") from None


_LABELS: Final[dict[str, type[Word]]] = {
    "to": SlotState, "from": SlotState, "site": Site, "tier": Tier, "route": Route, "status": CandidateStatus,
    "suspend": Suspend, "timeout": OnTimeout,
}


def complete_breakpoint(text: str) -> list[str]:
    """Words that may stand at the end of the typed text.

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


def _named(kind: type[W], given: _Given, word: str) -> W | None:
    return _known(kind, given, word) if word in given else None


def _known(kind: type[W], given: _Given, word: str) -> W:
    label, column = given[word]
    try:
        return cast(W, kind.labelled(label))
    except KeyError:
        close = nearest(label, {member.label: member for member in kind})
        raise ExpressionError(column, f"{word} takes no `{short(label)}`; {close}") from None


def _seconds(given: _Given, word: str, plain: int) -> int:
    if word not in given:
        return plain
    text, column = given[word]
    try:
        return round(float(text.removesuffix("s")) * SECOND_NS)
    except (ValueError, OverflowError):
        raise ExpressionError(column, f"{word} must be seconds like 20s, got {text!r}") from None
