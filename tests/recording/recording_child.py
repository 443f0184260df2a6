"""A process that records until it is killed: ``recording_child.py DIRECTORY SEED``.

After every flush it tells on stdout, in eight bytes, the last event that a kill can no longer take.
"""

import os
import random
import sys
from pathlib import Path

from kvbm_console.recording.writer import Recorder
from tests.recording.helpers import Log, recorder_of


def acknowledged(recorder: Recorder) -> None:
    """One watermark, in one write."""
    os.write(1, recorder.written_seq.to_bytes(8, "little", signed=True))


def main(directory: Path, seed: int) -> None:
    """Record for ever."""
    dice = random.Random(seed)
    log = Log()
    recorder = recorder_of(
        log, directory, segment_bytes=200_000, keyframe_events=1_000, seal=False,
        sync_interval_s=0 if seed % 2 else None,  # a write for every flush, or with rests
    )
    while True:
        recorder.offer(*log.flush(dice.randrange(1, 200), "x" * dice.randrange(100)))
        log.events.clear()
        acknowledged(recorder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
