"""Leaders under test, with a simulated engine around them or driven call by call, and the tapes of a test.

Law of this file: every stimulus of such a leader is on its tape, so every test can become a recording. Leaders beyond
``TAPES_MAX`` are counted and not taped.
"""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.instructions import Instruction, StartTransfer
from kvbm_console.core.leader import Leader, Outcome
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import PoolDeclared, Stimulus, TransferFailed, TransferFinished, TransferStarted
from kvbm_console.dispatch import MEDIUM_OF, Dispatcher, start_leader
from kvbm_console.recording.output import Tape
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import SOURCE, Rig, build
from kvbm_console.simulator.hashing import Chain
from kvbm_console.simulator.workloads import Capacities, GivenRequests, Request, Workload
from kvbm_console.testing.story import Story, tell

P = ParamSpec("P")
TICK_NS: Final = 1_000_000
"""Time between two calls of a leader that is driven by hand."""
TAPES_MAX: Final = 16
"""Leaders that are taped in a test; a property test builds thousands."""
NAME_BYTES_MAX: Final = 150
"""Bytes of a file name, of at most 255, with room for a digest, a number and an ending."""
PLAIN: Final = re.compile(r"[\w.]+(?:-[\w.]+)*")
"""Parameters of a test that a file name shows as they are."""


class Prompts(GivenRequests):
    """A workload of requests that a test writes down."""

    def __init__(self, requests: Sequence[Request], block_tokens: int) -> None:
        super().__init__("prompts", requests, Capacities(block_tokens, 64, 64, 0, 256))


def prompt(
    name: str, *parts: tuple[int, int], at_ms: float = 0, output: int = 8, block_tokens: int = 16
) -> Request:
    """A request whose prompt is made of (word, how many tokens of it): equal beginnings are a shared prefix."""
    chain = Chain(block_tokens)
    for word, tokens in parts:
        chain.extend([word] * tokens)
    hashes, length = tuple(chain.hashes), len(chain)
    chain.extend([sum(name.encode())] * output)
    return Request(
        request=name, arrival_ns=round(at_ms * 1e6), hashes=hashes, output_hashes=tuple(chain.hashes[len(hashes):]),
        prompt_tokens=length, output_tokens=output, session=None,
    )


class Taped:
    """A leader whose doings are on a tape. ``path`` writes the recording when it is asked for."""

    def __init__(self, name: str, directory: Path, config: LeaderConfig) -> None:
        self.name = name
        self._directory = directory
        self._path: Path | None = None
        self._saved = 0
        self.tape = Tape(Leader(config))

    leader: Leader

    @property
    def config(self) -> LeaderConfig:
        """The configuration of its leader."""
        return self.tape.config

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return self.tape.events

    @property
    def state(self) -> CacheState:
        """The facts now. Read only."""
        return self.leader.state

    def slot(self, request: str) -> Story:
        """The story of a request so far, for ``assert_story``."""
        return tell(request, self.tape.state_at_begin(), self.tape.events)

    def of(self, kind: type[Event]) -> list[Any]:
        """The events of this kind."""
        return [event for event in self.tape.events if type(event) is kind]

    @property
    def path(self) -> Path:
        """The recording of everything so far; written when it is asked for, anew when more has happened."""
        if self._path is None or self._saved != len(self.tape.stimuli):
            self._directory.mkdir(parents=True, exist_ok=True)
            stem = safe_name(self.name)
            number = sum(1 for _ in self._directory.glob(f"{stem}-*.mcap"))
            self._path = self.tape.save(self._directory / f"{stem}-{number}.mcap", self.name)
            self._saved = len(self.tape.stimuli)
        return self._path


class Run(Taped):
    """A leader with a simulated engine, links and a workload around it, in virtual time."""

    def __init__(
        self, name: str, directory: Path, workload: Workload, config: LeaderConfig, engine: EngineConfig
    ) -> None:
        super().__init__(name, directory, config)
        self.rig = build(config, engine, workload, publish=self.tape.take, check=True)
        self.leader = self.rig.leader

    def go(self, drive: Callable[[Rig], object] | None = None) -> None:
        """Run to the end, or as ``drive`` does. Raises ``TypeError`` for a ``drive`` that only makes a coroutine."""
        made = (drive or Rig.run_to_end)(self.rig)
        if inspect.iscoroutine(made):
            made.close()  # it has not begun, so a test that went on would look at a leader to which nothing happened
            raise TypeError("drive is a coroutine function and was not run: give drive=lambda rig: asyncio.run(f(rig))")


