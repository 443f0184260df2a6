"""The expression language: typed, total, bounded; what is refused names the column and the nearest valid name.

Law of this file: properties over generated trees and texts, beside examples for every rule of the grammar.
"""

import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.core import events as ev
from kvbm_console.core.breakpoints import Moment
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.expression import (
    CONDITION,
    EVENT,
    SLOT,
    ExpressionError,
    Schema,
    compile_condition,
    compile_event_filter,
    compile_log,
    compile_slot_filter,
    complete,
    fields_of,
    parse,
    show,
    variables,
)
from kvbm_console.core.expression.closures import compile_tree
from kvbm_console.core.expression.schema import CHARS_MAX, DEPTH_MAX, TERMS_MAX, Field, Kind
from kvbm_console.core.expression.tree import And, Flag, Literal, Node, Not, Or, Other, Relation
from kvbm_console.core.ids import Authority, CandidateStatus, EvictRule, Route, Site, SkipReason, SlotState, Tier
from kvbm_console.core.slots import SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.core.tiers import READY, PoolFacts, PoolInfo

MS = 1_000_000


def a_slot(**fields: Any) -> SlotFacts:
    base: dict[str, Any] = {
        "slot": 3, "request": "chat-17", "source": 1, "state": SlotState.ONBOARDING, "since_ns": 5 * MS,
        "opened_ns": 1 * MS, "hashes": [], "prompt_tokens": 64, "output_limit": 8, "priority": -1, "session": None,
        "prompt_blocks": 4, "anchor_tokens": 48, "device_pool": 0, "hits": (1, 2, 0, 0),
    }
    return SlotFacts(**{**base, **fields})


def a_state() -> CacheState:
    state = CacheState()
    state.at_ns = 20 * MS
    for index, (tier, source, places) in enumerate(((Tier.G1, 1, 32), (Tier.G1, 2, 8), (Tier.G2, 0, 16))):
        info = PoolInfo(index, source, 0, 0, tier, "x", places, 16, Authority.LEADER)
        state.pools.append(PoolFacts(info))
    state.pools[2].store([0, 1, 2], [7, 8, 9], READY, 0)
    state.slots[3] = a_slot()
    state.slot_of["chat-17"] = 3
    return state


A_MOMENT = Moment(
    Site.DISPATCH_WILL, 3, "chat-17", SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, Route.G3_G1, Tier.G1
)
ANOTHER_MOMENT = Moment(Site.CALL_DID, 3, "r", SlotState.DECODING, SlotState.DECODING)


def holds(text: str, slot: SlotFacts | None = None) -> bool:
    return compile_condition(text)(slot or a_slot(), a_state(), A_MOMENT)


# --- examples for every rule ---


