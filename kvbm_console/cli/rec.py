"""``kvbm-console rec``: work on recordings.

Law of this file: results go to stdout and progress to stderr. A check that found something exits 1, and a file that
cannot be read exits 2 with one sentence.
"""

import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kvbm_console.cli import recorder
from kvbm_console.cli.ask import RUN
from kvbm_console.cli.output import duration, number, print_json, print_lines, print_result, progress, table
from kvbm_console.cli.params import FilePath, compiled, filter_option, format_option
from kvbm_console.cli.rec_diff import diff_command
from kvbm_console.cli.streams import capture, import_group
from kvbm_console.core.printable import json_text
from kvbm_console.simulator.machine import LABEL, SimulatedMachine

if TYPE_CHECKING:
    from kvbm_console.analysis.export import Exported
    from kvbm_console.recording.info import EngineInfo, RecordingInfo
    from kvbm_console.recording.recover import Recovered
    from kvbm_console.recording.verify import VerifyReport

RECORDING: Final = click.argument("path", metavar="DIR-or-FILE", type=FilePath(path_type=Path))
DIRECTORY: Final = click.argument("directory", metavar="DIR", type=FilePath(path_type=Path, file_okay=False))


class Indexed(msgspec.Struct, frozen=True):
    """A file that ``rec index`` made whole."""

    segment: str
    done: str
    """``indexed`` or ``sealed``."""
    bytes: int
    """Size of the file afterwards."""
    last_seq: int | None = None
    """The last event of a file that was indexed again, else null."""
    lost_bytes: int = 0
    """Damaged bytes that were cut off."""


@click.group()
def rec() -> None:
    """Work on recordings.

    A recording promises that kill -9 loses no event up to written_seq and a power loss none up to synced_seq. Both
    are shown by status and in every console.
    """


rec.add_command(capture)


@rec.command()
@RECORDING
@click.option("--run", metavar="ID", help="The run to look at, by its incarnation; without it the last run.")
@format_option("text", "json")
def info(path: Path, run: str | None, form: str) -> None:
    """Show the content of a recording: events, requests, engines, gaps, versions, time, sizes."""
    from kvbm_console.recording.info import info_of
    from kvbm_console.recording.reader import Recording

    found = info_of(Recording.open(path, run))
    print_result(form, found, lambda: _info_lines(found))


@rec.command()
@RECORDING
@format_option("text", "json")
@click.pass_context
def verify(ctx: click.Context, path: Path, form: str) -> None:
    """Fold the events, check every invariant, and rerun the stimuli through today's leader.

    Every run of a directory is verified. Exit 0 when all is equal and whole. Exit 1 with the first difference of
    each run, with segments removed from a run, and with earlier segments that cannot be read.
    """
    from kvbm_console.recording.verify import verify as verify_recording

    report = verify_recording(path, progress())
    if form == "json":
        print_json(report)
    else:
        for one in (*report.earlier, report):
            if report.earlier:
                click.echo(f"run {one.run}")
            print_lines(_report_lines(one))
    ctx.exit(0 if report.ok else 1)


@rec.command()
@DIRECTORY
@click.option("--salvage", is_flag=True,
              help="Keep every whole frame of a damaged segment and put a gap where bytes were cut out; the damaged "
                   "file stays beside it as .damaged.")
@format_option("text", "json")
def recover(directory: Path, salvage: bool, form: str) -> None:
    """Make a recording whole after its daemon was killed: cut torn tails off, refuse damage."""
    from kvbm_console.recording.recover import recover_directory

    with _locked(directory):
        results = recover_directory(directory, salvage=salvage, progress=progress())
    document = [_recovered_document(segment) for segment in results]
    print_result(form, document, lambda: [*map(_recovered_line, results)] or [
        "nothing to recover: no segment is active"])


