"""A finding as a recording: its smallest scenario runs with the tap around the connector, and ends with the verdict.

The worker sends the tap's messages of each step. A leader of this process takes them on a clock of ``STEP_NS`` a step,
so the same scenario gives the same recording. A process that dies leaves the steps that it has sent.

Law of this file: the last event is the verdict.
"""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Note
from kvbm_console.explore.scenario import BLOCK
from kvbm_console.recording.output import Tape
from kvbm_console.reporter.translator import Watching
from kvbm_console.tap.sender import TapSettings

STEP_NS: Final = 10_000_000
"""A step of the scheduler, on the clock of the recording."""
DETAIL_CHARS_MAX: Final = 1_000
"""A longer sentence is cut; the issue text has the whole sentence."""


def record(answers: Iterable[dict[str, Any]], verdict: dict[str, Any], path: Path, name: str) -> Path:
    """Write the recording of a worker's answers. Raises ``UsageError`` when the path is taken."""
    stream = iter(answers)
    settings = msgspec.convert(next(stream)["settings"], TapSettings, str_keys=True)
    watch = Watching(settings, LeaderConfig(block_tokens=BLOCK, g2_blocks=0, g3_blocks=0))
    tape = Tape(watch.leader)
    watch.dispatcher.publish = tape.take
    watch.begin()
    for answer in stream:
        watch.now = answer["step"] * STEP_NS
        messages = msgspec.msgpack.decode(base64.b64decode(answer["messages"]))
        for message in messages:
            message[1] = watch.now
        watch.take(messages)
    watch.note(Note.VERDICT, f"{verdict['monitor']}: {verdict['sentence']}"[:DETAIL_CHARS_MAX])
    return tape.save(path, name, program="explore", label="explore")
