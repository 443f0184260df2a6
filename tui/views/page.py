"""What every view has unless it says otherwise.

Law of this file: nothing is drawn here.
"""

from kvbm_console.core.events import Event
from kvbm_console.core.expression import Schema

from ..contracts import Table
from ..desk import Desk


class Page:
    """A view without a list: nothing to filter, nothing to export as rows, no single events."""

    @property
    def schema(self) -> Schema | None:
        """The fields of its filter."""
        return None

    def rows(self, desk: Desk) -> Table | None:
        """All rows of its list."""
        return None

    def reveal(self, desk: Desk, event: Event) -> bool:
        """Show this event."""
        return False