@rec.command()
@DIRECTORY
@format_option("text", "json")
def index(directory: Path, form: str) -> None:
    """Seal segments that were left active, and give sealed segments their missing or damaged index again.

    A sealed file is compared with its source before the source is removed. A file that could not be kept whole
    stays beside its successor as .damaged.
    """
    from kvbm_console.recording.recover import needs_index, rebuild_index, recover_directory
    from kvbm_console.recording.seal import seal_segment

    tell = progress()
    done_to: list[Indexed] = []
    with _locked(directory):
        without = [path for path in sorted(directory.glob("*.mcap")) if needs_index(path)]
        for path in without:
            made = rebuild_index(path)
            done_to.append(Indexed(path.name, "indexed", path.stat().st_size, made.last_seq, made.lost_bytes))
            if form == "text":
                lost = f"; {number(made.lost_bytes)} damaged bytes behind it are lost" if made.lost_bytes else ""
                click.echo(f"{path.name}  indexed again up to event {number(made.last_seq)}{lost}")
        left = [one.path for one in recover_directory(directory) if one.outcome in ("whole", "truncated")]
        for done, path in enumerate(left):
            tell("seal", done, len(left))
            before = path.stat().st_size
            sealed = seal_segment(path)
            done_to.append(Indexed(sealed.name, "sealed", sealed.stat().st_size))
            if form == "text":
                click.echo(f"{sealed.name}  {number(before)} bytes sealed into {number(sealed.stat().st_size)}")
    if form == "json":
        print_json(done_to)
    elif not done_to:
        click.echo("nothing to do: every segment is sealed and indexed")


@rec.command()
@RECORDING
@click.argument("target", metavar="FILE.mcap-or-DIR", type=FilePath(path_type=Path))
@click.option("--from", "begin", metavar="PLACE", help="Begin here: an event, 90s or -60s of the engine's time, a "
              "time of day such as 15:00:03 or 2026-11-21T15:00:00.")
@click.option("--to", "end", metavar="PLACE", default="end", show_default=True, help="End here.")
@click.option("--request", metavar="GLOB", help="The stretch that holds everything about these requests.")
@click.option("--where", metavar="EXPRESSION", help="The stretch that holds all events for which this holds.")
@click.option("--run", metavar="ID", help="The run to cut, by its incarnation; without it the last run.")
@format_option("text", "json")
def cut(
    path: Path, target: Path, begin: str | None, end: str, request: str | None, where: str | None, run: str | None,
    form: str,
) -> None:
    """Write a stretch of a recording to a new file or directory, with the keyframe that it needs.

    --request and --where choose the shortest stretch that holds all matching events, within --from and
    --to. Events between them stay, because a recording with holes does not fold.
    """
    from kvbm_console.core.expression import compile_event_filter
    from kvbm_console.recording import cut as cutting
    from kvbm_console.recording.positions import parse_position, seq_of
    from kvbm_console.recording.reader import Recording

    if request == "":
        raise click.UsageError("--request must be a pattern of names, got ''")
    if where is not None:
        compiled("--where", compile_event_filter, where)
    if request is not None:
        compiled("--request", lambda glob: cutting.matcher(None, glob), request)
    begins = None if begin is None else compiled("--from", parse_position, begin)
    ends = compiled("--to", parse_position, end)
    recording = Recording.open(path, run)
    first = recording.first_seq if begins is None else seq_of(recording, begins, following=True)
    last = seq_of(recording, ends)
    matches = cutting.matcher(where, request)
    if matches is not None:
        first, last = cutting.stretch(recording, max(first, recording.first_seq), last, matches)
    made = cutting.cut(recording, first, last, target)
    recorder.print_made(form, made, "" if made.complete else "; state replay only")


for _command in (
    recorder.start, recorder.stop, recorder.rotate, recorder.status, recorder.dump, diff_command, import_group,
):
    rec.add_command(_command)


# --- helpers ---------------------------------------------------------------------------------------------------------


