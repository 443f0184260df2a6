"""``kvbm-console explore``: search an engine and its KV connector for races, deadlocks and leaks.

Law of this file: findings are told and written also when the search is interrupted.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.cli.main import EXIT_INTERRUPTED, terminable
from kvbm_console.cli.output import number, print_result, progress_line, warn
from kvbm_console.cli.params import Duration, FilePath, format_option, options
from kvbm_console.core.config import SECOND_NS
from kvbm_console.core.errors import UsageError
from kvbm_console.explore.connector_faults import CONNECTOR_FAULTS
from kvbm_console.explore.scenario import PROFILES_OF
from kvbm_console.explore.shadow import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbm_console.explore.search import ExploreFinding, SearchReport

EXIT_FOUND: Final = 1
OFFLOADING: Final = '{"kv_connector": "OffloadingConnector"}'
FOR: Final = Duration(SECOND_NS, 7 * 86_400 * SECOND_NS, "from 1s to 168h")
SEEDS_MAX: Final = 2**40


class Seeds(click.ParamType):  # type: ignore[type-arg]
    """``A:B``, the seeds from A up to, not including, B."""

    name = "seeds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        """The range. Any other text fails with one sentence."""
        first, colon, last = str(value).partition(":")
        digits = first.isascii() and first.isdigit() and last.isascii() and last.isdigit()
        if not colon or not digits or not int(first) < int(last) <= SEEDS_MAX:
            raise UsageError(f"--seeds must be A:B with 0 <= A < B <= {SEEDS_MAX}, got {value!r}")
        return range(int(first), int(last))


@click.group("explore")
def explore() -> None:
    """Search an engine and its KV connector for races, deadlocks and leaks."""


def search_options(engine: str) -> "Callable[[Callable[..., int]], Callable[..., int]]":
    """The options that every search has."""
    return options(
        click.option("--seeds", type=Seeds(), metavar="A:B",
                     help="Run each profile with these seeds, and nothing else."),
        click.option("--for", "for_ns", type=FOR, default="60s", show_default=True, metavar="DURATION",
                     help="How long to search without --seeds."),
        click.option("--profile", "profiles", multiple=True, type=click.Choice(PROFILES_OF[engine]),
                     help="The kind of load; repeat for more.  [default: all]"),
        click.option("--workers", type=int, default=None, metavar="N",
                     help="Processes.  [default: as many as cores]"),
        click.option("--first", "first_only", is_flag=True, help="End with the first finding."),
        click.option("--out", type=FilePath(path_type=Path, file_okay=False), metavar="DIR",
                     help="Write a scenario, a pytest file, an issue text and a recording for each finding."),
        format_option("text", "json"),
    )


@explore.command("vllm")
@click.option("--connector", default=OFFLOADING, show_default=True, metavar="JSON",
              help="The connector, as in vLLM's --kv-transfer-config.")
@click.option("--fault", "faults", multiple=True, type=click.Choice([*FAULTS, *CONNECTOR_FAULTS]), metavar="NAME",
              help="Plant this fault, to see that it is found; repeat for more.")
@click.option("--adapter", "adapters", multiple=True, metavar="MODULE:CLASS",
              help="Our worker's half of a connector of your own; repeat for more. REFERENCE.md describes it.")
@click.option("--python", default=None, metavar="FILE",
              help="The interpreter in whose environment vLLM is installed.  [default: this interpreter]")
@search_options("vllm")
@terminable()
def explore_vllm(
    connector: str, faults: tuple[str, ...], adapters: tuple[str, ...], python: str | None, **options: Any
) -> int:
    """Drive vLLM's scheduler and connector through random work, without GPU and weights.

    The scheduler and the connector are vLLM's own. The worker copies blocks in a shadow memory, at random moments
    between order and report. Exit status 1 says that something was found.
    """
    return _search(_connector(connector), faults, engine="vllm", adapters=adapters, python=python or sys.executable,
                   **options)


@explore.command("leader")
@click.option("--fault", "faults", multiple=True, metavar="NAME",
              help="Plant this fault, to see that it is found; repeat for more. REFERENCE.md lists them.")
@search_options("leader")
@terminable()
def explore_leader(faults: tuple[str, ...], **options: Any) -> int:
    """Drive this program's own leader and embedded engine through random work, under the same monitors.

    Machines, policies, loads, resets and failing copies are random. Exit status 1 says that something was found.
    """
    from kvbm_console.explore.leader_faults import FAULTS as LEADER_FAULTS

    for name in faults:
        if name not in LEADER_FAULTS:
            raise UsageError(f"--fault must be one of {', '.join(LEADER_FAULTS)}, got {name!r}")
    return _search({"kv_connector": "leader"}, faults, engine="leader", python=sys.executable, **options)


def _search(
    entry: dict[str, Any], faults: tuple[str, ...], *, engine: str, python: str, seeds: range | None, for_ns: int,
    profiles: tuple[str, ...], workers: int | None, first_only: bool, out: Path | None, form: str,
    adapters: tuple[str, ...] = (),
) -> int:
    from kvbm_console.explore.report import write
    from kvbm_console.explore.search import Search

    count = workers if workers is not None else os.cpu_count() or 1
    if not 1 <= count <= 256:
        raise UsageError(f"--workers must be from 1 to 256, got {count}")
    if out is not None:
        _make(out)
    search = Search(
        connector=entry, engine=engine, profiles=profiles or PROFILES_OF[engine], faults=faults, adapters=adapters,
        seeds=seeds, processes=count, seconds=for_ns / SECOND_NS, first_only=first_only, tell=_progress(),
        python=python,
    )
    report = search.run()
    if report.findings:
        warn("making the findings small; ctrl-c keeps them as they are")
        search.shrink(report)
    places = {} if out is None else {
        finding.signature: write(out, report, finding, entry, faults, engine) for finding in report.findings.values()
    }
    if places:
        search.record(report, {signature: place / "recording.mcap" for signature, place in places.items()})
    print_result(form, document(report, places), lambda: lines(report, places))
    return EXIT_FOUND if report.findings else EXIT_INTERRUPTED if report.interrupted else 0


def _make(out: Path) -> None:
    """Make the directory of the findings, if it is not there, before they are searched for."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(f"--out must be a directory to write into, got {str(out)!r}: {error.strerror}") from None


