"""``kvbm-console rec merge``: several recordings in one order, as one recording or as lines.

Law of this file: a JSON line is the document of ``tail`` with ``wall_ns`` and ``recording`` in front.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from kvbm_console.cli.output import duration, json_text, number, print_json, print_lines


@click.command()
@click.argument("paths", metavar="DIR-or-FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", metavar="FILE.mcap|DIR", type=click.Path(path_type=Path),
              help="Write one recording instead of lines: the facts of all side by side, for every other command.")
@click.option("--where", metavar="EXPRESSION", help="Only lines of events this is true of; gaps are always told.")
@click.option("--format", "form", type=click.Choice(["text", "jsonl", "json"]), default="text", show_default=True,
              help="How to print an event; json is for what --out has written.")
def merge(paths: tuple[Path, ...], out: Path | None, where: str | None, form: str) -> None:
    """Put several recordings into one order, by the wall's clock: as lines, or with --out as one recording.

    The order between recordings is as good as the clocks of their machines agree. All runs of a directory are read. In
    one recording, requests and owners carry the name of their source in front; it holds facts and events, so the state
    replays and decisions do not.
    """
    from kvbm_console.core.errors import UsageError

    if out is None:
        if form == "json":
            raise UsageError("--format json tells of a file: it needs --out")
        print_lines(lines_of(paths, where, form=form))
        return
    if where is not None:
        raise UsageError("--where chooses lines: a recording with holes does not fold; 'rec cut' makes a stretch")
    if form == "jsonl":
        raise UsageError("--format jsonl prints events: it has no meaning with --out")
    from kvbm_console.cli.versions import program_version
    from kvbm_console.recording.merge import sources_of
    from kvbm_console.recording.merge_file import merge as merge_recordings

    made = merge_recordings(sources_of(paths), out, program_version())
    if form == "json":
        print_json(made)
        return
    click.echo(f"{made.path}  events {number(made.first_seq)} to {number(made.last_seq)}, "
               f"{duration(made.last_ns - made.first_ns)}, {number(made.bytes)} bytes; state replay only")


def lines_of(paths: Sequence[Path], where: str | None, *, form: str) -> Iterator[str]:
    """One line for every event and gap. Raises ``UsageError`` and ``RecordingError``."""

    from kvbm_console.core.describe import describe, kind
    from kvbm_console.core.errors import UsageError
    from kvbm_console.core.expression import compile_event_filter
    from kvbm_console.recording.format import Gap
    from kvbm_console.recording.merge import RECORDINGS_MAX, merged, sources_of
    from kvbm_console.stream.event_document import event_document

    if len(paths) > RECORDINGS_MAX:
        raise UsageError(f"at most {RECORDINGS_MAX} recordings are merged, got {len(paths)}")
    matches = None if where is None else compile_event_filter(where)
    sources = sources_of(paths)
    width = max(len(source.name) for source in sources)
    for one in merged([source.recording for source in sources]):
        what, name = one.what, sources[one.source].name
        if isinstance(what, Gap):
            if form == "jsonl":
                head = {"wall_ns": one.wall_ns, "recording": name, "gap": what}
                yield json_text(head)
            else:
                yield f"{_wall(one.wall_ns)}  {name:<{width}}  {what.first:>10,}  {what.count:,} events are missing"
        elif matches is None or matches(what, None):
            if form == "jsonl":
                document = {"wall_ns": one.wall_ns, "recording": name, **event_document(what)}
                yield json_text(document)
            else:
                yield f"{_wall(one.wall_ns)}  {name:<{width}}  {what.seq:>10,}  {kind(what)} {describe(what)}"


def _wall(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1_000:06d}Z"
