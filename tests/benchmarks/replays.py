"""``python -m tests.benchmarks.replays``: hit rates of vLLM's scheduler, as measured and as replayed, as a table.

Law of this file: the recordings are those of ``recordings/vllm``, and the machine of the replay is the recording's.
"""

import tempfile
from pathlib import Path
from typing import Final

from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.recorded import read_run
from kvbm_console.planning.run import simulate
from tests.tap.kept import run_of

SHOWS: Final = {
    "alone": "device alone",
    "chats": "256 places, a host tier of 400 blocks",
    "refused": "host tier, a load fails its request",
    "trouble": "32 places, every third load fails",
    "offload": "48 places, 4 seats",
    "hybrid": "34 places, a second group of blocks",
    "kept": "59 places, a second group of blocks, vLLM's default retention",
    "mixed": "60 places, three groups of blocks, a host tier of 100",
    "window": "30 places, all layers see a window",
    "passed": "40 places, 4 seats, all layers see a window",
    "below": "96 places, all layers see a window, a host tier of 100 blocks",
    "early": "36 places, asynchronous scheduling",
    "ahead": "42 places, asynchronous scheduling, a host tier of 60 blocks",
    "anew": "40 places, 5 seats, a host tier of 40 blocks",
    "twins": "40 places, pairs with the same prompt in one step",
}


def main() -> None:
    """Print the table."""
    print("| recording | measured | replayed |")
    print("|---|---|---|")
    for name, shows in SHOWS.items():
        with tempfile.TemporaryDirectory() as directory:
            run_of(name).record(Path(directory), [64])
            run = read_run(directory)
            replayed = simulate(SimulateOptions(trace=run.name, **run.option_fields())).document["prefix_hit_rate"]
        print(f"| `recordings/vllm/{name}`: {shows} | {100 * (run.hit_rate or 0):.2f} % | {100 * replayed:.2f} % |")


if __name__ == "__main__":
    main()
