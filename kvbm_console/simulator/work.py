"""The simulated engine's record of a request, and of an iteration while it is formed.

Law of this file: plain values that the scheduler and the engine change and all others only read.
"""

from kvbm_console.simulator.device_pool import in_group
from kvbm_console.simulator.workloads import Request


class CloneFamily:
    """The sequences of one request, which ends with the last of them."""

    __slots__ = ("left", "request")

    def __init__(self, request: Request, left: int) -> None:
        self.request = request
        self.left = left
        """Sequences that have not ended."""


class Table:
    """The blocks of a request in one group of layers.

    ``blocks[i]`` holds tokens from ``i * block_tokens`` on, and is cached under ``hashes[i]`` when it is full. The
    first ``passed`` lie before the attention window of the group and are ``NO_PLACE``.
    """

    __slots__ = ("blocks", "hashes", "passed")

    def __init__(self, hashes: tuple[int, ...]) -> None:
        self.hashes = hashes
        self.blocks: list[int] = []
        self.passed = 0

    @property
    def held(self) -> list[int]:
        """The places of its blocks."""
        return self.blocks[self.passed :] if self.passed else self.blocks


class Work(Table):
    """The engine's record of a request, and its blocks in the first group of layers; ``others`` are the further groups.

    ``computed`` tokens have their K/V. The first ``stored`` blocks of each group are full and carry their hash.
    """

    __slots__ = (
        "announced", "computed", "decoding", "due", "family", "fetched", "junction", "last", "name", "named", "others",
        "preempted",
        "prefilled", "request", "settled", "skipped", "starved_ns", "stored", "total",
    )

    def __init__(self, request: Request, groups: int = 1) -> None:
        super().__init__(request.hashes + request.output_hashes)
        self.request = request
        self.name = request.request
        self.total = request.prompt_tokens
        """Tokens of the sequence, prompt and output, at the last lookup. A ``prefilled`` request has computed all but
        the last of them."""
        self.last = request.prompt_tokens + request.output_tokens - 1
        """With so many computed tokens the sequence samples its last token."""
        self.settled = 0
        """With ``early_steps`` the computed tokens whose results are known when the next iteration is formed."""
        self.others = [Table(tuple(in_group(group, self.hashes))) for group in range(1, groups)]
        self.computed = 0
        self.stored = 0
        self.named = 0
        """With ``named_early`` so many leading blocks carry their hash. Those from ``stored`` on are being computed."""
        self.junction = 0
        """At its last lookup the tokens of a prefix that the groups without a window had, or the first of groups that
        all have one, and another group had not; 0 if there were none. Other requests share it, so the blocks of windows
        at its end are kept."""
        self.fetched = 0
        """So many of its ``stored`` blocks were loaded, and others do not find them yet."""
        self.announced = False
        """True if an iteration has named the request since its (re-)admission."""
        self.prefilled = False
        """True if all tokens of the sequence have been computed since its (re-)admission, so that it decodes."""
        self.decoding = False
        """True if the leader was told that the request produces tokens."""
        self.skipped = False
        self.preempted = False
        self.starved_ns: int | None = None
        """The time since which the request is left out because it found no block."""
        self.due = len(request.clone_hashes)
        """Clones that are opened when all tokens of the prompt have been computed."""
        self.family: CloneFamily | None = None
        """The clones once they are open."""

    def clone(self, index: int) -> "Work":
        """Sequence ``index`` of this request, which has computed its prompt, without blocks.

        A request that was preempted right before its cloning has a token more, which all sequences share then.
        """
        other = Work(self.request.clone(index), 1 + len(self.others))
        for mine, table in zip(self.tables, other.tables, strict=True):
            table.hashes = mine.hashes[: self.stored] + table.hashes[self.stored :]
        other.computed, other.stored, other.settled = self.computed, self.stored, self.settled
        other.named = self.named
        other.announced, other.prefilled, other.skipped = self.announced, self.prefilled, self.skipped
        other.family = self.family
        return other

    @property
    def tables(self) -> list[Table]:
        """Its blocks in each group."""
        return [self, *self.others]

    @property
    def sampled(self) -> int:
        """Tokens sampled when all scheduled tokens have been computed."""
        return self.computed - self.request.prompt_tokens + 1

    @property
    def left(self) -> int:
        """Tokens to compute before the next sampled token."""
        return 1 if self.prefilled else self.total - self.computed


class Plan:
    """An iteration while it is formed: the columns of ``IterationScheduled``, and the tokens of each request."""

    def __init__(self) -> None:
        self.steps = 1
        """Iterations that are taken together (``windows``), in which every request decodes."""
        self.steady = 0
        """So many leading running requests compute a token more in each iteration."""
        self.tokens: list[tuple[Work, int]] = []
        """The other requests that take part, and their tokens."""
        self.fills: list[Work] = []
        """Of several iterations: whose next block becomes full, block by block."""
        self.prefill_tokens = 0
        self.decoding = 0
        self.preempted = 0
        self.blocked = False
        """True if a request waits for the blocks of another, which the running iteration uses. Nobody passes it."""
        self.tell_at_once = False
        """True if calls to the leader may follow before the announcement. Then blocks are told of one by one, because
        the leader must not order a copy from a cached block that was given away already."""
        self.ended: list[str] = []
        """Requests that ended before, in the order in which the connector hears of it, if that is known."""
        self.new: list[str] = []
        self.resumed: list[str] = []
        self.skipped: list[str] = []
        self.unskipped: list[str] = []
        self.first_tokens: list[str] = []
        self.progressed: list[str] = []
        self.positions: list[int] = []
        self.appended: list[Work] = []
        self.appended_counts: list[int] = []
        self.appended_ids: list[int] = []
        self.named: list[Work] = []
        """With ``named_early``: requests whose blocks carry their hashes since the iteration is formed."""
        self.early: list[int] = []
        """Appended block to the iterations that begin before the block is needed."""
