"""The verbs that change a daemon, for an agent: breakpoints, holds, continue, step.

Law of this file: each verb needs the role control. A breakpoint belongs to the daemon and expires by itself, and a hold
lasts at most as long as everywhere else.
"""

from typing import Final, TypeVar

import anyio

from kvbm_console.answers.pages import Answer, ms, paged
from kvbm_console.answers.source import LiveSource
from kvbm_console.client import Client
from kvbm_console.client.standing import standing_still
from kvbm_console.core.config import SECOND_NS, BreakpointSpec
from kvbm_console.core.errors import UsageError
from kvbm_console.core.expression import compile_condition
from kvbm_console.core.ids import SlotState
from kvbm_console.stream.verbs import ContinueHold, RemoveBreakpoint, SetBreakpoint, StepSlot, Verb

T = TypeVar("T")
WAIT_MAX_S: Final = 30.0
"""Longest wait for a hold; an agent asks again."""


class LiveControl:
    """Verbs on a daemon. ``who`` is the name on the record."""

    def __init__(self, source: LiveSource, who: str) -> None:
        self._source = source
        self._who = who

    async def break_set(
        self, to_state: str = "", request: str = "*", when: str = "", max_hold_s: float = 30.0, once: bool = False
    ) -> Answer:
        """Set a breakpoint. Raises ``UsageError`` for one that would hold everything."""
        if not to_state and not when and request == "*":
            raise UsageError("break_set needs to_state, request or when; without them it would hold every request")
        states = {member.label: member for member in SlotState}
        if to_state and to_state not in states:
            raise UsageError(f"to_state must be one of {', '.join(states)}, got {to_state!r}")
        if when:
            compile_condition(when)
        spec = BreakpointSpec(
            to_state=states.get(to_state), request=request, condition=when, one_shot=once, name="set by an agent",
            max_hold_ns=round(max_hold_s * SECOND_NS),
        )
        verdict = await self._verb(SetBreakpoint(spec))
        return {"id": str(verdict.id), "verified": verdict.verified, "message": verdict.message,
                "breakpoint": spec.describe()}

    async def break_list(self) -> Answer:
        """The breakpoints of all owners."""
        status = await self._source.ask(lambda client: client.status())
        columns = ("id", "description", "request", "condition", "enabled", "hits", "owner", "name")
        return paged({"seq": status["stream"]["head_seq"]}, columns,
                     [[row[column] for column in columns] for row in status["breakpoints"]])

    async def break_clear(self, breakpoint: int) -> Answer:
        """Remove a breakpoint of any owner."""
        return {"done": await self._verb(RemoveBreakpoint(breakpoint))}

    async def holds(self, wait_s: float = 0.0) -> Answer:
        """Slots that stand still, waiting for the first one for at most ``wait_s``."""
        if not 0 <= wait_s <= WAIT_MAX_S:
            raise UsageError(f"wait_s must be from 0 to {WAIT_MAX_S:g}, got {wait_s}")
        if wait_s:
            with anyio.move_on_after(wait_s):
                await self._source.ask(standing_still)
        return await self._held()

    async def continue_hold(self, hold: int) -> Answer:
        """Let a held slot go on."""
        return {"hold": str(hold), "done": await self._verb(ContinueHold(hold))}

    async def step_hold(self, hold: int) -> Answer:
        """Let a held slot go on to its next site."""
        return {"hold": str(hold), "done": await self._verb(StepSlot(hold))}

    async def _held(self) -> Answer:
        status = await self._source.ask(lambda client: client.status())
        columns = ("hold", "slot", "request", "site", "point", "held_ms", "breakpoints", "owner")
        rows = [[row["id"], row["slot"], row["request"], row["site"], row["point"], ms(row["age_ns"]),
                 row["breakpoints"], row["owner"]] for row in status["holds"] if not row["pending"]]
        return paged({"seq": status["stream"]["head_seq"]}, columns, rows)

    async def _verb(self, verb: Verb[T]) -> T:
        async def carry_out(client: Client) -> T:
            async with client.control(self._who, lease=False) as session:
                return await session.ask(verb)

        return await self._source.ask(carry_out)
