"""The views of the console: each turns the model into rows.

Law of this package: a view never changes the model and never awaits anything.
"""

from ..desk import View
from .breaks import Breaks
from .finished import FinishedList
from .help import Help
from .log import Log
from .misses import Misses
from .overview import Overview
from .prefixes import Prefixes
from .record import Record
from .slot import SlotView
from .slots import Slots
from .tiers import Tiers
from .timeline import Timeline
from .transfers import Transfers
from .warnings import Warnings
from .what_if import WhatIf
from .why import Why


def all_views() -> list[View]:
    """A new object of every view, at the place that ``desk`` names; the help is the last."""
    return [
        Overview(), Slots(), SlotView(), Timeline(), Transfers(), Tiers(), Breaks(), Record(), Log(), Prefixes(),
        Warnings(), Why(), FinishedList(), Misses(), WhatIf(), Help(),
    ]