@pytest.mark.parametrize(
    "text",
    [
        "state = onboarding", "state = ONBOARDING", "state != decoding", "state ~ onboard*", "request ~ 'chat-*'",
        "request ~ chat-*", "request = chat-17", "request = \"chat-17\"", "age = 15 ms", "age >= 15000us", "age < 0.1s",
        "age <= 1 h", "lifetime > age", "tokens.computed >= 48", "tokens.computed < tokens.prompt", "cached.g2 = 32",
        "blocks < 4k", "priority > -2", "priority = -1", "session = none", "hold = none", "not held", "held = no",
        "held != yes", "tiers.g1.capacity = 40", "tiers.g1.available = 40", "tiers.g2.resident = 3",
        "tiers.g3.available = 0", "tiers.g2.cached = 3 and tiers.g2.empty = 13", "route = G3>G1", "route = g3 → g1",
        "tier = g1", "tier <= G2", "tier < G2", "from = onboard-staged", "from = 'onboard staged'", "to = onboarding",
        "site = dispatch.will",
        "from ~ *staged", "status = none", "not (status = promoted)", "held or not held", "live = 1",
        "not (held and state = onboarding)", "held and held or state = onboarding", "not not (age > 1ms)",
        "state = onboarding and (held or tokens.prompt = 64) and not held",
    ],
)
def test_true_of_the_example(text: str) -> None:
    assert holds(text)
    assert not holds(f"not ({text})")


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "an expression is missing"),
        ("tokns.computed > 4", 1, "a condition has no field `tokns.computed`; the nearest is `tokens.computed`"),
        ("available > 4", 1, "the nearest is `tiers.g"),
        ("held and stte = decoding", 10, "the nearest is `state`"),
        ("state = onbording", 9, "`onbording` is no state; the nearest is `onboarding`"),
        ("tier = g7", 8, "there are g1, g2, g3, g4"),
        ("state < decoding", 7, "`state` is a word without an order"),
        ("request > 4", 9, "`request` is text without an order"),
        ("age ~ 4", 5, "`~` matches text and words; `age` is a duration"),
        ("age > 10", 7, "`age` is a duration; write a unit, as 10 ms"),
        ("age > 10 MiB", 10, "`MiB` is a unit of a size; `age` is a duration"),
        ("age > 10 sec", 10, "`sec` is no unit"),
        ("blocks > 10 ms", 13, "`ms` is a unit of a duration; `blocks` is a number"),
        ("slot = 4k", 8, "`k` is a unit of a number; `slot` is an identifier and takes no unit"),
        ("blocks > 1.5", 10, "not a whole number"),
        ("age > 0.5 ns", 7, "0.5 ns is not a whole number of nanoseconds"),
        ("blocks > 9999999999999999999999", 10, "a number is at most"),
        ("blocks > many", 10, "`blocks` is a number, `many` is not"),
        ("blocks > request", 10, "`blocks` is a number and cannot be compared with `request`, text"),
        ("state = tier", 9, "cannot be compared with `tier`"),
        ("state = none", 9, "`state` always has a value"),
        ("tier < none", 8, "by = or != only"),
        ("state == decoding", 7, "`==` is not an operator; write `=`"),
        ("age >> 5 ms", 5, "`>>` is not an operator"),
        ("state", 6, "`state` is a word and needs one of = != < <= > >= ~"),
        ("4 < blocks", 1, "expected the name of a field, got `4`"),
        ("blocks >", 9, "expected a number for `blocks`, got nothing"),
        ("(held", 1, "this `(` is not closed"),
        ("held)", 5, "`)` closes nothing"),
        ("held held", 6, "`held` is a word and needs one of"),
        ("blocks = 1 blocks = 2", 12, "`blocks` is no unit"),
        ("state = decoding state = decoding", 18, "expected `and`, `or` or the end, got `state`"),
        ("held and", 9, "expected the name of a field, got nothing"),
        ("held & held", 6, "`&` means nothing here"),
        ("request = 'chat", 11, "has no end"),
        ("!held", 1, "write `not` or `!=`"),
        ("held()", 5, "needs one of"),
        ("request.__class__ = x", 1, "has no field"),
    ],
)
def test_refused_in_one_sentence_with_the_column(text: str, column: int, says: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        compile_condition(text)
    assert caught.value.column == column
    assert str(caught.value).startswith(f"column {column}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        " " * (CHARS_MAX + 1), "(" * 1_000, "not " * 200 + "held", " and ".join(["held"] * 100),
        " or ".join(["held"] * 100), "a" * 1_000, "request = '" + "x" * 900 + "'", "9" * 1_000,
        "blocks = " + "9" * 900, "age > 0." + "0" * 800 + "1 s", "'" * 1_000, "\\" * 500, "[" * 1_000,
        "request ~ '" + "*a" * 100 + "b" * 500 + "'",
    ],
)
def test_hostile_expressions_are_refused_by_limits(text: str) -> None:
    with pytest.raises(ExpressionError):
        compile_condition(text)


def test_the_limits_themselves_are_allowed() -> None:
    assert len(parse(" and ".join(["held"] * TERMS_MAX), SLOT).parts) == TERMS_MAX  # type: ignore[union-attr]
    parse("(" * DEPTH_MAX + "held" + ")" * DEPTH_MAX, SLOT)
    parse("held" + " " * (CHARS_MAX - 4), SLOT)


def test_a_glob_of_many_stars_takes_no_time() -> None:
    """``re`` with backtracking would take longer than the universe; the timeout of the test would say so."""
    slot = a_slot(request="a" * 255 + "!")
    assert not holds("request ~ '" + "a*" * 100 + "b'", slot)


# --- contexts ---


def test_a_slot_filter_reads_the_clock_that_it_is_given() -> None:
    state = a_state()
    assert not compile_slot_filter("age > 1 min")(state, state.slots[3])
    assert compile_slot_filter("age > 1 min", now=lambda: 61_000 * MS)(state, state.slots[3])


def test_sizes_need_the_bytes_of_one_block() -> None:
    state = a_state()
    slot = a_slot(device_blocks=[1, 2, 3])
    with pytest.raises(ExpressionError, match="no field `bytes`"):
        compile_slot_filter("bytes > 4 MiB")
    assert compile_slot_filter("bytes > 4 MiB", block_bytes=2 << 20)(state, slot)
    assert not compile_slot_filter("bytes > 6 MiB", block_bytes=2 << 20)(state, slot)
    evicted = ev.BlocksEvicted(1, 0, 0, 2, pack_ids([4, 5]), pack_hashes([1, 2]), None, EvictRule.RECENCY)
    assert compile_event_filter("bytes = 128 KiB", block_bytes=64 << 10)(evicted, state)


MOVED = ev.SlotMoved(9, 30 * MS, 4, 3, SlotState.ONBOARD_STAGED, SlotState.ONBOARDING, 4, 2, 48, 0, (0, 0, 0, 0), 1, 48)
EVICTED = ev.BlocksEvicted(10, 30 * MS, 4, 2, pack_ids([4, 5]), pack_hashes([1, 2]), None, EvictRule.RECENCY)
PLANNED = ev.CandidatePlanned(11, 31 * MS, 5, 7, 3, Route.G2_G1, pack_hashes([1, 2, 3]), b"", 0)
SKIPPED = ev.CandidateSkipped(12, 32 * MS, 5, 7, SkipReason.NO_CAPACITY)
ASSIGNED = ev.DeviceBlocksAssigned(13, 33 * MS, 6, 0, (3, 4), (1, 2), pack_ids([1, 2, 3]), 0, 0)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (MOVED, "kind = SlotMoved"), (MOVED, "kind = slotmoved"), (MOVED, "kind ~ slot*"), (MOVED, "seq = 9"),
        (MOVED, "time >= 30 ms"), (MOVED, "to = onboarding and from = onboard_staged"), (MOVED, "slot = 3"),
        (MOVED, "request = chat-17"), (MOVED, "request ~ chat-*"), (MOVED, "tokens = 48"), (MOVED, "reason = none"),
        (MOVED, "entry = update_state_after_alloc"), (MOVED, "cause = 4"), (MOVED, "route = none"),
        (EVICTED, "tier = g2"), (EVICTED, "blocks = 2"), (EVICTED, "reason = recency"), (EVICTED, "slot = none"),
        (EVICTED, "text ~ '*recency*'"), (PLANNED, "route = G2>G1"), (PLANNED, "tier = g1 and tier = g2"),
        (PLANNED, "candidate = 7"), (PLANNED, "blocks = 3"), (PLANNED, "status = pending_evaluation"),
        (SKIPPED, "reason = no_capacity"), (SKIPPED, "status = skipped"), (SKIPPED, "slot = none"),
        (ASSIGNED, "slot = 4"), (ASSIGNED, "slot != 5"), (ASSIGNED, "not (slot != 4)"), (ASSIGNED, "slot > 3"),
        (ASSIGNED, "request = chat-17"), (ASSIGNED, "blocks = 3"), (ASSIGNED, "to = none"),
        (ev.SlotHeld(14, 34 * MS, 7, 1, 3, Site.EVICT_WILL, 3, (4, 5), "me-1", 9),  # type: ignore[arg-type]
         "site = evict.will and point = promote and breakpoint = 5 and by = me-1 and hold = 1"),
    ],
)
def test_event_fields(event: ev.Event, text: str) -> None:
    assert compile_event_filter(text)(event, a_state())
    assert not compile_event_filter(f"not ({text})")(event, a_state())


