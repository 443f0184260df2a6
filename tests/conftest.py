"""What all tests share: where outside data lies, and how property tests report.

Law of this file: a test that needs outside data is skipped, visibly, where the data is absent; nothing here waits.
"""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with ctrl-c ignored, and programs that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow],
    max_examples=100 if os.environ.get("KVBM_FULL") else 40,
)
settings.register_profile("full", parent=settings.get_profile("default"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def shared_directory() -> Path | None:
    """The directory of outside data: ``KVBM_SHARED``, else ``../shared``, None where neither exists."""
    named = os.environ.get("KVBM_SHARED")
    place = Path(named) if named else ROOT.parent / "shared"
    return place if place.is_dir() else None


@pytest.fixture
def shared() -> Path:
    """The directory of outside data; skips where it is absent."""
    place = shared_directory()
    if place is None:
        pytest.skip("needs the shared data: set KVBM_SHARED")
    return place


@pytest.fixture
def mooncake_trace(shared: Path) -> Path:
    """The real conversation trace; skips where it is absent."""
    trace = shared / "traces" / "mooncake_conversation_trace.jsonl"
    if not trace.is_file():
        pytest.skip(f"needs {trace.name} in the shared data")
    return trace
