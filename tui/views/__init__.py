"""The nine views and the panel of warnings: each turns the model into rows.

Law of this file: a view never changes the model and never awaits anything.
"""

from ..contracts import View


def all_views() -> list[View]:
    """One of each, in the order of their keys."""
    from .breaks import Breaks
    from .log import Log
    from .overview import Overview
    from .record import Record
    from .slot import SlotView
    from .slots import Slots
    from .tiers import Tiers
    from .timeline import Timeline
    from .transfers import Transfers
    from .warnings import Warnings
    from .why import Why

    return [
        Overview(), Slots(), SlotView(), Timeline(), Transfers(), Tiers(), Breaks(), Record(), Log(), Warnings(), Why(),
    ]
