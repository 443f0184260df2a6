"""Testing with recordings: leaders whose every test can become a recording, and assertions about both.

The fixtures come with the pytest plugin (``kvbm_console.pytest_plugin``), which pytest finds by itself. This
package has the types of the fixtures' values and the assertions that a test imports. ``tests/PLUGIN.md`` has a
complete example.

Law of this package: an assertion that fails names the event.
"""

from kvbm_console.recording.output import Tape
from kvbm_console.testing.checks import assert_healthy, assert_invariants, assert_replays
from kvbm_console.testing.run import Driven, Prompts, Run, Taped, prompt, taping
from kvbm_console.testing.story import Story, assert_story

__all__ = [
    "Driven", "Prompts", "Run", "Story", "Tape", "Taped", "assert_healthy", "assert_invariants", "assert_replays",
    "assert_story", "prompt", "taping",
]
