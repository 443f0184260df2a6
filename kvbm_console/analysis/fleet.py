"""A fleet: the summaries of many daemons, sorted by need, and their sum.

A daemon tells a summary of a few kilobytes when it is asked. Nothing of a fleet is stored, and no daemon knows the
others. A daemon that does not answer keeps its row and says for how long.

Law of this file: every daemon that was named has a row, whatever it answered, or is counted as dropped.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final

import msgspec

from kvbm_console.analysis.digest import Count, Counts, Digest, MissedFrom, total
from kvbm_console.core.unreadable import UNREADABLE

WORDS: Final = ("fault", "gone", "held", "caution", "fine")
"""How a daemon stands, the worst first."""
GONE: Final = "gone"
OTHER_VERSION: Final = "it tells a summary of another version"
FINE: Final = "fine"
Word = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(WORDS)})\Z")]
SHOWN_CHARS: Final = 240
"""Characters of a text of a summary; a longer text is cut."""


class Problem(msgspec.Struct):
    """A finding of a lint, or a part of the daemon that does not run."""

    level: Word
    lint: str
    who: str
    what: str
    because: str
    request: str | None = None


class DaemonSummary(msgspec.Struct):
    """A daemon in its own words. Times are its engine's."""

    name: str
    program: str
    incarnation: str
    seq: int
    at_ns: int
    watching: bool
    """False until the daemon has read its own past, seconds after the first question: until then ``problems`` and
    ``digest`` are empty."""
    passed_over: Count
    """Events that the digest does not cover."""
    slots: dict[str, Count] = {}
    """Live slots by state."""
    holds: Count = 0
    tiers: dict[str, tuple[Count, Count | None]] = {}
    """Tier to its resident blocks and its capacity, None if unknown; tiers that do not exist are left out."""
    engines: Count = 0
    """Real engines that report and have not ended."""
    recorder: str | None = None
    problems: list[Problem] = []
    """The worst first."""
    digest: Counts = msgspec.field(default_factory=Digest)
    """A ``Digest``, of which a reader decodes the counts. ``DaemonRow.digest`` has the rest."""


class Digested(msgspec.Struct):
    """The digest alone of an encoded ``DaemonSummary``."""

    digest: Digest = msgspec.field(default_factory=Digest)


class Located(msgspec.Struct):
    """The tiers of a daemon that hold a block, or the state of a request's slot there."""

    tiers: list[str] = []
    slot: str | None = None
    state: str | None = None


class DaemonRow(msgspec.Struct):
    """A daemon of the fleet as of its last answer."""

    target: str
    """Its address, or at a broker its name there."""
    summary: DaemonSummary | None = None
    error: str = ""
    """Why the last question was not answered, empty if it was."""
    silent_s: float = 0.0
    """Seconds since the last answer; 0 for a daemon that has just answered."""
    address: str = ""
    """Where it listens, empty for ``target``."""
    host: str = ""
    """The machine of that address, empty if unknown."""
    keyframe: int | None = None
    """The message at the broker with which its last snapshot begins; None if its events are not there."""
    decode: Callable[[], Digest] = Digest
    """Decodes the digest of ``summary``."""

    @property
    def digest(self) -> Digest:
        """The digest of the last answer, decoded at the first use: most are replaced before a sum needs them.

        One of another version counts as empty, and ``error`` says so.
        """
        if self.summary is None:
            return Digest()
        if not isinstance(self.summary.digest, Digest):
            try:
                self.summary.digest = self.decode()
            except UNREADABLE:
                self.summary.digest, self.error = Digest(), OTHER_VERSION
        return self.summary.digest

    @property
    def name(self) -> str:
        """The daemon's name for people, else its address."""
        return self.summary.name if self.summary is not None and self.summary.name else self.target

    @property
    def opens(self) -> str:
        """The address of the daemon's own console."""
        return self.address or self.target

    @property
    def stands(self) -> str:
        """One of ``WORDS``."""
        if self.error or self.summary is None:
            return GONE
        return min((problem.level for problem in self.summary.problems), key=WORDS.index, default=FINE)

    def certainly_missed(self, key: int) -> int:
        """Prompt blocks that the daemon certainly missed from this block on."""
        found = self.digest.missing.of.get(key)
        return 0 if found is None else found.blocks - found.error

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt blocks that were found in any tier."""
        digest = None if self.summary is None else self.summary.digest
        return None if digest is None or not digest.prompt_blocks else sum(digest.hits) / digest.prompt_blocks


class Elsewhere(msgspec.Struct):
    """A prefix that misses: how much, why, and the daemons that hold its first missing block."""

    hash: str
    missed: MissedFrom
    lies_at: dict[str, list[str]] = {}
    """Target to the tiers there."""


class FleetReport(msgspec.Struct):
    """The fleet at one moment."""

    rows: list[DaemonRow]
    """Sorted by need."""
    stands: dict[str, int]
    """Number of daemons by how they stand."""
    digest: Digest
    """The sum of all daemons that answered."""
    missing: list[Elsewhere] = []
    """The prefixes of which most blocks had to be computed."""

    not_captured: int = 0
    """Blocks missed behind one of ``missing`` while another daemon holds that block now."""

    dropped: int = 0
    """Daemons that have no row, because there are more than a view keeps."""

    @property
    def reuse(self) -> "Reuse":
        """The reuse of prompt blocks over the fleet."""
        digest = self.digest
        return Reuse(digest.prompt_blocks, sum(digest.hits), digest.lost_blocks, self.not_captured)


class Reuse(msgspec.Struct, frozen=True):
    """Prompt blocks by their reuse. The rest was computed, and nobody is known to have held it."""

    prompt_blocks: int
    delivered: int
    """Found in a cache of the request's daemon and used."""
    not_delivered: int
    """Found there, but their load failed."""
    not_captured: int
    """Missed behind one of the report's ``missing`` prefixes, while another daemon holds that block now."""

    @property
    def captured(self) -> int:
        """Found in a cache of the request's daemon."""
        return self.delivered + self.not_delivered

    @property
    def held(self) -> int:
        """Found in a cache of any daemon, as far as it is known."""
        return self.captured + self.not_captured


def by_need(rows: Iterable[DaemonRow]) -> list[DaemonRow]:
    """The daemons that need a person first; then those with the lowest hit rate, then by name."""
    return sorted(rows, key=lambda row: (WORDS.index(row.stands), row.hit_rate or 0.0, row.name, row.target))


def report_of(rows: Sequence[DaemonRow], summed: FleetReport | None = None, dropped: int = 0) -> FleetReport:
    """The fleet as its rows tell it, with the sum and the ``missing`` of an earlier report if it is given. Without one
    ``missing`` is left to the caller, who can ask where the blocks lie."""
    if summed is None:
        summed = FleetReport([], {}, total(row.digest for row in rows if row.summary is not None))
    stands = dict.fromkeys(WORDS, 0)
    for row in rows:
        stands[row.stands] += 1
    return FleetReport(by_need(rows), stands, summed.digest, summed.missing, summed.not_captured, dropped)


def not_captured(rows: Sequence[DaemonRow], missing: Sequence[Elsewhere]) -> int:
    """Blocks that daemons certainly missed behind these prefixes, while another daemon holds their first block."""
    return sum(
        row.certainly_missed(int(each.hash, 16)) for each in missing for row in rows
        if each.lies_at.keys() - {row.target}
    )
