"""The calls of a simulated engine, and the stimuli that a leader gets for them.

Law of this file: ``EnginePort`` is all that the engine knows of its decider. ``StimulusPort`` makes a stimulus of each
call, in the order of the calls, and decides nothing. The leader may refuse an arrival. If it refuses another call,
engine and leader disagree, which is a bug of ours and raises ``InternalError``.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Concatenate, Final, ParamSpec, Protocol

from kvbm_console.core.columns import pack_hashes, pack_ids, unpack_ids
from kvbm_console.core.errors import InternalError
from kvbm_console.core.events import StimulusRejected
from kvbm_console.core.ids import Authority, FinishReason, Tier
from kvbm_console.core.instructions import CloneAnswer, FencedBlocks, FinishAnswer, MatchAnswer, PoolAnswer
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import (
    BlocksAllocated,
    BlocksReported,
    IterationFinished,
    IterationScheduled,
    MatchRequested,
    PoolDeclared,
    RequestArrived,
    RequestCloned,
    RequestFinished,
    RequestPreempted,
    Stimulus,
)
from kvbm_console.dispatch import MEDIUM_OF, LeaderPort
from kvbm_console.simulator.work import Plan, Work
from kvbm_console.simulator.workloads import Request

P = ParamSpec("P")
Groups = Mapping[int, list[int]]
"""Group of layers to hashes of blocks."""
NOTHING: Final[Groups] = {}


class EnginePort(Protocol):
    """The connector entry points as calls of an engine. Block ids are those of its device pool."""

    @property
    def standing(self) -> Set[str]:
        """Requests that must be left out of iterations."""
        ...

    @property
    def held(self) -> Set[str]:
        """See ``LeaderPort.held``."""
        ...

    def declared(self, blocks: int, block_tokens: int, groups: int) -> None:
        """The engine stands, with a device pool of so many blocks for so many groups of layers."""
        ...

    def arrived(self, request: Request) -> bool:
        """A request has come. False when it is not taken, and then no further call names it."""
        ...

    def looked_up(self, name: str, computed_tokens: int) -> MatchAnswer:
        """Look up below the device; the engine's own prefix covers ``computed_tokens``."""
        ...

    def named(self, work: Work, count: int) -> None:
        """The next ``count`` blocks of a request are computed by the iteration that is being formed. They count as full
        from now on, because ``admitted`` follows for a request that finds them."""
        ...

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """``work.blocks`` were given to a waiting request: ``prefix`` of them as found by the engine itself."""
        ...

    def appended(self, work: Work, ids: list[int]) -> None:
        """A request that was admitted before was given further blocks, told on their own."""
        ...

    def shared(
        self, name: str, ids: list[int], *, stored: Groups = NOTHING, removed: Groups = NOTHING, cleared: bool = False
    ) -> None:
        """Several groups share the pool: places were given to a request, in any group. In groups beside the first
        blocks were stored and removed, or all of them forgotten."""
        ...

    def passed(self, work: Work) -> list[int]:
        """The window of a request has passed ``work.passed`` blocks. Those that are returned may not be reused yet."""
        ...

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """A request goes on as several sequences: ``ids`` are the partial last blocks of the clones, if any."""
        ...

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """The iterations of a plan begin, of which ``iteration`` is the first."""
        ...

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """Iterations up to this one ended: blocks that became full, ``counts[i]`` of ``works[i]``."""
        ...

    def preempted(self, work: Work) -> list[int]:
        """A request gives all its blocks back; those that are returned may not be reused yet."""
        ...

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        """A request has ended. True when its blocks may not be reused yet."""
        ...

    def computed_tokens(self, name: str) -> int:
        """The computed position of a live request (it goes back when a load failed)."""
        ...

    def calm_blocks(self) -> int | None:
        """See ``LeaderPort.calm_blocks``."""
        ...


class DeviceBytes(Protocol):
    """The bytes behind the blocks of a pool (``bytes.ranks.Ranks``)."""

    def fill(self, pool: int, places: Sequence[int], hashes: Sequence[int]) -> None:
        """These places have been computed."""
        ...

    def check(self, pool: int, places: Sequence[int], hashes: Sequence[int]) -> None:
        """A request uses these places as the blocks of these hashes."""
        ...

    def spoil(self, pool: int, places: Sequence[int]) -> None:
        """These places were given to a request, which has computed nothing in them yet."""
        ...


