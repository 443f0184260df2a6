"""``python -m tests.sim --seeds A:B``: run seeds and print one sentence for each law that a seed broke."""

import argparse
import sys

from tests.sim.faults import KINDS
from tests.sim.mutants import MUTANTS
from tests.sim.run import simulate


def main() -> int:
    """Entry of the command; 1 when a seed broke a law."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="first and one behind the last, as in 0:20, or one seed")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--mutant", choices=[mutant.name for mutant in MUTANTS], help="put this defect back")
    parser.add_argument("--kinds", default="", help="the faults that may happen, with commas between them")
    given = parser.parse_args()
    first, _, last = given.seeds.partition(":")
    planted = [mutant for mutant in MUTANTS if mutant.name == given.mutant]
    kinds = [kind for kind in given.kinds.split(",") if kind]
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"kinds must be some of {', '.join(KINDS)}, got {', '.join(unknown)}")
    failed = 0
    for seed in range(int(first), int(last) if last else int(first) + 1):
        result = simulate(seed, mutants=planted, kinds=kinds, keep_trace=given.trace)
        for line in result.lines:
            print(line)
        print(
            f"seed {seed}: {result.simulated_s:.1f} s simulated, {result.events} events, {result.cpu_s:.2f} s of CPU, "
            f"trace {result.digest}, faults: {', '.join(result.faults) or 'none'}", flush=True,
        )
        for sentence in result.violations:
            print(f"  {sentence}")
        if result.violations:
            failed += 1
            print(f"  run it again: python -m tests.sim --seeds {seed} --trace")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
