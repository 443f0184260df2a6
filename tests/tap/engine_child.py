"""An engine in a process of its own, with a tap: it steps until it is told to end, and says what it did.

It obeys lines of JSON on stdin and answers each with a line on stdout: ``add`` (name, prompt, output), ``steps`` (how
many), ``until`` (a request has finished), ``end``. With ``tier`` it has a tier below a host tier with a tap around it:
``load`` names requests that load a block from there, ``loaded`` one of them to wait for. Each answer tells what
finished, how long the slowest step took, and what the tap counts. ``end`` tells how long the tap's shutdown took. With
``leaves`` the process ends at once after it, as an engine does.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import kvbm_console
from kvbm_console.tap.connector import make_tap
from kvbm_console.tap.copies import ConnectorWatch
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import Sender, TapSettings
from tests.tap.fake_engine import BLOCK, Base, Inner, Request, Scheduler

BLOCKS = 100_000


class Binding:
    """A tap whose sender is real."""

    def __init__(self, target: str, serve: bool, tier: bool) -> None:
        self.settings = TapSettings(target, "child", BLOCK, BLOCKS, serve=serve, medium="CPU" if tier else "")
        self.manager: Any = None
        if tier:
            from tests.tap.tiers import FakeManager

            self.manager = FakeManager()

    def inner(self, tap: Any, args: Any, kwargs: Any) -> Any:
        return Inner()

    def inner_class(self, args: Any, kwargs: Any) -> Any:
        return Inner, args, kwargs

    def recorder(self, tap: Any, args: Any, kwargs: Any) -> TapRecorder:
        recorder = TapRecorder(ask_ns=60 * 10**9)  # verdicts of a busy machine may take above 0.1 s
        if self.manager is not None:
            recorder.watch = ConnectorWatch(recorder, {})
            recorder.watch._watch_tiers(self.manager, 1)
        tap.sender = Sender(recorder, Flattener(block_tokens=BLOCK), self.settings)
        tap.sender.start()
        return recorder


def below(order: dict[str, Any], manager: Any, recorder: TapRecorder, step: Callable[[], None]) -> None:
    """The orders about the tier below the host tier."""
    for at, name in enumerate(order.get("load", ())):
        manager.begin(name, [bytes(31) + bytes([at + 1]) + bytes(4)], [at], load=True)
    while order.get("load_held") and manager.tier._held and not recorder.copies_held:
        step()
    while order.get("drain") and manager.tier._held:
        manager.tier.drain_jobs()
        manager.poll()
    while "loaded" in order and order["loaded"] not in manager.loaded:
        step()
    while order.get("loads_gated") and recorder._copy_pattern is None:
        step()


def main(settings: dict[str, Any]) -> None:
    binding = Binding(settings["target"], settings.get("serve", False), settings.get("tier", False))
    tap = make_tap("Tap", (Base,), binding)(None, None)
    manager = binding.manager
    engine = Scheduler(tap, blocks=BLOCKS, budget=64)
    recorder = tap._recorder
    known: set[str] = set()
    finished: list[str] = []
    slowest = 0.0

    def step() -> None:
        nonlocal slowest
        began = time.perf_counter()
        output = engine.step()
        engine.sample(output)
        if manager is not None:
            manager.poll()
        slowest = max(slowest, time.perf_counter() - began)
        finished.extend(name for name in list(known) if name not in engine.requests)
        known.intersection_update(engine.requests)
        time.sleep(0.0005)

    for line in sys.stdin:
        order = json.loads(line)
        if "add" in order:
            for name, prompt, output in order["add"]:
                known.add(name)
                engine.add(Request(name, prompt, output))
        if manager is not None:
            below(order, manager, recorder, step)
        for _ in range(order.get("steps", 0)):
            step()
        while "until" in order and order["until"] not in finished:
            step()
        while "listened" in order and recorder.on is not order["listened"]:
            step()
        while "gated" in order and not recorder.gated:
            step()
        while "held_back" in order and not recorder.held_back:
            step()
        while "drained" in order and recorder.queue:
            time.sleep(0.001)
        shutdown_s = None
        if "end" in order:
            began = time.perf_counter()
            tap.shutdown()
            shutdown_s = time.perf_counter() - began
        print(json.dumps({
            "shutdown_s": shutdown_s, "finished": finished, "slowest_s": slowest, "on": recorder.on,
            "dropped": recorder.dropped, "errors": recorder.errors, "queue": len(recorder.queue),
            "held_back": recorder.held_back,
            "loads": [] if manager is None else manager.loaded, "live": len(engine.requests),
            "calls": recorder.calls, "from": kvbm_console.__file__,
        }), flush=True)
        slowest = 0.0
        if order.get("end"):
            break
    tap.shutdown()
    if not settings.get("leaves"):
        tap.sender.join(5.0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
