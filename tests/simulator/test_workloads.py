"""Workloads: specifications, traces line by line, chats that depend on the seed alone."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvbm_console.core.errors import UsageError
from kvbm_console.simulator.embedded import parse_workload
from kvbm_console.simulator.multiturn import Multiturn, Settings, parse_settings
from kvbm_console.simulator.traces import LINE_BYTES_MAX, MooncakeTrace
from kvbm_console.simulator.workloads import Request, Workload

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 30, "hash_ids": [4, 9]}\n'


def trace(tmp_path: Path, *lines: str) -> MooncakeTrace:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return MooncakeTrace(path)


def played(workload: Workload, seconds: float = 1.0) -> list[Request]:
    """The requests of a chat workload when every generation takes ``seconds``."""
    workload.begin(16)
    queue = list(workload.arrivals())
    seen: list[Request] = []
    while queue:
        queue.sort(key=lambda request: request.arrival_ns)
        request = queue.pop(0)
        seen.append(request)
        follower = workload.finished(request, request.arrival_ns + round(seconds * 1e9))
        if follower is not None:
            queue.append(follower)
    return seen


def test_a_line_of_a_trace_becomes_a_request(tmp_path: Path) -> None:
    workload = trace(tmp_path, GOOD, "\n", GOOD.replace("30", "600"))
    workload.begin(512)
    first, second = workload.arrivals()
    assert (first.request, first.arrival_ns, first.prompt_tokens, first.output_tokens) == ("r00000", 5_000_000, 600, 30)
    assert (len(first.hashes), len(first.output_hashes)) == (1, 0)
    assert second.hashes == first.hashes
    assert len(second.output_hashes) == (600 + 600) // 512 - 1


def test_a_line_and_a_share_of_the_users_can_have_a_priority(tmp_path: Path) -> None:
    workload = trace(tmp_path, GOOD, GOOD.replace("{", '{"priority": 3, '))
    workload.begin(512)
    assert [request.priority for request in workload.arrivals()] == [0, 3]
    for share, preferred in ((0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)):
        requests = played(Multiturn(Settings(sessions=8, turns=2, requests=16, priority=share)))
        assert [request.priority for request in requests].count(1) == 2 * preferred
        assert len({request.session for request in requests if request.priority}) == preferred


def test_output_blocks_of_two_requests_never_meet(tmp_path: Path) -> None:
    workload = trace(tmp_path, GOOD, GOOD)
    workload.begin(16)
    first, second = workload.arrivals()
    assert first.hashes == second.hashes
    assert len(first.output_hashes) == (600 + 30) // 16 - 600 // 16
    assert not set(first.output_hashes) & set(second.output_hashes)


@pytest.mark.parametrize(("line", "what"), [
    ("{", "Input data was truncated"),
    ("[]", "Expected `object`, got `array`"),
    (GOOD.replace('"input_length": 600, ', ""), "missing required field `input_length`"),
    (GOOD.replace("600", "-6"), "Expected `int` >= 1"),
    (GOOD.replace("600", "0"), "Expected `int` >= 1"),
    (GOOD.replace("[4, 9]", "[4]"), "hash_ids must have 2 ids for input_length 600, got 1"),
    (GOOD.replace("[4, 9]", "[4, -9]"), "Expected `int` >= 0"),
    (GOOD.replace('"timestamp": 5', '"timestamp": 4'), "timestamp is before that of the line above"),
    (GOOD.replace('"timestamp": 5', '"timestamp": 1e400'), "timestamp"),
    ("x" * (LINE_BYTES_MAX + 2), "longer than"),
])
def test_a_bad_line_names_file_line_and_what(tmp_path: Path, line: str, what: str) -> None:
    workload = trace(tmp_path, GOOD, "\n", line)
    workload.begin(512)
    with pytest.raises(UsageError) as caught:
        list(workload.arrivals())
    assert str(caught.value).startswith(f"{workload.path} line 3: ")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_is_read_one_line_at_a_time_and_no_further_than_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + GOOD + "not a line\n")
    workload = parse_workload(f"mooncake:{path}", 2)
    workload.begin(512)
    assert len(list(workload.arrivals())) == 2


@pytest.mark.parametrize(("text", "limit", "sentence"), [
    ("mooncake:", None, "--workload mooncake: must name a file"),
    ("mooncake:/nowhere/x.jsonl", None, "trace /nowhere/x.jsonl cannot be read: No such file or directory"),
    ("random", None, "--workload must be mooncake:FILE or multiturn"),
    ("multiturn", 0, "--limit must be at least 1, got 0"),
    ("multiturn:size=3", None, "multiturn has the keys sessions, prompts, system"),
    ("multiturn:turns", None, "each with =value, got 'turns'"),
    ("multiturn:turns=x", None, "multiturn turns must be a whole number, got 'x'"),
    ("multiturn:turns=1.5", None, "multiturn turns must be a whole number, got '1.5'"),
    ("multiturn:think=soon", None, "multiturn think must be a number, got 'soon'"),
    ("multiturn:think=nan", None, "multiturn think must be from 0 to 86400, got nan"),
    ("multiturn:priority=1.1", None, "multiturn priority must be from 0 to 1, got 1.1"),
    ("multiturn:sessions=0", None, "multiturn sessions must be from 1 to 100000, got 0"),
])
def test_a_bad_specification_is_one_sentence(text: str, limit: int | None, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_workload(text, limit)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_block_that_does_not_fit_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="block_tokens must divide 512"):
        trace(tmp_path, GOOD).begin(24)


def test_chats_depend_on_the_seed_alone() -> None:
    text = "multiturn:sessions=3,turns=3,requests=12"
    assert played(parse_workload(text)) == played(parse_workload(text))
    workload = parse_workload(text)
    assert played(workload) == played(workload), "begin starts it again"
    assert played(parse_workload(text)) != played(parse_workload(text + ",seed=1"))


def test_lengths_do_not_depend_on_the_order_in_which_sessions_finish() -> None:
    def lengths(seconds: float) -> dict[str, tuple[int, int]]:
        workload = parse_workload("multiturn:sessions=3,turns=4,requests=12,ramp=0.5")
        return {r.request: (r.prompt_tokens, r.output_tokens) for r in played(workload, seconds)}

    quick, slow = lengths(0.01), lengths(3.0)
    shared = quick.keys() & slow.keys()
    assert len(shared) >= 10, "the limit cuts off another turn here and there"
    assert {name: quick[name] for name in shared} == {name: slow[name] for name in shared}


def test_a_turn_holds_the_conversation_so_far() -> None:
    turns = played(Multiturn(Settings(sessions=1, turns=4, requests=4)))
    for before, after in pairwise(turns):
        grown = before.hashes + before.output_hashes
        assert after.hashes[: len(grown)] == grown
        assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
        assert after.arrival_ns > before.arrival_ns
    assert {r.session for r in turns} == {"s000"}
    for r in turns:
        assert len(r.hashes) == r.prompt_tokens // 16
        assert len(r.hashes) + len(r.output_hashes) == (r.prompt_tokens + r.output_tokens) // 16


def test_sessions_share_system_prompts_in_turn() -> None:
    first = played(Multiturn(Settings(sessions=4, prompts=2, system=64, turns=1, requests=4)))
    assert first[0].hashes[:4] == first[2].hashes[:4]
    assert first[0].hashes[0] != first[1].hashes[0]
    assert len({r.hashes[-1] for r in first}) == 4


def test_a_limit_ends_an_endless_workload() -> None:
    assert parse_workload("multiturn").endless
    workload = parse_workload("multiturn:sessions=2", 7)
    assert not workload.endless
    assert len(played(workload)) == 7


def test_names_say_what_differs_from_the_defaults() -> None:
    assert parse_workload("multiturn").name == "multiturn"
    assert parse_workload("multiturn:seed=4,think=0.25").name == "multiturn:think=0.25,seed=4"
    assert parse_settings("seed=4") == Settings(seed=4)
