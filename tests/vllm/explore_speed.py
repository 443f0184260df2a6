"""The speed of ``explore vllm`` beside vLLM's scheduler alone, on the same requests in turns, in CPU time.

``python -m tests.vllm.explore_speed [SEEDS]`` prints a line of JSON: the release, nanoseconds of a step with connector,
worker, memory and monitors, nanoseconds of a step of the scheduler without a connector, and their ratio.

Law of this file: both sides make their scheduler anew for each scenario, and their turns alternate.
"""

import copy
import dataclasses
import json
import sys
import time
from typing import Any, Final

from kvbm_console.explore.scenario import BLOCK, PROFILES, Arrive, Scenario, generate, tokens_of
from kvbm_console.explore.vllm import Machine, Release

OFFLOADING: Final[dict[str, Any]] = {"kv_connector": "OffloadingConnector"}
SEEDS: Final = 10
TURNS: Final = 3


def alone(release: Release, scenario: Scenario) -> int:
    """The requests of a scenario on the scheduler without a connector, without monitors. Returns its steps."""
    config, cache = release.configs(OFFLOADING, scenario)
    config = copy.copy(config)
    config.kv_transfer_config = None
    scheduler = release.scheduler(
        vllm_config=config, kv_cache_config=cache, log_stats=False,
        structured_output_manager=release.grammar(config), block_size=BLOCK,
    )
    waiting = [one for one in scenario.actions if isinstance(one, Arrive)]
    steps = 0
    while waiting or scheduler.has_requests():
        while waiting and waiting[0].step <= steps:
            one = waiting.pop(0)
            sampling = release.sampling(max_tokens=one.output, ignore_eos=True)
            scheduler.add_request(release.request(
                one.name, tokens_of(one.prompt), sampling, None, block_hasher=release.hasher))
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        if not names and waiting:  # as ``Machine`` does: nothing is left until the next arrival
            shift = max(0, waiting[0].step - steps - 1)
            waiting = [dataclasses.replace(one, step=one.step - shift) for one in waiting]
        requests = [scheduler.requests[name] for name in names]
        scheduler.update_from_output(output, release.outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests],
        ))
        steps += 1
    return steps


def measured(release: Release, seeds: int) -> tuple[float, float]:
    """Nanoseconds of CPU time of a step, with the exploration and alone. Profiles with one group and one rank only.

    Of ``TURNS`` runs of each scenario the shortest counts, because another process on the core makes a run longer."""
    spent = {"explore": 0, "alone": 0}
    steps = {"explore": 0, "alone": 0}
    for seed in range(seeds):
        for profile, shape in PROFILES.items():
            if shape.machine:
                continue
            scenario = generate(profile, seed)
            turns: dict[str, list[tuple[int, int]]] = {way: [] for way in spent}
            for _ in range(TURNS):
                for way, times in turns.items():
                    began = time.process_time_ns()
                    ours = way == "explore"
                    took = Machine(release, OFFLOADING, scenario).play().steps if ours else alone(release, scenario)
                    times.append((time.process_time_ns() - began, took))
            for way, times in turns.items():
                shortest, took = min(times)
                spent[way] += shortest
                steps[way] += took
    return spent["explore"] / steps["explore"], spent["alone"] / steps["alone"]


def main() -> None:
    """Measure and print."""
    release = Release()
    ours, theirs = measured(release, int(sys.argv[1]) if sys.argv[1:] else SEEDS)
    print(json.dumps({"release": release.version, "ns": ours, "alone_ns": theirs, "ratio": ours / theirs}))


if __name__ == "__main__":
    main()
