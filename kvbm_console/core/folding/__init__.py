"""How each kind of event changes facts: one function a kind, one file a subject.

Law of this package: only ``CacheState.apply`` calls it. A function checks what consistency needs, raises ``FoldError``,
and never decides.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core.folding import copies, debugger, pools, slots

if TYPE_CHECKING:
    from kvbm_console.core.state import CacheState

APPLY: Final[dict[type[ev.Event], Callable[["CacheState", Any], None]]] = (
    pools.FOLDS | slots.FOLDS | copies.FOLDS | debugger.FOLDS
)
"""Event type to its function; a test proves that it is complete."""
APPLY[ev.UnknownKind] = lambda _state, _event: None