def test_candidates_are_followed_through_the_facts() -> None:
    state = a_state()
    skipped = compile_event_filter("slot = 3 and route = G2>G1 and request ~ chat*")
    assert not skipped(SKIPPED, state), "nothing is known of the candidate"
    assert not skipped(SKIPPED, None)
    state.seq, state.at_ns = PLANNED.seq, 0
    state.apply(PLANNED)
    assert skipped(SKIPPED, state)
    assert compile_event_filter("status = skipped")(SKIPPED, None)
    assert state.candidates[7].status is CandidateStatus.PENDING_EVALUATION


# --- properties ---

FEWER = settings(max_examples=(settings.default.max_examples if settings.default else 100) // 4)
"""Drawing a tree costs fifty times more than all that is done with it."""
CONTEXTS: dict[str, Schema] = {"slot": SLOT, "condition": CONDITION, "event": EVENT}
TEXTS = some.text(some.characters(blacklist_categories=("Cs",)), max_size=20)


def literals(field: Field) -> some.SearchStrategy[Literal | Other]:
    match field.kind:
        case Kind.TEXT:
            made: some.SearchStrategy[Literal | Other] = some.builds(Literal, some.just(Kind.TEXT), TEXTS)
        case Kind.WORD:
            made = some.builds(Literal, some.just(Kind.WORD), some.sampled_from(sorted(field.words)))
        case _:
            numbers = some.integers(-(2**63) + 1, 2**63 - 1) | some.integers(-50, 50)
            made = some.builds(Literal, some.just(field.kind), numbers)
    return made


def comparisons(schema: Schema) -> some.SearchStrategy[Node]:
    def of(name: str) -> some.SearchStrategy[Node]:
        field = schema.fields[name]
        signs = ["=", "!="]
        if field.kind is not Kind.TEXT and field.ordered:
            signs += ["<", "<=", ">", ">="]
        made: some.SearchStrategy[Node] = some.builds(
            Relation, some.just(field.name), some.sampled_from(signs), literals(field)
        )
        if field.kind in (Kind.TEXT, Kind.WORD):
            globs = some.builds(Literal, some.just(Kind.TEXT), TEXTS)
            made |= some.builds(Relation, some.just(field.name), some.just("~"), globs)
        if field.optional:
            none = some.just(Literal(field.kind, None))
            made |= some.builds(Relation, some.just(field.name), some.sampled_from(["=", "!="]), none)
        if field.flag:
            made |= some.just(Flag(field.name))
        others = [
            other.name for other in schema.fields.values()
            if other.kind is field.kind and other.words == field.words and not other.many
            and other.name.lower() not in field.words
        ]
        if others and not field.many:
            other = some.builds(Other, some.sampled_from(others))
            made |= some.builds(Relation, some.just(field.name), some.sampled_from(signs), other)
        return made

    # One field of every kind, rather than all tiers: the strategy is built anew for every example.
    return some.sampled_from([name for name in schema.fields if not name.startswith("tiers.")]).flatmap(of)


def trees(schema: Schema) -> some.SearchStrategy[Node]:
    return some.recursive(
        comparisons(schema),
        lambda inner: some.builds(Not, inner)
        | some.builds(And, some.lists(inner, min_size=2, max_size=4).map(tuple))
        | some.builds(Or, some.lists(inner, min_size=2, max_size=4).map(tuple)),
        max_leaves=6,
    )


@pytest.mark.parametrize("context", sorted(CONTEXTS))
@given(data=some.data())
@FEWER
def test_what_is_shown_is_parsed_again(context: str, data: some.DataObject) -> None:
    schema = CONTEXTS[context]
    tree = data.draw(trees(schema))
    text = show(tree)
    if len(text) > CHARS_MAX:
        return
    assert parse(text, schema) == tree
    assert show(parse(text, schema)) == text


@given(data=some.data())
@FEWER
def test_no_tree_fails_on_facts_and_not_is_the_opposite(data: some.DataObject) -> None:
    """Totality, against a second evaluator that walks the tree."""
    tree = data.draw(trees(CONDITION))
    slot = data.draw(some.sampled_from([a_slot(), a_slot(session="s", parent=1, hold=5, request="ü\n")]))
    moment = data.draw(some.sampled_from([A_MOMENT, ANOTHER_MOMENT]))
    state = a_state()
    found = compile_tree(tree, CONDITION)(slot, state, moment)
    assert found is walk(tree, slot, state, moment)
    assert compile_tree(Not(tree), CONDITION)(slot, state, moment) is not found


def walk(node: Node, *facts: Any) -> bool:
    """An independent evaluator: by the rules of the language, without closures."""
    match node:
        case Not():
            return not walk(node.of, *facts)
        case And():
            return all(walk(part, *facts) for part in node.parts)
        case Or():
            return any(walk(part, *facts) for part in node.parts)
        case Flag():
            return bool(CONDITION.fields[node.field].get(*facts))
        case Relation():
            field = CONDITION.fields[node.field]
            left = field.get(*facts)
            if isinstance(node.value, Other):
                right = CONDITION.fields[node.value.field].get(*facts)
            elif node.operator == "~":
                return left is not None and matches_glob(label(field, left), str(node.value.value), field)
            else:
                right = node.value.value
                right = field.words[str(right)] if field.kind is Kind.WORD and right is not None else right
            if node.operator in ("=", "!="):
                return (left == right) is (node.operator == "=")
            if left is None or right is None:
                return False
            return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[node.operator]


def label(field: Field, value: Any) -> str:
    return value if field.kind is Kind.TEXT else next(name for name, known in field.words.items() if known == value)


def matches_glob(text: str, pattern: str, field: Field) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(text.lower(), pattern.lower()) if field.kind is Kind.WORD else fnmatchcase(text, pattern)


PIECES = [
    *CONDITION.fields, "and", "or", "not", "(", ")", "=", "!=", "<", "<=", ">", ">=", "~", "none", "1", "-4", "2.5 ms",
    "3 k",
    "'x'", '"y', "G1>G2", "decoding", "*", "[", "\\", "\x00", "→", "é", "𝕏", "\n", "ns", "0",
]


@given(some.one_of(
    some.text(max_size=60), some.text(string.printable, max_size=60),
    some.lists(some.sampled_from(PIECES), max_size=14).map(" ".join),
    some.lists(some.sampled_from(PIECES), max_size=14).map("".join),
))
def test_any_text_compiles_or_is_refused_with_a_column(text: str) -> None:
    for compile_one in (compile_condition, compile_event_filter, compile_log):
        error = refusal(lambda compile_one=compile_one: compile_one(text))  # type: ignore[misc]
        assert error is None or (1 <= error.column <= len(text) + 1 and "\n" not in str(error))


def refusal(work: Callable[[], object]) -> ExpressionError | None:
    """The error of an expression that was refused; every other error goes on."""
    try:
        work()
    except ExpressionError as error:
        return error
    return None


# --- completion, templates, help ---


@given(some.lists(some.sampled_from(PIECES), max_size=6).map(" ".join))
def test_a_suggestion_is_taken_at_its_place(text: str) -> None:
    for word in complete(text + " ", SLOT):
        with_word = f"{text} {word}"
        error = refusal(lambda with_word=with_word: parse(with_word, SLOT))  # type: ignore[misc]
        before = refusal(lambda: parse(text, SLOT))
        wrong_already = before is not None and before.column <= len(text)
        assert error is None or wrong_already or error.column != len(text) + 2, (with_word, str(error))


def test_completion_by_place() -> None:
    assert complete("", SLOT)[:2] == ["age", "blocks"]
    assert complete("state ", SLOT) == ["=", "!=", "~"]
    assert complete("held ", SLOT) == ["=", "!=", "~", "and", "or"]
    assert complete("state = skip", SLOT) == ["skipped_prefill", "skipped_decode"]
    assert complete("age > 10 ", SLOT)[:4] == ["and", "or", "ns", "us"]
    assert complete("state = 'x", SLOT) == []


def test_templates_name_fields() -> None:
    fill = compile_log("preempted {request} after {age}, {tiers.g1.available} free, {{route {route}}}, {session}")
    text = fill(a_slot(), a_state(), A_MOMENT)
    assert text == "preempted chat-17 after 15 ms, 40 free, {route G3>G1}, none"
    assert len(compile_log("{request}" * 20)(a_slot(request="x" * 250), a_state(), A_MOMENT)) == 512
    for wrong, column in (("{requst}", 2), ("a {", 3), ("a }", 3), ("{}", 2), ("x" * 257, 257), ("a\nb", 1)):
        with pytest.raises(ExpressionError) as caught:
            compile_log(wrong)
        assert caught.value.column == column


def test_variables_are_every_field_that_has_a_value() -> None:
    names, values = variables(a_slot(), a_state(), A_MOMENT, SLOT)
    shown = dict(zip(names, values, strict=True))
    assert shown["state"] == "onboarding"
    assert shown["age"] == "15 ms"
    assert "session" not in shown


@pytest.mark.parametrize("context", sorted(CONTEXTS))
def test_every_field_is_documented(context: str) -> None:
    for name, kind, about in fields_of(CONTEXTS[context]):
        assert about.endswith("."), name
        assert kind


@given(sign=some.sampled_from(["<", "<=", ">", ">="]), off=some.integers(-2, 2), decoding=some.booleans())
def test_a_field_with_tests_of_its_own_compares_as_its_value_does(sign: str, off: int, decoding: bool) -> None:
    slot, state = a_slot(state=SlotState.DECODING if decoding else SlotState.PREFILLING), a_state()
    for field in CONDITION.fields.values():
        if field.less is not None:
            value = field.get(slot, state, A_MOMENT)
            node = Relation(field.name, sign, Literal(field.kind, value + off))
            want = {"<": off > 0, "<=": off >= 0, ">": off < 0, ">=": off <= 0}[sign]
            assert compile_tree(node, CONDITION)(slot, state, A_MOMENT) is want
