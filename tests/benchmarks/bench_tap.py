"""Figures of the tap: what one call costs the scheduler's thread, and what a whole step costs the engine's process.

Law of this file: the sender's share is counted as well, since it holds the interpreter's lock; the process beside the
engine is another one.
"""

from typing import Any, Final

import msgspec

from kvbm_console.tap.connector import make_tap
from kvbm_console.tap.flatten import Flattener, drain
from kvbm_console.tap.recorder import TapRecorder
from tests.benchmarks.harness import Figure, Target, measure
from tests.tap.fake_engine import BLOCK, Base, Cached, Inner, NewRequest, Output, Request

DECODES: Final = 64
CALL_NS: Final = 5_000
STEP_NS: Final = 131_000
"""2 % of 6.56 ms: a step of 64 decodes in the step model of the simulated engine."""


class _Binding:
    def __init__(self) -> None:
        self.made = TapRecorder()

    def inner(self, tap: Any, args: Any, kwargs: Any) -> Any:
        return Inner()

    def inner_class(self, args: Any, kwargs: Any) -> Any:
        return Inner, args, kwargs

    def recorder(self, tap: Any, args: Any, kwargs: Any) -> TapRecorder:
        return self.made


class _Steps:
    """An engine that decodes the same requests for ever; a block is appended to every sixteenth of them."""

    def __init__(self) -> None:
        binding = _Binding()
        self.tap: Any = make_tap("Tap", (Base,), binding)(None, None)
        self.recorder = binding.made
        self.recorder.on = True
        self.flattener = Flattener(block_tokens=4 * BLOCK, hash_tokens=BLOCK)
        self.names = [f"request-{number:032x}" for number in range(DECODES)]
        hashes = [bytes(range(32))] * 10**6
        for name in self.names:
            request = Request(name, list(range(32)), 10**6)
            request.block_hashes = hashes
            self.tap.on_new_request(request)
        self.tap.build_connector_meta(Output(
            [NewRequest(name, ([0, 1],), 0) for name in self.names], Cached(), dict.fromkeys(self.names, 32), set()
        ))
        drain(self.recorder, self.flattener, 10**6)
        self.at = 32

    def output(self) -> Output:
        self.at += 1
        ids: list[Any] = [None] * DECODES
        ids[self.at % 16 :: 16] = [([self.at],)] * (DECODES // 16)
        return Output(
            [], Cached(self.names, set(), ids, [self.at] * DECODES), dict.fromkeys(self.names, 1), set()
        )


def call() -> Figure:
    """One recorded call, above the same call of the connector inside."""
    steps = _Steps()
    output = steps.output()
    inner, recorder = steps.tap._tapped, steps.recorder

    def work() -> None:
        steps.tap.build_connector_meta(output)
        if len(recorder.queue) > 1_000:
            recorder.queue.clear()

    return measure(
        "tap, a recorded call", work, 1, "the call itself", lambda: inner.build_connector_meta(output), 1,
        Target(extra_ns=CALL_NS),
    )


def lookup() -> Figure:
    """A lookup that is asked for again and again."""
    steps = _Steps()
    request = Request("one", list(range(32)), 1)
    inner = steps.tap._tapped

    def reference() -> None:
        inner.get_num_new_matched_tokens(request, 0)
        inner.calls.clear()

    def work() -> None:
        steps.tap.get_num_new_matched_tokens(request, 0)
        inner.calls.clear()

    return measure("tap, a lookup", work, 1, "the lookup itself", reference, 1, Target(extra_ns=CALL_NS))


def step() -> Figure:
    """All calls of a step with 64 decodes, and what the sender makes of them."""
    steps = _Steps()
    told = type("Told", (), {"finished_recving": None, "finished_sending": None, "invalid_block_ids": set()})()

    def work() -> None:
        steps.tap.build_connector_meta(steps.output())
        steps.tap.update_connector_output(told)
        steps.tap.take_events()
        msgspec.msgpack.encode(drain(steps.recorder, steps.flattener, 64))

    return measure(
        "tap, a step with 64 decodes", work, 1, "making its output", steps.output, 1, Target(ns=STEP_NS)
    )


BENCHES: Final = {"tap call": call, "tap lookup": lookup, "tap step": step}
"""Name to figure."""
