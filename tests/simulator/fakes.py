"""A scripted leader for the engine's tests: lookups answer from a plain dict, loads take no time unless kept.

Law of this file: it checks what a leader could check of an engine (places for tokens, no block given twice), and
nothing else; it decides nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_ids, unpack_ids
from kvbm_console.core.instructions import FencedBlocks, FinishAnswer, MatchAnswer
from kvbm_console.core.leader import Outcome
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.workloads import Capacities, Request


class Listed:
    """A workload of these requests."""

    name = "listed"
    endless = False
    capacities = Capacities(4, 64, 0, 0, 16)

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.ended: list[tuple[str, int]] = []

    def begin(self, block_tokens: int) -> None:
        """Nothing depends on it."""

    def arrivals(self) -> Iterator[Request]:
        """As listed."""
        return iter(self.requests)

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """Nothing follows; keeps who ended when."""
        self.ended.append((request.request, at_ns))
        return None


def request(name: str, prompt: int, output: int, *, at_ns: int = 0, family: int = 0, block_tokens: int = 4) -> Request:
    """A request whose prompt blocks are shared with all of its family, and whose output blocks are its own."""
    full = prompt // block_tokens
    own = (prompt + output) // block_tokens - full
    return Request(
        name, at_ns, tuple(1 + family * 10_000 + block for block in range(full)),
        tuple(1 + hash_of(name) + block for block in range(own)), prompt, output,
    )


def hash_of(name: str) -> int:
    """A number for a name, the same in every process."""
    return int.from_bytes(name.encode().ljust(7, b"\0")[:7], "big") << 8


class FakePort:
    """``LeaderPort`` that keeps every stimulus in ``log`` and mirrors who holds which block.

    ``found`` maps a request to the tokens that its lookups find below G1 (None: ask again); with ``delay`` a load is
    reported by ``wake`` after that time, to the position that ``loaded`` says (absent: all of it).
    """

    def __init__(self, calendar: Calendar, block_tokens: int = 4) -> None:
        self.calendar = calendar
        self.block_tokens = block_tokens
        self.standing: set[str] = set()
        self.held: set[str] = set()
        self.log: list[st.Stimulus] = []
        self.found: dict[str, int | None] = {}
        self.loaded: dict[str, int] = {}
        self.asynchronous = True
        self.delay_ns: int | None = 1_000
        self.fence: Callable[[str, list[int]], list[int]] = lambda name, ids: []
        self.delay_free = False
        self.engine: Any = None
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.decoding: set[str] = set()
        self.skipped: set[str] = set()
        self.withheld: set[int] = set()

    def submit(self, kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        """Keep it, check it, answer it."""
        stimulus = kind(len(self.log), self.calendar.now_ns, 1, None, *args, **kwargs)
        self.log.append(stimulus)
        handler = getattr(self, f"_{type(stimulus).__name__}", None)
        return Outcome(handler(stimulus) if handler else None, [], [])

    def computed_tokens(self, request: str) -> int:
        """As after the last report."""
        return self.computed[request]

    def of(self, kind: type[Any]) -> list[Any]:
        """The stimuli of one kind, in order."""
        return [stimulus for stimulus in self.log if isinstance(stimulus, kind)]

    def _MatchRequested(self, s: st.MatchRequested) -> MatchAnswer:
        self.local[s.request] = s.computed_tokens
        tokens = self.found.get(s.request, 0)
        return MatchAnswer(tokens, self.asynchronous and bool(tokens))

    def _BlocksAllocated(self, s: st.BlocksAllocated) -> None:
        ids = unpack_ids(s.block_ids)
        first = s.request not in self.blocks
        prefix = self.local[s.request] // self.block_tokens if first else 0
        self._give(s.request, ids, ids[:prefix])
        if not first:
            return
        local = self.local[s.request]
        self.computed[s.request] = local + s.external_tokens
        if s.external_tokens:
            self.found.pop(s.request)
            self.computed[s.request] = self.loaded.get(s.request, local + s.external_tokens)
            if self.delay_ns == 0:
                self.engine.wake(s.request)
            elif self.delay_ns is not None:
                self.calendar.at(self.calendar.now_ns + self.delay_ns, lambda: self.engine.wake(s.request))

    def _give(self, name: str, ids: list[int], shared: list[int]) -> None:
        held = {block for blocks in self.blocks.values() for block in blocks} | self.withheld
        assert not (set(ids) - set(shared)) & held, f"{name} was given a block that somebody holds"
        self.blocks.setdefault(name, []).extend(ids)

    def _IterationScheduled(self, s: st.IterationScheduled) -> None:
        at = 0
        ids = unpack_ids(s.appended_ids)
        for name, count in zip(s.appended, s.appended_counts, strict=True):
            self._give(name, ids[at : at + count], [])
            at += count
        self.skipped |= set(s.skipped)
        self.skipped -= set(s.unskipped)
        self.decoding |= set(s.first_tokens)
        for name, position in zip(s.progressed, s.positions, strict=True):
            assert position > self.computed[name]
            self.computed[name] = position
        for name in self.decoding - self.skipped:
            self.computed[name] += 1
        for name, blocks in self.blocks.items():
            assert self.computed[name] <= len(blocks) * self.block_tokens, f"{name} has a token without a place"

    def _RequestPreempted(self, s: st.RequestPreempted) -> FencedBlocks:
        ids = self._drop(s.request)
        fenced = self.fence(s.request, ids)
        self.withheld |= set(fenced)
        return FencedBlocks(pack_ids(fenced))

    def _RequestFinished(self, s: st.RequestFinished) -> FinishAnswer:
        ids = self._drop(s.request)
        if self.delay_free:
            self.withheld |= set(ids)
        return FinishAnswer(self.delay_free)

    def _drop(self, name: str) -> list[int]:
        self.decoding.discard(name)
        self.skipped.discard(name)
        return self.blocks.pop(name, [])

    def release(self, name: str, ids: list[int]) -> None:
        """The copies ended: tell the engine."""
        self.withheld -= set(ids)
        self.engine.release(name, pack_ids(ids))
