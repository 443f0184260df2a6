"""Workloads: where simulated requests come from, and how the command line names them.

Law of this file: a workload is deterministic, so the same specification gives the same requests at any speed. It hands
over hashes and lengths; tokens and text stay inside it.
"""

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec


class Request(msgspec.Struct, frozen=True):
    """One generation to be asked of an engine.

    ``hashes`` has a sequence hash per full block of the prompt. ``output_hashes`` has those of the blocks that become
    full while ``output_tokens`` are generated, with the block that the prompt left partial. A request of n sequences
    has n - 1 ``clone_hashes``: the ``output_hashes`` of each further sequence, which begins where the prompt ends.
    """

    request: str
    arrival_ns: int
    hashes: tuple[int, ...]
    output_hashes: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    priority: int = 0
    """Above 0, its blocks are kept before those of lower priorities for a while after its end."""
    clone_hashes: tuple[tuple[int, ...], ...] = ()
    abort_ns: int | None = None
    """The time at which its client goes away, None for a client that waits for all tokens."""
    end_number: int = 0
    """Of two requests that end before the same iteration, the connector hears first of that with the lower number; 0
    where the order is that of their ends."""

    def clone(self, index: int) -> "Request":
        """Sequence ``index`` of this request, from 2, as a request of its own.

        >>> clone = Request("r", 0, (1,), (2,), 16, 16, clone_hashes=((3,),)).clone(2)
        >>> clone.request, clone.hashes, clone.output_hashes, clone.clone_hashes
        ('r#2', (1,), (3,), ())
        """
        return msgspec.structs.replace(
            self, request=f"{self.request}#{index}", output_hashes=self.clone_hashes[index - 2], clone_hashes=()
        )


SEQUENCES_MAX: Final = 64
"""Sequences of one request: the engine keeps a seat for each, and no batch has more seats."""


class Capacities(msgspec.Struct, frozen=True):
    """Sizes, in blocks, at which a workload shows something; ``block_tokens`` is the block they are counted in."""

    block_tokens: int
    g1_blocks: int
    g2_blocks: int
    g3_blocks: int
    batch_tokens: int
    """Token budget of an iteration that goes with them."""


class Workload(Protocol):
    """A source of requests."""

    @property
    def name(self) -> str:
        """As the command line names it."""
        ...

    @property
    def capacities(self) -> Capacities:
        """The sizes to use where the user gives none."""
        ...

    @property
    def endless(self) -> bool:
        """True if the workload goes on until it is stopped."""
        ...

    def begin(self, block_tokens: int) -> None:
        """Choose the block size and start from the beginning; before anything else. Raises ``UsageError``."""
        ...

    def arrivals(self) -> Iterator[Request]:
        """Requests that come by themselves, by arrival time; read one at a time. Raises ``UsageError`` (bad line)."""
        ...

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """The request that follows the end of a request, the next turn of its session or None."""
        ...


class GivenRequests:
    """A ``Workload`` of requests that are given, by their arrival times; nothing follows them."""

    endless = False

    def __init__(self, name: str, requests: Iterable[Request], capacities: Capacities) -> None:
        self.name = name
        self.requests = list(requests)
        self.capacities = capacities

    def begin(self, block_tokens: int) -> None:
        """Nothing: the blocks of the requests are given."""

    def arrivals(self) -> Iterator[Request]:
        """All requests, by time."""
        return iter(sorted(self.requests, key=lambda request: request.arrival_ns))

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """None."""
        return None
