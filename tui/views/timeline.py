"""x"""
from ..desk import Desk
from ..draw.spans import Line


class Timeline:
    """x"""
    filter_fields: tuple[str, ...] = ()
    def body(self, desk: Desk, width: int, height: int) -> list[Line]:
        return []
    def hints(self, desk: Desk) -> list[tuple[str, str]]:
        return []
    def press(self, desk: Desk, key: str) -> bool:
        return False