def _connector(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--connector must be JSON, as vLLM's --kv-transfer-config takes it: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("kv_connector"), str):
        raise UsageError(f"--connector must be an object with the key \"kv_connector\", got {text[:80]!r}")
    return entry


def _progress() -> "Callable[[SearchReport], None]":
    """Shows the progress of a search on stderr."""
    say = progress_line()

    def line(report: "SearchReport") -> str:
        speed = report.steps / report.cpu_s if report.cpu_s else 0.0
        return (f"explore: {number(report.runs)} runs, {number(round(speed))} steps a second and core, "
                f"{len(report.pairs)} (state, event) pairs, {len(report.findings)} found")

    return lambda report: say(lambda: line(report))


def lines(report: "SearchReport", places: dict[str, Path]) -> list[str]:
    """The report for people."""
    if report.interrupted and not report.release:
        return ["interrupted while the engine was imported: no run was begun"]
    speed = f", {number(round(report.steps / report.cpu_s))} steps a second and core" if report.cpu_s else ""
    text = [
        f"{report.release}: {number(report.runs)} runs, {number(report.steps)} scheduler steps in {report.cpu_s:.1f} s "
        f"of CPU time{speed}",
        f"{number(report.reads)} block reads checked, {number(report.moved_blocks)} blocks copied, "
        f"{len(report.pairs)} (state, event) pairs seen",
    ]
    text += [f"{number(count)} runs left out, because the engine refuses the machine: {reason}"
             for reason, count in report.skipped.items()]
    if report.interrupted:
        text.append("interrupted; these are the findings until then")
    if not report.findings:
        text.append("nothing found")
    for finding in report.findings.values():
        text += ["", *_finding(finding)]
        if finding.signature in places:
            recording = ", recording.mcap" if finding.recording is not None else ""
            text.append(f"  written to {places[finding.signature]}: scenario.json, test_reproduction.py, issue.md"
                        f"{recording}")
        if finding.unrecorded:
            text.append(f"  not recorded: {finding.unrecorded}")
    return text


def _finding(finding: "ExploreFinding") -> list[str]:
    from kvbm_console.explore.report import story

    scenario = finding.scenario
    how = "smallest scenario" if finding.shrunk else "scenario as it was found"
    return [
        f"FOUND {finding.signature}",
        f"  {finding.verdict['sentence']}",
        f"  {finding.times} times; first after {finding.cpu_s:.1f} s of CPU time, profile {finding.profile}, seed "
        f"{finding.seed}",
        f"  {how}: {len(scenario.actions)} actions, {finding.verdict['step']} scheduler steps, "
        f"{scenario.device_blocks} device blocks, {scenario.host_blocks} host blocks, at most {scenario.max_running} "
        f"running, {scenario.batch_tokens} tokens a step, copies {list(scenario.copies)}",
        *[f"    {story(action)}" for action in scenario.actions],
    ]


def document(report: "SearchReport", places: dict[str, Path]) -> dict[str, Any]:
    """The report for programs."""
    return {
        "release": report.release, "runs": report.runs, "steps": report.steps, "block_reads": report.reads,
        "copied_blocks": report.moved_blocks, "cpu_s": round(report.cpu_s, 3), "pairs": len(report.pairs),
        "left_out": dict(report.skipped), "interrupted": report.interrupted,
        "findings": [
            {
                "signature": finding.signature, "monitor": finding.verdict["monitor"],
                "sentence": finding.verdict["sentence"], "step": finding.verdict["step"], "times": finding.times,
                "profile": finding.profile, "seed": finding.seed, "cpu_s": round(finding.cpu_s, 3),
                "shrunk": finding.shrunk, "scenario": json.loads(finding.scenario.to_json()),
                "directory": str(places[finding.signature]) if finding.signature in places else None,
                "recording": None if finding.recording is None else str(finding.recording),
            }
            for finding in report.findings.values()
        ],
    }