class StimulusPort:
    """An ``EnginePort`` that tells a leader."""

    def __init__(self, port: LeaderPort) -> None:
        self._port = port
        self._pools: list[int] = []
        """Pool of each group of layers."""

    @property
    def standing(self) -> Set[str]:
        """As ``EnginePort.standing``."""
        return self._port.standing

    @property
    def held(self) -> Set[str]:
        """As ``EnginePort.held``."""
        return self._port.held

    def _submit(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> Outcome:
        """The outcome of a call that a leader has no reason to refuse."""
        outcome = self._port.submit(kind, *args, **kwargs)
        if StimulusRejected in map(type, outcome.events):
            raise InternalError("the leader refused a call of the engine", tuple(map(repr, outcome.events)))
        return outcome

    def declared(self, blocks: int, block_tokens: int, groups: int) -> None:
        """As ``EnginePort.declared``. The leader follows the first group, and hears which blocks the others have."""
        for group in range(groups):
            capacity, authority = (None, Authority.STREAM) if group else (blocks, Authority.ENGINE)
            result = self._submit(
                PoolDeclared, 0, group, Tier.G1, MEDIUM_OF[Tier.G1], capacity, block_tokens, authority
            ).result
            if isinstance(result, PoolAnswer):
                self._pools.append(result.pool)

    def arrived(self, request: Request) -> bool:
        """As ``EnginePort.arrived``."""
        outcome = self._port.submit(
            RequestArrived, request.request, pack_hashes(request.hashes), request.prompt_tokens,
            request.output_tokens, request.priority, request.session,
        )
        return StimulusRejected not in map(type, outcome.events)

    def looked_up(self, name: str, computed_tokens: int) -> MatchAnswer:
        """As ``EnginePort.looked_up``."""
        outcome = self._submit(MatchRequested, name, computed_tokens)
        answer = outcome.result
        if not isinstance(answer, MatchAnswer):
            raise InternalError(f"the lookup of {name} got no answer", tuple(map(repr, outcome.events)))
        return answer

    def named(self, work: Work, count: int) -> None:
        """As ``EnginePort.named``; the leader knows it by the request that finds them."""

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """As ``EnginePort.admitted``; the leader knows the prefix from the lookup."""
        self._submit(
            BlocksAllocated, work.name, pack_ids(work.held), found_tokens, passed_blocks=work.passed,
        )

    def appended(self, work: Work, ids: list[int]) -> None:
        """As ``EnginePort.appended``."""
        self._submit(BlocksAllocated, work.name, pack_ids(ids), 0, passed_blocks=work.passed)

    def shared(
        self, name: str, ids: list[int], *, stored: Groups = NOTHING, removed: Groups = NOTHING, cleared: bool = False
    ) -> None:
        """As ``EnginePort.shared``."""
        if ids:
            self._submit(BlocksReported, self._pools[0], b"", b"", False, pack_ids(ids), name)
        for group, pool in enumerate(self._pools[1:], start=1):
            more, fewer = pack_hashes(stored.get(group, ())), pack_hashes(removed.get(group, ()))
            if more or fewer or cleared:
                self._submit(BlocksReported, pool, more, fewer, cleared)

    def passed(self, work: Work) -> list[int]:
        """As ``EnginePort.passed``."""
        result = self._submit(BlocksAllocated, work.name, b"", 0, passed_blocks=work.passed).result
        return unpack_ids(result.ids) if isinstance(result, FencedBlocks) else []

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """As ``EnginePort.cloned``."""
        outcome = self._submit(RequestCloned, work.name, tuple([clone.name for clone in clones]), pack_ids(ids))
        if not isinstance(outcome.result, CloneAnswer):
            raise InternalError(f"the clones of {work.name} got no answer", tuple(map(repr, outcome.events)))

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """As ``EnginePort.scheduled``."""
        appended = tuple([work.name for work in plan.appended])
        self._submit(
            IterationScheduled, iteration, plan.steps, tuple(plan.new), tuple(plan.resumed), (), tuple(plan.skipped),
            tuple(plan.unskipped), tuple(plan.first_tokens), tuple(plan.progressed), tuple(plan.positions),
            appended, tuple(plan.appended_counts), pack_ids(plan.appended_ids), running, waiting, tuple(plan.ended),
        )

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """As ``EnginePort.filled``."""
        names = tuple([work.name for work in works])
        self._submit(IterationFinished, iteration, names, tuple(counts), pack_ids(ids), pack_hashes(hashes))

    def preempted(self, work: Work) -> list[int]:
        """As ``EnginePort.preempted``."""
        result = self._submit(RequestPreempted, work.name).result
        return unpack_ids(result.ids) if isinstance(result, FencedBlocks) else []

    def finished(self, name: str, ids: list[int], reason: FinishReason) -> bool:
        """As ``EnginePort.finished``."""
        result = self._submit(RequestFinished, name, pack_ids(ids), reason).result
        return isinstance(result, FinishAnswer) and result.delay_free

    def computed_tokens(self, name: str) -> int:
        """As ``EnginePort.computed_tokens``."""
        return self._port.computed_tokens(name)

    def calm_blocks(self) -> int | None:
        """As ``EnginePort.calm_blocks``."""
        return self._port.calm_blocks()


class ContentsPort(StimulusPort):
    """A ``StimulusPort`` of an engine whose blocks have bytes: they change before the leader is told."""

    def __init__(self, port: LeaderPort, contents: DeviceBytes, pool: int) -> None:
        super().__init__(port)
        self._contents = contents
        self._pool = pool

    def named(self, work: Work, count: int) -> None:
        """As ``EnginePort.named``."""
        first, end = max(work.stored, work.passed), work.stored + count
        self._contents.fill(self._pool, work.blocks[first:end], work.hashes[first:end])

    def admitted(self, work: Work, prefix: int, found_tokens: int) -> None:
        """As ``EnginePort.admitted``; the reused prefix is compared."""
        self._contents.check(self._pool, work.blocks[work.passed : prefix], work.hashes[work.passed : prefix])
        self._contents.spoil(self._pool, work.blocks[max(work.passed, prefix) :])
        super().admitted(work, prefix, found_tokens)

    def appended(self, work: Work, ids: list[int]) -> None:
        """As ``EnginePort.appended``."""
        self._contents.spoil(self._pool, ids)
        super().appended(work, ids)

    def cloned(self, work: Work, clones: Sequence[Work], ids: list[int]) -> None:
        """As ``EnginePort.cloned``."""
        self._contents.spoil(self._pool, ids)
        super().cloned(work, clones, ids)

    def scheduled(self, plan: Plan, iteration: int, running: int, waiting: int) -> None:
        """As ``EnginePort.scheduled``."""
        self._contents.spoil(self._pool, plan.appended_ids)
        super().scheduled(plan, iteration, running, waiting)

    def filled(
        self, iteration: int, works: Sequence[Work], counts: Sequence[int], ids: list[int], hashes: list[int]
    ) -> None:
        """As ``EnginePort.filled``."""
        self._contents.fill(self._pool, ids, hashes)
        super().filled(iteration, works, counts, ids, hashes)
