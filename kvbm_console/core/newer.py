"""Events of kinds that this program does not know: written by a newer minor version.

They are kept with their number, so that nothing is missing, and fold as if nothing had changed: the facts behind one
may differ from the writer's until the next keyframe or snapshot.

Law of this file: no kind of ours is ever made one of these.
"""

from typing import Any

from kvbm_console.core.events import Event
from kvbm_console.core.folding import APPLY
from kvbm_console.core.state import CacheState


class UnknownKind(Event, tag=-1):
    """An event that became true and says something that this program cannot read."""

    kind: int
    """The number of its kind in the newer version."""


def _no_facts(_state: CacheState, _event: Any) -> None:
    return


APPLY[UnknownKind] = _no_facts
