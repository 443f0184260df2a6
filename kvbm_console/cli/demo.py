"""``kvbm-console demo``: leader, simulated engine and console in one command and one process.

Law of this file: daemon and console share one event loop and meet over the demo's own socket, as they would in two
processes. The engine runs in slices of at most 2 ms, so it never stalls the screen.
"""

import shlex
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvbm_console.addresses import socket_address
from kvbm_console.cli.attach import show
from kvbm_console.cli.machine import daemon_options, workload_options
from kvbm_console.cli.output import require_terminal, warn
from kvbm_console.cli.params import DEMO_SOCKET, FloatRange, format_option, look_options
from kvbm_console.core.errors import UsageError
from kvbm_console.recording.options import RecordingOptions
from kvbm_console.simulator.incident import SCENARIOS

SEGMENT_BYTES: Final = 8_000_000
KEEP_BYTES: Final = 64_000_000
"""Bounds of the recording that the demo keeps by itself: some hours of its events, then the oldest go."""


@click.command()
@click.option("--scenario", type=click.Choice(list(SCENARIOS)),
              help="What goes wrong: a copy that a rank never reports, a host tier that is too small, a queue behind "
                   "one prompt, lost events, nothing, or several of these in turn.  [default: incident]")
@click.option("--tour", is_flag=True, help="Explain the incident on the screen, a sentence and a key at a time.")
@click.option("--workload", metavar="SPEC",
              help="mooncake:FILE or multiturn[:key=value,...] in place of a scenario.")
@click.option("--no-record", is_flag=True,
              help=f"Keep no recording. Without it and --record the last {KEEP_BYTES // 10**6} MB of all demos stay in "
                   "the state directory of this user.")
@click.option("--seconds", type=FloatRange(0, 1e6, min_open=True), metavar="N",
              help="End after N seconds.  [default: 30 without a terminal]")
@format_option("text", "json")
@workload_options
@look_options
def demo(
    scenario: str | None, tour: bool, workload: str | None, no_record: bool, record: Path | None,
    seconds: float | None, form: str, theme: str | None, ascii: bool, no_color: bool, utc: bool, **machine: Any,
) -> None:
    """The console on a simulated engine, all in one command.

    Without a terminal it prints a line each second and a summary at the end. Other commands reach it at
    --target unix:.../demo.sock, which is shown.
    """
    if scenario is not None and workload is not None:
        raise UsageError(f"--scenario and --workload both say what is served, got {scenario} and {workload}")
    if no_record and record is not None:
        raise UsageError(f"--no-record and --record exclude each other, got --record {record}")
    first = next(iter(SCENARIOS))
    if tour:
        if (scenario or first) != first or workload is not None:
            raise UsageError(f"--tour explains the scenario {first}, got {scenario or workload}")
        require_terminal("demo --tour", "demo")
    shown = SCENARIOS[scenario or first] if workload is None else None
    place = None if no_record else record or state_directory()
    recording = RecordingOptions()
    if record is None:
        recording = RecordingOptions(segment_bytes=SEGMENT_BYTES, keep_bytes=KEEP_BYTES)
    if shown is not None:
        recording = msgspec.structs.replace(recording, queue_bytes=shown.queue_bytes)
    options = daemon_options(
        workload=workload, scenario=shown, listen=socket_address(DEMO_SOCKET), record=place, recording=recording,
        **machine,
    )
    show(options, seconds, form, "demo", goodbye(place, kept=record is None), tour=tour,
         theme=theme, ascii=ascii, no_color=no_color, utc=utc)


def state_directory() -> Path | None:
    """The directory of the demo's recordings; None, with a word on stderr, where it cannot be made."""
    import platformdirs

    place = platformdirs.user_state_path("kvbm-console") / "demo"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"no recording is kept: cannot write to {place} ({error.strerror}); --record names another place")
        return None
    return place


def goodbye(place: Path | None, *, kept: bool) -> list[str]:
    """Three commands to try next; with a recording two of them are about it."""
    own = "to watch your own engine:   kvbm-console attach http://HOST:8000"
    if place is None:
        return [
            own, "to have it explained:       kvbm-console demo --tour",
            "to record a run:            kvbm-console serve --workload multiturn --record run/",
        ]
    named = shlex.quote(str(place))
    bound = f" (the last {KEEP_BYTES // 10**6} MB of all demos)" if kept else ""
    return [
        f"to go back in time in it:   kvbm-console replay {named}{bound}",
        f"to hear what was wrong:     kvbm-console doctor {named}", own,
    ]
