"""``kvbm-console replay``: the console on a recording."""

from pathlib import Path

import click


@click.command()
@click.argument("path", metavar="DIR-or-FILE", type=click.Path(exists=True, path_type=Path))
@click.option("--at", "at_seq", type=click.IntRange(0), metavar="SEQ",
              help="Begin behind this event instead of at the start.")
def replay(path: Path, at_seq: int | None) -> None:
    """The console on a recording: play, pause, step and seek.

    Hits and holds of the recorded run are shown and do not wait.
    """
    from kvbm_console.cli.output import require_terminal
    from kvbm_console.recording.playback import Playback, RecordingFeed
    from kvbm_console.recording.reader import Recording

    recording = Recording.open(path)
    require_terminal("replay", "rec info")
    playback = Playback(recording)
    if at_seq is not None:
        playback.seek(at_seq)
    from tui.app import run_console
    from tui.source import Session

    run_console(Session(RecordingFeed(playback), None, playback))
