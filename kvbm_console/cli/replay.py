"""``kvbm-console replay``: the console on a recording, or the state at one of its events."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.cli.attach import explainer, what_if_searcher
from kvbm_console.cli.output import print_json
from kvbm_console.cli.params import FilePath, FloatRange, compiled, format_option, look_options
from kvbm_console.core.errors import UsageError

if TYPE_CHECKING:
    from kvbm_console.core.config import BreakpointSpec
    from kvbm_console.recording.reader import Recording


HITS_MAX: Final = 20_000
"""Hits to ask for, more than a person visits."""


@click.command()
@click.argument("path", metavar="DIR-or-FILE", type=FilePath(exists=True, path_type=Path))
@click.option("--at", "place", metavar="PLACE", help="Begin here: an event, 90s or -60s of the engine's time, end, a "
              "time of day such as 15:00:03 or 2026-11-21T15:00:00, or an exported page's link (#seq=237&slot=5).  "
              "[default: the end; with --speed the beginning]")
@click.option("--speed", type=FloatRange(0.001, 1e6), metavar="FACTOR",
              help="Play from there at once, N times as fast.")
@click.option("--follow", is_flag=True, help="The recording is still being written: begin at its end, go on with it.")
@click.option("--run", metavar="ID", help="Incarnation of the run to show.  [default: the last run]")
@format_option("console", "json")
@look_options
def replay(
    path: Path, place: str | None, speed: float | None, follow: bool, run: str | None, form: str, **look: Any
) -> None:
    """The console on a recording: play, pause, step and seek. It opens at the end, on the findings of the whole
    recording, the worst first, and a recording of `explore` at its verdict.

    Hits and holds of the recorded run are shown and do not wait. With --format json the state at the place is printed
    as the document of `status`.
    """
    from kvbm_console.recording.playback import Playback, RecordingFeed
    from kvbm_console.recording.positions import parse_position, seq_of, verdict_seq
    from kvbm_console.recording.reader import Recording

    position = None
    if place is not None:
        position = compiled("--at", lambda text: parse_position(text, utc=look["utc"]), place)
    recording = Recording.open(path, run)
    at_seq = None if position is None else seq_of(recording, position)
    if form == "json":
        if follow or speed is not None:
            raise UsageError("--format json prints one place: --follow and --speed have no meaning with it")
        print_json(state_document(recording, at_seq))
        return
    from kvbm_console.cli.output import require_terminal

    require_terminal("replay", "replay --format json")
    if place is None and not follow:
        at_seq = verdict_seq(recording)
    begins = at_seq is not None or speed is not None
    playback = Playback(recording, follow=follow)
    if at_seq is not None or follow or speed is None:
        playback.seek(recording.last_seq if at_seq is None else at_seq)
    if speed is not None:
        playback.set_speed(speed)
    if follow or speed is not None:
        playback.play()
    from tui.app import run_console
    from tui.desk import OVERVIEW, RECORD, SLOT
    from tui.source import TargetSession

    session = TargetSession(
        RecordingFeed(playback), None, playback, explain=explainer("--run", recording.incarnation, path=path),
        find_hits=hit_finder(path, recording.incarnation),
        what_if=what_if_searcher("--run", recording.incarnation, path=path),
    )
    request = None
    if position is not None and position.slot is not None:
        slot = recording.state_at(recording.last_seq if at_seq is None else at_seq).slots.get(position.slot)
        request = None if slot is None else slot.request
    view = SLOT if request is not None else OVERVIEW if begins or follow else RECORD
    raise SystemExit(run_console(session, view=view, request=request, **look))


def hit_finder(path: Path, run: str) -> "Callable[[Sequence[BreakpointSpec]], Awaitable[list[int]]]":
    """Tries breakpoints on a run of a recording in a process of its own: running it again must not stop the screen."""
    async def find(specs: "Sequence[BreakpointSpec]") -> list[int]:
        import tempfile

        from kvbm_console.cli.attach import document_of
        from kvbm_console.debug.files import write_specs

        with tempfile.TemporaryDirectory(prefix="kvbm-") as place:
            file = Path(place) / "breakpoints.json"
            write_specs(file, specs)
            found = await document_of(
                "break", "test", "--format", "json", "--show", str(HITS_MAX), "--file", str(file), "--on", str(path),
                "--run", run, statuses=(0, 1),
            )
        if found["failed"]:
            raise UsageError(f"the condition failed: {found['failed']}")
        return [int(hit["seq"]) - 1 for hit in found["first"]]

    return find


def state_document(recording: "Recording", at_seq: int | None) -> dict[str, object]:
    """The ``status`` document of the facts after event ``at``, by default the last. Raises ``RecordingError``."""
    from kvbm_console.stream.document import status_document

    state = recording.state_at(recording.last_seq if at_seq is None else at_seq)
    return status_document(
        state, at_ns=state.at_ns, incarnation=recording.incarnation, subscribers=0, recorder=None,
        thrash_window_ns=recording.config.thrash_window_ns,
    )
