"""What the tap said of vLLM's own scheduler (``tests/vllm/record.py``), brought to a leader step by step.

Law of this file: nothing of the engine is imported; the truth is what was kept beside the messages.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import zstandard

from kvbm_console.core.config import LeaderConfig
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sender import TapSettings
from tests.recording.helpers import Run
from tests.tap.watching import Watching

KEPT: Final = Path(__file__).resolve().parents[2] / "recordings" / "vllm"
NAMES: Final = tuple(sorted(path.name.removesuffix(".tap.zst") for path in KEPT.glob("*.tap.zst")))
UNPACKED_MAX: Final = 64 * 2**20
STEP_NS: Final = 10**7


@cache
def kept(name: str) -> dict[str, Any]:
    """A kept run: ``settings``, ``steps`` (messages, truth) and ``cached``, the engine's own counts of found tokens."""
    data = zstandard.ZstdDecompressor().decompress((KEPT / f"{name}.tap.zst").read_bytes(), UNPACKED_MAX)
    return msgspec.msgpack.decode(data, strict=False)  # type: ignore[no-any-return]


def watching(name: str, *, older: bool = False) -> Watching:
    """A checked leader to which nothing was brought yet. An ``older`` tap does not tell attention windows."""
    settings = msgspec.convert(kept(name)["settings"], TapSettings)
    if older:
        settings = msgspec.structs.replace(settings, windows={}, retention=None)
    return Watching(TapRecorder(), Flattener(), settings)


def steps(name: str, watch: Watching) -> Iterator[dict[str, Any]]:
    """Bring the messages of each step to the leader, and give what the scheduler held then."""
    for messages, truth in kept(name)["steps"]:
        watch.now += STEP_NS
        watch.take(messages)
        yield truth


@cache
def run_of(name: str, *, older: bool = False) -> Run:
    """The whole run."""
    watch = watching(name, older=older)
    for _ in steps(name, watch):
        pass
    return Run(LeaderConfig(), watch.stimuli, watch.outcomes)
