"""The rules of a stream: a planted violation of each of them is found and no other, and conforming streams pass.

Law of this file: the base stream exercises every rule that a stream alone can exercise, and a mutant changes it so that
exactly the named rule is broken.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.cli.main import cli
from kvbm_console.engines.conformance.hearing import Hearing
from kvbm_console.engines.conformance.rules import FAILED, PASSED, RULES, Conformance, RuleChecker
from kvbm_console.engines.kv_events.capture import CaptureFrame, pack_frame, read_frames
from tests.engines.payloads import batch, cleared, removed, stored
from tests.engines.test_captures import KEPT, NAMES
from tests.engines.test_commands import run
from tests.engines.test_zmq_source import PATIENCE_S, Engine

CAPACITY = {"GPU": 5}
OF_A_REPLAY = {"replay", "replay-end", "replay-topic"}
Stream = list[tuple[int, Any]]
"""Numbers with the events of a batch, or with the bytes of a payload."""


def base() -> Stream:
    """Three lives: up to a clear, up to a restart, and after the restart."""
    return [
        (0, [stored(1, 2)]),
        (1, [stored(3, parent=2), stored(1, 2, medium="CPU")]),
        (2, [removed(3), stored(4, parent=2)]),
        (3, [stored(1, 2)]),
        (4, [cleared()]),
        (5, [stored(6), stored(7, parent=6)]),
        (6, [removed(7), stored(5, parent=6)]),
        (0, [stored(6, 8)]),
        (1, [stored(9, parent=8), removed(9)]),
    ]


def judged(stream: Stream, capacity: dict[str, int] = CAPACITY) -> Conformance:
    checker = RuleChecker(capacity)
    for seq, events in stream:
        checker.accept(seq, events if isinstance(events, bytes) else batch(*events))
    return checker.report("test")


def broken(report: Conformance) -> dict[str, tuple[int | None, int | None]]:
    """Broken rules, with the places of their examples."""
    return {
        each.rule: (each.example.message, each.example.event)
        for each in report.verdicts if each.verdict == FAILED and each.example is not None
    }


def test_the_base_stream_keeps_every_rule_and_exercises_it() -> None:
    report = judged(base())
    untested = {each.rule for each in report.verdicts if each.verdict != PASSED}
    assert untested == OF_A_REPLAY
    assert (report.clears, report.restarts, report.restatements, report.joined_late) == (1, 1, 1, False)
    assert [each.rule for each in report.verdicts] == list(RULES)


def put(at: int, *events: Any) -> Callable[[Stream], Stream]:
    """A mutation that adds events to the end of a batch."""
    def change(stream: Stream) -> Stream:
        seq, before = stream[at]
        return [*stream[:at], (seq, [*before, *events]), *stream[at + 1 :]]

    return change


def without_a_token(stream: Stream) -> Stream:
    stream[5][1][1]["token_ids"].pop()
    return stream


def as_rank_1(stream: Stream) -> Stream:
    return [*stream[:6], (6, batch(*stream[6][1], dp_rank=1)), *stream[7:]]


MUTANTS: dict[str, tuple[str, Callable[[Stream], Stream], tuple[int, int | None]]] = {
    "garbage": ("message", lambda stream: [*stream[:3], (3, b"\x80garbage"), *stream[4:]], (3, None)),
    "no list of events": ("message", lambda stream: [*stream[:3], (3, b"\x92\xcb" + bytes(8) + b"\x05"), *stream[4:]],
                          (3, None)),
    "a kind of its own": ("event", put(1, {"type": "BlockTouched", "block_hashes": [1]}), (1, 2)),
    "a hash that is text": ("event", put(1, {**removed(1), "block_hashes": ["x"]}), (1, 2)),
    "no block size": ("event", put(1, {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None,
                                       "token_ids": []}), (1, 2)),
    "a missing number": ("sequence", lambda stream: [*stream[:3], (4, [stored(6)]), *stream[7:]], (4, None)),
    "a message twice": ("sequence", lambda stream: [*stream[:3], stream[2], *stream[3:]], (2, None)),
    "a block of the life before the restart": ("restart", put(8, removed(5)), (1, 2)),
    "a parent of the life before the restart": ("restart", put(8, stored(10, parent=5)), (1, 2)),
    "an unknown parent": ("parent", put(2, stored(10, parent=77)), (2, 2)),
    "a removed parent": ("parent", put(2, stored(10, parent=3)), (2, 2)),
    "a store twice": ("stored-once", put(2, stored(4, parent=2)), (2, 2)),
    "a chain twice, as its removals tell": ("stored-once", put(3, removed(1), removed(1)), (3, 0)),
    "a removal of nothing": ("removed", put(2, removed(88)), (2, 2)),
    "a removal from another medium": ("removed", put(2, removed(4, medium="CPU")), (2, 2)),
    "a removal from another group": ("removed", put(2, removed(4, group_idx=1)), (2, 2)),
    "a block of the life before the clear": ("cleared", put(5, removed(4)), (5, 2)),
    "more than the capacity": ("capacity", put(2, stored(10), stored(11), stored(12)), (2, 4)),
    "a placeholder": ("described", put(2, stored(10, size=0)), (2, 2)),
    "another block size": ("block-size", put(2, stored(10, size=32)), (2, 2)),
    "a token less": ("tokens", without_a_token, (5, 1)),
    "other tokens": ("content", put(6, {**stored(7, parent=6), "token_ids": [5] * 16}), (6, 2)),
    "another parent": ("content", put(6, stored(7)), (6, 2)),
    "hashes of bytes": ("hash-form", put(2, stored(b"\x01" * 32)), (2, 2)),
    "signed and unsigned": ("hash-form", put(2, stored(-5), stored(2**63)), (2, 3)),
    "a hash above 64 bits": ("hash-form", put(2, stored(-(2**63)), removed(-(2**63)), stored(2**63)), (2, 4)),
    "an unknown medium": ("medium", put(2, stored(10, medium="TAPE")), (2, 2)),
    "a medium in two spellings": ("medium", put(2, stored(10, medium="cpu")), (2, 2)),
    "another rank": ("rank", as_rank_1, (6, None)),
}


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_planted_violation_breaks_its_rule_and_no_other(name: str) -> None:
    rule, change, place = MUTANTS[name]
    assert broken(judged(change(base()))) == {rule: place}


def test_every_rule_of_a_stream_has_a_mutant() -> None:
    assert {rule for rule, _, _ in MUTANTS.values()} == set(RULES) - OF_A_REPLAY


def test_the_reference_has_every_rule() -> None:
    reference = (Path(__file__).resolve().parents[2] / "kvbm_console" / "engines" / "REFERENCE.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \| (.*) \|$", reference, re.MULTILINE)[: len(RULES)] == list(RULES.items())


def test_a_rule_that_was_not_exercised_is_not_passed() -> None:
    report = judged([(0, [stored(1)])], {})
    passed = {each.rule for each in report.verdicts if each.verdict == PASSED}
    assert passed == {"message", "event", "stored-once", "described", "block-size", "tokens", "hash-form", "medium",
                      "rank"}


@pytest.mark.parametrize("events", [removed(5), stored(6, parent=5)])
def test_blocks_from_before_a_late_join_or_a_loss_are_not_judged(events: Any) -> None:
    late = judged([(40, [stored(1)]), (41, [events])])
    assert (broken(late), late.joined_late) == ({}, True)
    lost = judged([(0, [stored(1)]), (2, [events])])
    assert (set(broken(lost)), lost.missed_messages) == ({"sequence"}, 1)
    known = judged([(40, [stored(1)]), (41, [cleared()]), (42, [events])])
    assert set(broken(known)) == {"removed" if events["type"] == "BlockRemoved" else "parent"}


def test_the_events_of_tensorrt_llm_are_judged_by_the_same_rules() -> None:
    def message(*data: Any) -> bytes:
        return json.dumps([{"event_id": at, "data": each} for at, each in enumerate(data)]).encode()

    block = {"type": "stored_block", "block_hash": 7, "tokens": [{"token_id": 1}] * 4, "cache_level": 0}
    down = {"type": "updated", "block_hash": 7, "cache_level": {"old_value": 0, "new_value": 1}}
    fine = [{"type": "created"}, {"type": "stored", "parent_hash": None, "blocks": [block]}, down]
    gone = {"type": "removed", "block_hashes": [7]}
    assert broken(judged([(0, message(*fine, gone))])) == {}
    assert broken(judged([(0, message(*fine, gone, gone))])) == {"removed": (0, 4)}
    assert broken(judged([(0, message(*fine, down))])) == {"removed": (0, 3)}


# --- conforming streams ---


class Cache:
    """A prefix cache with two media that tells what it does, as an engine that keeps every rule."""

    def __init__(self) -> None:
        self.parent_of: dict[int, int | None] = {}
        self.on: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.next_hash = 1
        self.told: list[Any] = []

    def store(self, at: int, count: int) -> None:
        held = sorted(self.on["GPU"])
        first = parent = held[at % len(held)] if held and at % 3 else None
        chain = range(self.next_hash, self.next_hash + count)
        for key in chain:
            self.parent_of[key], parent = parent, key
        self.next_hash += count
        self.on["GPU"].update(chain)
        self.told.append(self.event(list(chain), first, "GPU"))

    def event(self, chain: list[int], parent: int | None, medium: str) -> Any:
        return {**stored(*chain, parent=parent, medium=medium),
                "token_ids": [key * 16 + token for key in chain for token in range(16)]}

    def offload(self, at: int) -> None:
        ready = [key for key in sorted(self.on["GPU"] - self.on["CPU"])
                 if self.parent_of[key] is None or self.parent_of[key] in self.on["GPU"] | self.on["CPU"]]
        if ready:
            key = ready[at % len(ready)]
            self.on["CPU"].add(key)
            self.told.append(self.event([key], self.parent_of[key], "CPU"))

    def evict(self, at: int, medium: str) -> None:
        held = sorted(self.on[medium])
        if held:
            key = held[at % len(held)]
            self.on[medium].remove(key)
            self.told.append(removed(key, medium=medium))

    def restate(self, at: int) -> None:
        """A hit is told again, as a chain from the root."""
        chain: list[int] = []
        held = sorted(self.on["GPU"])
        key: int | None = held[at % len(held)] if held else None
        while key is not None and key in self.on["GPU"]:
            chain.insert(0, key)
            key = self.parent_of[key]
        if chain and key is None:
            self.told.append(self.event(chain, None, "GPU"))

    def clear(self) -> None:
        self.on = {"GPU": set(), "CPU": set()}
        self.told.append(cleared())


STEP = some.one_of(
    some.tuples(some.just("store"), some.integers(0, 99), some.integers(1, 4)),
    some.tuples(some.sampled_from(["offload", "restate"]), some.integers(0, 99)),
    some.tuples(some.just("evict"), some.integers(0, 99), some.sampled_from(["GPU", "CPU"])),
    some.tuples(some.sampled_from(["clear", "batch", "restart"])),
)


def test_a_chain_that_is_told_again_may_begin_before_the_checker_joined() -> None:
    """Its first block was stored unheard, and its second was heard."""
    cache = Cache()
    second, chain = cache.event([2], 1, "GPU"), cache.event([1, 2], None, "GPU")
    report = judged([(1, [second]), (2, [chain])])
    assert broken(report) == {}
    assert (report.joined_late, report.restatements) == (True, 1)
    report = judged([(0, [cleared()]), (1, [second]), (2, [chain])])
    assert broken(report)["stored-once"] == (2, 0), "who knows all blocks knows that no such chain was told"


@given(some.lists(STEP, max_size=60), some.integers(0, 3))
def test_a_conforming_stream_keeps_every_rule(steps: list[Any], joined: int) -> None:
    """Whatever the engine does, and wherever the checker joins."""
    stream: Stream = []
    cache, seq = Cache(), 0

    def end_batch() -> None:
        nonlocal seq
        stream.append((seq, batch(*cache.told, ts=float(len(stream)))))
        seq += 1
        cache.told = []

    for name, *arguments in steps:
        if name == "batch":
            end_batch()
        elif name == "restart":
            end_batch()
            hashes, cache, seq = cache.next_hash, Cache(), 0
            cache.next_hash = hashes
        else:
            getattr(cache, name)(*arguments)
    end_batch()
    report = judged(stream[joined:], {"GPU": 300, "CPU": 300})
    assert broken(report) == {}
    assert report.messages == len(stream[joined:])
    assert report.joined_late == (joined > 0 and report.messages > 0 and stream[joined][0] > 0)


# --- captures ---

KNOWN: dict[str, set[str]] = {
    "offload_arc_placeholder": {"described"}, "sglang": {"removed"}, "mooncake": {"described"},
}
"""Captures whose publisher broke rules; REFERENCE.md has the reasons."""


@pytest.mark.parametrize("name", NAMES)
def test_the_captures_of_real_engines(name: str) -> None:
    checker = RuleChecker()
    for frame in read_frames(KEPT / f"{name}.bin"):
        checker.accept(frame.seq, frame.payload)
    report = checker.report(name)
    assert set(broken(report)) == KNOWN.get(name, set())


def test_the_command_on_a_capture(tmp_path: Path) -> None:
    fine = run("conform", str(KEPT / "multiturn.bin"), "--capacity", "GPU=95", "--format", "json")
    assert fine.returncode == 0, fine
    (report,) = json.loads(fine.stdout)
    assert {each["rule"]: each["verdict"] for each in report["verdicts"]}["capacity"] == "pass"
    worse = run("conform", str(KEPT / "multiturn.bin"), "--capacity", "GPU=30")
    assert (worse.returncode, "blocks are on GPU, which has 30" in worse.stdout) == (1, True), worse


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["{empty}"], "brought no message"),
    (["{missing}"], "No such file"),
    (["{empty}", "--seconds", "1"], "need the address of a publisher"),
    (["{empty}", "--capacity", "GPU"], "MEDIUM=BLOCKS"),
    (["{empty}", "--capacity", "GPU=0"], "MEDIUM=BLOCKS"),
])
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    places = {"empty": tmp_path / "empty", "missing": tmp_path / "missing"}
    result = run("conform", *(word.format(**places) for word in arguments))
    assert result.returncode in (2, 3)
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_each_topic_of_a_capture_is_a_publisher(tmp_path: Path) -> None:
    path = tmp_path / "frames.bin"
    frames = [CaptureFrame(1.0, topic, 0, batch(stored(1))) for topic in (b"kv@a", b"kv@b")]
    path.write_bytes(b"".join(map(pack_frame, frames)))
    result = CliRunner().invoke(cli, ["conform", str(path), "--format", "json"], standalone_mode=False)
    assert [report["publisher"] for report in json.loads(result.stdout)] == ["kv@a", "kv@b"]


# --- a live publisher ---


def hear(engine: Engine, batches: int, *options: str, replay: bool = True) -> tuple[int, dict[str, Any]]:
    """(exit status, report) of the command on a publisher."""
    address = f"zmq://127.0.0.1:{engine.port}?topic=kv" + (f"&replay={engine.replay_port}" if replay else "")
    result = run("conform", address, "--batches", str(batches), "--format", "json", *options)
    assert result.stdout, result
    (report,) = json.loads(result.stdout)
    return result.returncode, report


def failing(report: dict[str, Any]) -> set[str]:
    return {each["rule"] for each in report["verdicts"] if each["verdict"] == "fail"}


def test_a_live_publisher_is_heard_from_its_first_message(engines: Callable[..., Engine]) -> None:
    engine = engines(topic_in_replay=True)
    engine.publish([stored(1, 2)], [stored(3, parent=2)], [removed(3)])
    status, report = hear(engine, 3)
    assert (status, failing(report), report["joined_late"]) == (0, set(), False)
    verdicts = {each["rule"]: each["verdict"] for each in report["verdicts"]}
    assert {verdicts[rule] for rule in OF_A_REPLAY} == {"pass"}


@pytest.mark.parametrize(("settings", "rule"), [
    ({}, "replay-topic"), ({"fault": "end"}, "replay-end"), ({"fault": "hole"}, "replay"),
    ({"fault": "bytes"}, "replay"),
])
def test_a_replay_that_breaks_a_rule(engines: Callable[..., Engine], settings: dict[str, Any], rule: str) -> None:
    engine = engines(**({"topic_in_replay": True} if settings else {}), **settings)
    engine.publish([stored(1)], [stored(2)], [stored(3)])
    status, report = hear(engine, 3)
    assert (status, failing(report)) == (1, {rule})


@asynccontextmanager
async def hearing_of(engine: Engine) -> AsyncIterator[tuple[Hearing, Callable[[int], Any]]]:
    """A hearing that runs, and a function that waits until so many messages were heard."""
    context = zmq.asyncio.Context()
    hearing = Hearing(engine.publisher(), RuleChecker)
    hearing.open(context)
    task = asyncio.ensure_future(hearing.run())

    async def heard(messages: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while sum(checker.messages for checker in hearing.checkers.values()) < messages:
                assert not task.done()
                await asyncio.sleep(0.001)

    try:
        yield hearing, heard
    finally:
        task.cancel()
        await asyncio.wait([task])
        context.destroy(linger=0)


@pytest.mark.asyncio
async def test_messages_that_the_network_lost_come_by_replay(engines: Callable[..., Engine]) -> None:
    engine = engines(topic_in_replay=True)
    async with hearing_of(engine) as (hearing, heard):
        engine.publish([stored(1)])
        await heard(1)
        engine.publish([stored(2)])  # the subscription may be younger than these two
        await heard(2)
        engine.hide([stored(3, parent=2)], [removed(3)])
        engine.publish([stored(4)])
        await heard(5)
        await hearing.compare()
        (checker,) = hearing.checkers.values()
        assert hearing.refetched >= 2
        assert broken(checker.report("live")) == {}


@pytest.mark.asyncio
async def test_a_publisher_that_begins_again_while_messages_are_lost(engines: Callable[..., Engine]) -> None:
    engine = engines(topic_in_replay=True)
    async with hearing_of(engine) as (hearing, heard):
        engine.publish([stored(1)], [stored(2)])
        await heard(2)
        engine.end()
        ports = {"port": engine.port, "replay_port": engine.replay_port}
        again = engines(topic_in_replay=True, **ports)
        again.hide([stored(5)], [stored(6, parent=5)], [stored(7)])
        (checker,) = hearing.checkers.values()
        while checker.messages < 6:  # until the connection is back
            again.publish([cleared()])
            await asyncio.sleep(0.01)
        report = checker.report("live")
        assert (report.restarts, report.joined_late, broken(report)) == (1, False, {})


def test_no_publisher_is_one_sentence() -> None:
    result = run("conform", "zmq://127.0.0.1:9", "--seconds", "0.2")
    assert (result.returncode, "brought no message" in result.stderr) == (3, True), result
