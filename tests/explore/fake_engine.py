#!/usr/bin/env python3
"""Stands for an interpreter with an engine: it answers tasks as the worker does, and misbehaves on some seeds.

Seed 3 is a finding, seed 5 ends the process, seed 7 makes the file ``FAKE_ENGINE_HANGS`` and says nothing for ever.
Shrinking keeps what it is given. The tap of a recorded run tells the lines of the file ``FAKE_ENGINE_TAP``.
"""

import json
import os
import sys
import time

VERDICT = {"monitor": "progress", "step": 9, "sentence": "nothing was scheduled", "signature": "progress: deadlock"}


def say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    if os.environ.get("FAKE_ENGINE") == "old":
        say({"unsupported": "vLLM has no Scheduler here"})
        return
    if os.environ.get("FAKE_ENGINE") == "crashes":
        os._exit(7)
    if os.environ.get("FAKE_ENGINE") == "hangs":
        time.sleep(1_000)
    say({"release": "fake 1.0"})
    for line in sys.stdin:
        task = json.loads(line)
        if "shrink" in task:
            say({"scenario": task["shrink"], "steps": 9, "verdict": VERDICT})
        if "record" in task:
            kept = os.environ.get("FAKE_ENGINE_TAP")
            if kept is None:
                say({"unrecorded": "the tap does not fit here"})
            else:
                with open(kept) as lines:
                    for told in lines:
                        print(told, end="", flush=True)
                if os.environ.get("FAKE_ENGINE") == "dies":
                    os._exit(11)
                say({"verdict": VERDICT})
        for profile, seed in task.get("runs", ()):
            if seed == 5:
                os._exit(11)
            if seed == 7:
                open(os.environ.get("FAKE_ENGINE_HANGS", os.devnull), "w").close()
                time.sleep(1_000)
            say({
                "profile": profile, "seed": seed, "steps": 10, "reads": 5, "moved": 2, "cpu_s": 0.001,
                "pairs": [["running", f"event {seed % 4}"]], "verdict": VERDICT if seed == 3 else None,
            })
        say({"done": True})


main()