class Driven(Taped):
    """A leader that a test calls like a connector does: ``tell(RequestArrived, "a", ...)``.

    Its G2 and G3 pools are there; ``g1_blocks`` declares the engine's own. Copies that it orders wait in ``orders``
    until ``finish`` or ``fail`` reports them.
    """

    def __init__(self, name: str, directory: Path, config: LeaderConfig, g1_blocks: int) -> None:
        super().__init__(name, directory, config)
        self.now_ns = 0
        self.orders: dict[int, StartTransfer] = {}
        self.instructions: list[Instruction] = []
        """Its instructions, oldest first."""
        self.leader = Leader(config, check=True)
        self.dispatcher = Dispatcher(self.leader, lambda: self.now_ns, publish=self._published)
        self.dispatcher.mover = _Orders(self)
        start_leader(self.dispatcher)
        if g1_blocks:
            self.tell(PoolDeclared, 0, 0, Tier.G1, MEDIUM_OF[Tier.G1], g1_blocks, config.block_tokens,
                      Authority.ENGINE)

    def _published(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.tape.take(stimulus, outcome)
        self.instructions += outcome.instructions

    def tell(
        self, kind: Callable[Concatenate[int, int, int, int | None, P], Stimulus], *args: P.args, **kwargs: P.kwargs
    ) -> Outcome:
        """Make a call of the engine, a millisecond after the last call."""
        self.now_ns += TICK_NS
        return self.dispatcher.submit_from(SOURCE, None, kind, *args, **kwargs)

    def finish(self, operation: int) -> None:
        """The copy arrived, on every rank."""
        order = self.orders.pop(operation)
        self.now_ns += TICK_NS
        self.dispatcher.submit(TransferStarted, operation, order.epoch)
        self.now_ns += TICK_NS
        for rank in range(order.ranks):
            self.dispatcher.submit(TransferFinished, operation, order.epoch, rank)

    def fail(self, operation: int, error: str = "failed in a test") -> None:
        """The copy did not arrive, on any rank."""
        order = self.orders.pop(operation)
        self.now_ns += TICK_NS
        for rank in range(order.ranks):
            self.dispatcher.submit(TransferFailed, operation, order.epoch, rank, error, b"")


class _Orders:
    """A mover that waits for the test."""

    def __init__(self, driven: Driven) -> None:
        self._driven = driven

    def start(self, order: StartTransfer) -> None:
        self._driven.orders[order.operation] = order

    def cancel(self, operation: int) -> None:
        self._driven.orders.pop(operation, None)

    def zero(self, pool: int) -> None:
        return


# --- tapes of a whole test ---


def safe_name(text: str) -> str:
    """A file name from the name of a test, another one for each test.

    A name that loses something gets a digest: of ``[x/y]`` and ``[x y]`` one would replace the other's recording.

    >>> safe_name("tests/test_a.py::test_b[x-1]")
    'tests-test_a.py-test_b-x-1'
    >>> safe_name("tests/test_a.py::test_b[x/1]")
    'tests-test_a.py-test_b-x-1-ea29da0b'
    """
    name = re.sub(r"[^\w.]+", "-", text).strip("-")
    _, bracket, parameters = text.partition("[")
    kept = name.encode()[-NAME_BYTES_MAX:].decode(errors="ignore")
    if kept == name and (not bracket or PLAIN.fullmatch(parameters.removesuffix("]"))):
        return name
    return f"{kept}-{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


class Tapes:
    """The tapes of a test."""

    def __init__(self) -> None:
        self.all: list[Tape] = []
        self.not_taped = 0
        """Leaders beyond ``TAPES_MAX``."""
        self._of: dict[int, tuple[Leader, Tape | None]] = {}

    def of(self, leader: Leader) -> Tape | None:
        """The tape of this leader, begun at its first stimulus; None when there are too many."""
        known = self._of.get(id(leader))
        if known is None:
            tape = Tape(leader) if len(self.all) < TAPES_MAX else None
            if tape is None:
                self.not_taped += 1
            else:
                self.all.append(tape)
            # The leader is kept with its tape, so that its id is not given to another leader.
            known = self._of[id(leader)] = (leader, tape)
        return known[1]


@contextmanager
def taping() -> Iterator[Tapes]:
    """Tape every leader that handles a stimulus inside: ``Leader.handle`` is wrapped for that time."""
    tapes = Tapes()
    handle = Leader.handle

    def taped(self: Leader, stimulus: Stimulus) -> Outcome:
        tape = tapes.of(self)
        outcome = handle(self, stimulus)
        if tape is not None:
            tape.take(stimulus, outcome)
        return outcome

    Leader.handle = taped  # type: ignore[method-assign]
    try:
        yield tapes
    finally:
        Leader.handle = handle  # type: ignore[method-assign]
