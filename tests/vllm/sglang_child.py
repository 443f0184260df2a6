"""SGLang's scheduler in a process of its own, with a tap that reports to a daemon.

It obeys the orders of ``tests.tap.engine_child`` that need no lower tier, and answers as that engine does.

Law of this file: the tap is loaded as SGLang loads it, by its plugin mechanism and ``KVBM_TAP``.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvbm_console.tap import sglang as binding
from tests.vllm.sglang_engine import Engine, HookRegistry

PAGE = 16


def main(settings: dict[str, Any], answers: Any) -> None:
    os.environ["KVBM_TAP"] = json.dumps({"daemon": settings["target"], "name": "child"})
    binding.plugin()
    HookRegistry.apply_hooks()
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine(Path(directory), page=PAGE, tokens=64 * PAGE, tree="python")
    recorder = engine.scheduler.kvbm_tap.recorder
    recorder._ask_ns = 60 * 10**9  # verdicts of a busy machine may take above 0.1 s
    done: list[str] = []

    def step() -> None:
        engine.form()
        engine.finish()
        live = engine.live()
        done.extend(name for name in engine.requests if name not in live and name not in done)
        time.sleep(0.0005)

    for line in sys.stdin:
        order = json.loads(line)
        for name, prompt, output in order.get("add", ()):
            engine.add(name, prompt, output)
        for _ in range(order.get("steps", 0)):
            step()
        while "until" in order and order["until"] not in done:
            step()
        while "listened" in order and recorder.on is not order["listened"]:
            step()
        while "gated" in order and not recorder.gated:
            step()
        while "held_back" in order and not recorder.held_back:
            step()
        print(json.dumps({
            "finished": done, "on": recorder.on, "dropped": recorder.dropped, "errors": recorder.errors,
            "queue": len(recorder.queue), "held_back": recorder.held_back, "live": len(engine.live()),
        }), file=answers, flush=True)


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    main(json.loads(sys.argv[1]), out)
