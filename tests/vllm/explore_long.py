"""Long explorations in chunks, which can be ended at any time and go on where they were.

``python -m tests.vllm.explore_long silent | tap [--release R] [--seeds A:B] [--for SECONDS]`` in the environment of
``make test-vllm``. ``silent`` explores connectors under all profiles, and names each verdict that ``explore_known``
does not have. ``tap`` compares runs that have a tap with the engine alone. Both print a table of all their chunks. Exit
status 1: a verdict is not known, a run differs, or a tap had an error.

Each chunk is a line of ``.releases/explore.jsonl``, and a chunk that has its line is not run again. Remove the file
after a change of the program.

Law of this file: a number in the tables is the sum of chunks that were run to their end.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from tests.vllm.releases import RELEASES, beside

STATE: Final = RELEASES / "explore.jsonl"
CHUNK: Final = 20
"""Seeds of a chunk: some 10 s of a core."""
SILENT: Final = ("lru", "arc", "tiers", "simple", "multi", "nixl")
WATCHED: Final = ("press", "abort", "reset")


def silent(release: Any, name: str, seeds: range) -> dict[str, Any]:
    """Every profile with these seeds. Counts, and the verdicts that are not known."""
    from kvbm_console.explore.scenario import PROFILES, generate
    from kvbm_console.explore.vllm import Machine
    from tests.vllm.explore_known import CONNECTORS, known

    totals: Counter[str] = Counter(runs=0, steps=0, reads=0, left_out=0)
    findings: Counter[str] = Counter()
    unknown = []
    for profile in PROFILES:
        for seed in seeds:
            scenario = generate(profile, seed)
            if name in ("simple", "multi") and scenario.option("groups") == "window":
                totals["left_out"] += 1  # SimpleCPUOffloadConnector refuses a model without full attention
                continue
            run = Machine(release, CONNECTORS[name], scenario).play()
            totals.update(runs=1, steps=run.steps, reads=run.reads)
            if run.verdict is not None:
                findings[run.verdict.signature] += 1
                if run.verdict.signature not in known(name, profile):
                    unknown.append([profile, seed, run.verdict.signature, run.verdict.sentence])
    return {**totals, "findings": findings, "unknown": unknown}


def watched(release: Any, place: str, seeds: range) -> dict[str, Any]:
    """Three profiles with these seeds, alone and with a tap. Counts, and the runs that differ."""
    from kvbm_console.explore.scenario import generate
    from tests.vllm.explore_known import OFFLOADING
    from tests.vllm.explore_tapped import WAYS, Beside

    compared = Beside(release, OFFLOADING, place)
    differing = [[profile, seed, way] for profile in WATCHED for seed in seeds
                 for way in compared.differing(generate(profile, seed), WAYS[1:])]
    return {"runs": compared.scenarios, "steps": compared.steps, "errors": compared.errors,
            "dropped": compared.dropped, "differing": differing}


KINDS: Final[dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]]] = {
    "silent": (silent, SILENT), "tap": (watched, ("connector", "scheduler")),
}
"""Kind to the work of a chunk, and to the subjects that it is done for."""


def done(kind: str) -> list[dict[str, Any]]:
    """The lines of a kind, one for each chunk."""
    lines = map(json.loads, STATE.read_text().splitlines()) if STATE.exists() else ()
    return list({(line["release"], line["subject"], *line["seeds"]): line
                 for line in lines if line["kind"] == kind}.values())


def chunks(kind: str, release: str, subjects: tuple[str, ...], seeds: range) -> Iterator[tuple[str, range]]:
    """Subject and seeds of the chunks that are not done."""
    made = {(line["release"], line["subject"], *line["seeds"]) for line in done(kind)}
    for first in range(seeds.start, seeds.stop, CHUNK):
        chunk = range(first, min(first + CHUNK, seeds.stop))
        for subject in subjects:
            if (release, subject, chunk.start, chunk.stop) not in made:
                yield subject, chunk


def explore(kind: str, release: Any, subjects: tuple[str, ...], seeds: range, seconds: float) -> None:
    """Run the chunks that are not done, and begin none after ``seconds``."""
    until = time.monotonic() + seconds
    for subject, chunk in chunks(kind, release.version, subjects, seeds):
        if time.monotonic() > until:
            break
        began = time.process_time()
        result = KINDS[kind][0](release, subject, chunk)
        line = {"kind": kind, "release": release.version, "subject": subject, "seeds": [chunk.start, chunk.stop],
                **result, "cpu_s": time.process_time() - began}
        STATE.parent.mkdir(exist_ok=True)
        with STATE.open("a") as file:
            file.write(json.dumps(line) + "\n")


def wrong(kind: str) -> list[str]:
    """Each run that differs or has a verdict that is not known, and each chunk whose tap had errors."""
    return [" ".join(map(str, (line["release"], line["subject"], *case))) for line in done(kind) for case in [
        *line.get("unknown", ()), *line.get("differing", ()),
        *([[line["seeds"], line["errors"], "errors of the tap"]] if line.get("errors") else [])]]


def table(kind: str) -> Iterator[str]:
    """All chunks of a kind, summed by release and subject."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for line in done(kind):
        total = sums.setdefault((line["release"], line["subject"]), Counter())
        total.update({name: line[name] for name in ("runs", "steps", "cpu_s")})
        total.update({name: len(line[name]) for name in ("unknown", "differing") if name in line})
        total["findings"] += sum(line.get("findings", {}).values())
    last = "runs with known findings | with others" if kind == "silent" else "scenarios that differ"
    yield (f"| release | {'connector | runs' if kind == 'silent' else 'tap at | scenarios'} | steps | CPU s "
           f"| {last} |")
    yield "|---" * (7 if kind == "silent" else 6) + "|"
    for (release, subject), total in sorted(sums.items()):
        result = f"{total['findings'] - total['unknown']} | {total['unknown']}"
        yield (f"| {release} | {subject} | {total['runs']:,} | {total['steps']:,} | {total['cpu_s']:.0f} | "
               f"{result if kind == 'silent' else total['differing']} |")


def main() -> int:
    """Run the chunks that are not done, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.explore_long", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--release", default="", help="a release beside the installed one")
    parser.add_argument("--seeds", default="0:340", metavar="A:B")
    parser.add_argument("--subject", action="append", help="only this connector, or this place of the tap")
    parser.add_argument("--for", dest="seconds", type=float, default=1e9, help="begin no chunk after so many seconds")
    options = parser.parse_args()
    if options.release and str(RELEASES / options.release) not in os.environ.get("PYTHONPATH", ""):
        os.execve(sys.executable, [sys.executable, "-W", "ignore", "-m", "tests.vllm.explore_long", *sys.argv[1:]],
                  beside(options.release))
    from kvbm_console.explore.vllm import Release

    first, last = map(int, options.seeds.split(":"))
    subjects = tuple(options.subject or KINDS[options.kind][1])
    explore(options.kind, Release(), subjects, range(first, last), options.seconds)
    print(*table(options.kind), *wrong(options.kind), sep="\n")
    return int(bool(wrong(options.kind)))


if __name__ == "__main__":
    sys.exit(main())