class _locked:
    """The right to write in a recording directory. Raises ``UsageError`` when a daemon records there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        from kvbm_console.core.errors import UsageError
        from kvbm_console.recording.files import DirectoryLock

        if not self._directory.is_dir():
            raise UsageError(f"{self._directory} is not a directory")
        self._lock = DirectoryLock(self._directory)

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def _info_lines(info: "RecordingInfo") -> list[str]:
    rows = [
        ("run", f"{info.incarnation} ({len(info.runs)} in the directory)" if len(info.runs) > 1
         else info.incarnation),
        ("events", f"{number(info.events)}, {number(info.first_seq)} to {number(info.last_seq)}"),
        ("stimuli", number(info.stimuli)),
        ("requests", number(info.requests)
         + (f", {number(info.live_requests)} live at its end" if info.live_requests else "")),
        ("engines", "; ".join(map(_engine_words, info.engines)) or "none"),
        ("time", f"{duration(info.last_ns - info.first_ns)} of the engine"),
        ("keyframes", number(info.keyframes)),
        ("gaps", number(len(info.gaps))),
        ("size", f"{number(info.bytes)} bytes"
         + (f", {info.bytes_per_event} an event" if info.bytes_per_event is not None else "")),
        ("versions", f"format {info.versions.format}, {info.versions.wire}, program {info.versions.program or '–'}"),
        ("state", "closed" if info.finished else "still being written, or its daemon was killed"),
    ]
    rows += [(key, value) for key, value in info.labels.items() if key != LABEL]
    machine = SimulatedMachine.of_labels(info.config, info.labels)
    if machine is not None:
        rows.append(("machine", machine.describe()))
    lines = [f"{name:<10} {value}" for name, value in rows]
    lines += [
        f"{'gap':<10} {number(gap.first)} to {number(gap.last)}, {number(gap.count)} events: {gap.reason}"
        for gap in info.gaps
    ]
    lines += [f"{'unreadable':<10} {name}: {error}" for name, error in info.unreadable.items()]
    lines.append("")
    lines += table(
        ["segment", "sealed", "first", "last", "bytes", "torn"],
        [
            [segment.path, "yes" if segment.sealed else "no", number(segment.first_seq), number(segment.last_seq),
             number(segment.bytes), number(segment.torn_bytes)]
            for segment in info.segments
        ],
        right=(2, 3, 4, 5),
    )
    return lines


def _engine_words(engine: "EngineInfo") -> str:
    blocks = "blocks of" if engine.capacity_blocks is None else f"{number(engine.capacity_blocks)} blocks of"
    ranks = f", {engine.dp_ranks} data-parallel ranks" if engine.dp_ranks > 1 else ""
    stream = {"observed": ", its tap", "stream": ", its event stream"}.get(engine.authority, "")
    return f"{engine.source}: {blocks} {engine.block_tokens} tokens{ranks}{stream}"


def _report_lines(report: "VerifyReport") -> list[str]:
    from kvbm_console.analysis.lints.lint import plural

    lines = [
        f"folded {plural(report.events, 'event')} through {plural(report.keyframes, 'keyframe')} with "
        f"{plural(report.audits, 'audit')}, reran {number(report.stimuli)} stimuli",
    ]
    if report.gaps:
        are = "is" if report.missing == 1 else "are"
        lines.append(f"{plural(report.missing, 'event')} {are} missing in {plural(report.gaps, 'gap')}")
    if report.not_folded or (report.not_rerun and not report.older):
        lines.append(
            f"not compared, for want of a keyframe: {number(report.not_folded)} events, "
            f"{number(report.not_rerun)} stimuli"
        )
    if report.unknown:
        lines.append(f"{number(report.unknown)} events of kinds of a newer version were passed over")
    if report.older:
        lines.append(f"state replay only: leaders of format {report.older} decided by other rules")
    elif not report.decisions:
        lines.append("state replay only: it holds no stimuli that can be rerun")
    lines += report.findings
    if report.first_difference is not None:
        lines.append(f"first difference: {report.first_difference}")
    else:
        lines.append("the present events are equal" if report.findings else "equal")
    return lines


def _recovered_line(segment: "Recovered") -> str:
    from kvbm_console.analysis.lints.lint import plural

    what = {
        "whole": "is whole",
        "truncated": f"ends behind event {number(segment.next_seq - 1)}; {number(segment.torn_bytes)} torn bytes were "
        "cut off",
        "removed": "was empty, or sealed already, and is gone",
        "busy": "is being written or sealed",
        "set_aside": "has a damaged header; it stays beside the recording as .damaged",
        "salvaged": f"was salvaged up to event {number(segment.next_seq - 1)} with {plural(len(segment.gaps), 'gap')}: "
        + ", ".join(f"{plural(gap.count, 'event')}, {number(gap.bytes)} bytes" for gap in segment.gaps),
    }
    return f"{segment.path.name}  {what.get(segment.outcome, segment.outcome)}"


def _recovered_document(segment: "Recovered") -> dict[str, object]:
    return {
        "segment": segment.path.name, "outcome": segment.outcome, "torn_bytes": segment.torn_bytes,
        "first_seq": segment.first_seq, "last_seq": segment.next_seq - 1, "gaps": list(segment.gaps),
    }





@rec.command("export")
@click.argument("path", metavar="DIR-or-FILE", type=FilePath(exists=True, path_type=Path))
@click.option("--to", "to", type=click.Choice(["jsonl", "chrome", "perfetto", "parquet", "html", "mooncake"]),
              required=True,
              help="jsonl has events for scripts, chrome and perfetto traces for a viewer, parquet tables for SQL, "
                   "html one page to send, mooncake the requests as a trace for simulators.")
@click.option("--out", type=FilePath(path_type=Path), metavar="FILE",
              help="The file to write; parquet makes a directory. jsonl goes to stdout without it.")
@RUN
@click.option("--anonymize", is_flag=True, help="Hash the names of requests, sessions and clients in every field.")
@filter_option("With --to jsonl: only events for which this holds, as 'kind = SlotMoved and to = preempted'.")
@format_option("text", "json")
def export_command(
    path: Path, to: str, out: Path | None, run: str | None, anonymize: bool, expression: str, form: str
) -> None:
    """Write a recording for other programs.

    perfetto opens in ui.perfetto.dev: a track for each slot with its states, lanes for copies, flows from plan to
    copy to end, counters for tiers. parquet is a directory of tables: requests, states, holds, transfers, tiers,
    engine, events, gaps. Both need an extra of the package; the others need no extra. html is one page of at most
    100,000 events, which works without a network.
    """
    from kvbm_console.analysis.export import export, write_lines
    from kvbm_console.analysis.walk import evidence_of
    from kvbm_console.recording.reader import Recording

    wanted = None
    if expression:
        from kvbm_console.core.expression import compile_event_filter

        if to != "jsonl":
            raise click.UsageError(f"--filter chooses events for --to jsonl, not for {to}; rec cut --where cuts")
        wanted = compiled("--filter", compile_event_filter, expression)
    if to == "mooncake" and out is not None:
        made = _mooncake(path, run, out)
        print_result(form, made, lambda: [f"{made.path}  {number(made.items)} requests, {number(made.bytes)} bytes"])
        return
    evidence = evidence_of(Recording.open(path, run))
    if anonymize:
        from kvbm_console.analysis.anonymous import anonymous

        evidence = anonymous(evidence)
    if out is None:
        if to != "jsonl":
            raise click.UsageError(f"--to {to} needs --out")
        write_lines(evidence, sys.stdout.buffer, progress(), wanted)
        sys.stdout.buffer.flush()
        return
    made = export(evidence, to, out, progress(), wanted)
    what = {"jsonl": "lines", "chrome": "trace events", "perfetto": "packets", "parquet": "rows",
            "html": "events"}[to]
    print_result(form, made, lambda: [f"{made.path}  {number(made.items)} {what}, {number(made.bytes)} bytes"])


def _mooncake(path: Path, run: str | None, out: Path) -> "Exported":
    from kvbm_console.analysis.export import written
    from kvbm_console.planning.mooncake import write_mooncake
    from kvbm_console.planning.recorded import read_run

    load = read_run(f"{path}" + (f",run={run}" if run else ""))

    def write(draft: Path) -> int:
        with draft.open("xb") as file:
            return write_mooncake(load, file)

    return written("mooncake", out, write)


@rec.command()
@click.argument("paths", metavar="DIR-or-FILE...", nargs=-1, required=True, type=FilePath(path_type=Path))
@click.option("--out", metavar="FILE.mcap|DIR", type=FilePath(path_type=Path),
              help="Write one recording instead of lines: the facts of all side by side, for every other command.")
@click.option("--where", metavar="EXPRESSION", help="Only events for which this holds; gaps are always printed.")
@click.option("--format", "form", type=click.Choice(["text", "jsonl", "json"]), default="text", show_default=True,
              help="Form of the events; json describes the file of --out.")
def merge(paths: tuple[Path, ...], out: Path | None, where: str | None, form: str) -> None:
    """Put several recordings into one order, by the wall's clock: as lines, or with --out as one recording.

    The order between recordings is as good as the clocks of their machines agree. All runs of a directory are read.
    In one recording, requests and owners carry the name of their source in front. It holds facts and events, so the
    state replays and decisions do not.
    """
    from kvbm_console.core.errors import UsageError

    if out is None:
        if form == "json":
            raise UsageError("--format json tells of a file: it needs --out")
        print_lines(lines_of(paths, where, form=form))
        return
    if where is not None:
        raise UsageError("--where chooses lines, and a recording with holes does not fold; 'rec cut' makes a stretch")
    if form == "jsonl":
        raise UsageError("--format jsonl prints events: it has no meaning with --out")
    from kvbm_console.cli.output import program_version
    from kvbm_console.recording.merge import merge as merge_recordings
    from kvbm_console.recording.merge import sources_of

    made = merge_recordings(sources_of(paths), out, program_version())
    recorder.print_made(form, made, clock="")


def lines_of(paths: Sequence[Path], where: str | None, *, form: str) -> Iterator[str]:
    """One line for every event and gap. Raises ``UsageError`` and ``RecordingError``."""

    from kvbm_console.core.describe import describe, kind
    from kvbm_console.core.errors import UsageError
    from kvbm_console.core.expression import compile_event_filter
    from kvbm_console.recording.format import Gap
    from kvbm_console.recording.merge import RECORDINGS_MAX, merged, sources_of
    from kvbm_console.stream.document import event_document

    if len(paths) > RECORDINGS_MAX:
        raise UsageError(f"at most {RECORDINGS_MAX} recordings are merged, got {len(paths)}")
    matches = None if where is None else compiled("--where", compile_event_filter, where)
    sources = sources_of(paths)
    width = max(len(source.name) for source in sources)
    for one in merged([source.recording for source in sources]):
        item, name = one.what, sources[one.source].name
        if isinstance(item, Gap):
            if form == "jsonl":
                head = {"wall_ns": one.wall_ns, "recording": name, "gap": item}
                yield json_text(head)
            else:
                yield f"{_wall(one.wall_ns)}  {name:<{width}}  {item.first:>10,}  {item.count:,} events are missing"
        elif matches is None or matches(item, None):
            if form == "jsonl":
                document = {"wall_ns": one.wall_ns, "recording": name, **event_document(item)}
                yield json_text(document)
            else:
                yield f"{_wall(one.wall_ns)}  {name:<{width}}  {item.seq:>10,}  {kind(item)} {describe(item)}"


def _wall(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000:06d}Z"
