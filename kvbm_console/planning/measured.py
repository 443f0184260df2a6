"""The work of a real engine, read from a recording or a table: its steps, and the times of its requests.

A recording names every iteration. A step is the time from an iteration to the next, if a request takes part in both.
Without such a request the engine may have waited in between. Times are the engine's own if the engine reports them.
For example, an iteration at 10 ms computes 512 prompt tokens and three requests decode in this iteration. The next
iteration begins at 22 ms: a step of (512, 3) in 12 ms.

A table of requests names no steps. Between the first token of a request and its last there was a step for each of its
tokens. The prompt tokens of these steps are those of requests whose first token fell into that time. Their decoding
requests are the tokens that all requests sampled in it. See ``equations_of``.

Law of this file: it reads and counts. A missing value is refused by file, place and name.
"""

import copy
import csv
import io
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvbm_console.analysis.request_times import first_token_came
from kvbm_console.core import events as ev
from kvbm_console.core.columns import unpack_hashes
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.files import read_bounded
from kvbm_console.recording.reader import Recording

ROWS_MAX: Final = 2_000_000
"""Rows of a table: a day of steps of 50 ms, and below a gigabyte of memory."""
TABLE_BYTES_MAX: Final = 1 << 28
"""As many rows of requests in CSV."""
UNITS_NS: Final = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
STEP_COLUMNS: Final = ("prefill_tokens", "decode_requests", "duration_ns")
REQUEST_COLUMNS: Final = ("arrived_ns", "first_token_ns", "finished_ns", "prompt_tokens", "output_tokens")
CACHED_COLUMNS: Final = ("cached_tokens", "cached_g1_tokens", "cached_g2_tokens", "cached_g3_tokens")
SERVED_MAX: Final = 20_000
"""Requests that are served again, from the first on: a minute of work at most."""


class Equation(NamedTuple):
    """``steps`` iterations took ``time_ns`` together."""

    at_ns: float
    """The end of the iterations."""
    steps: float
    prefill_tokens: float
    decode_requests: float
    """Summed over the iterations."""
    time_ns: float


class Served(NamedTuple):
    """An answered request. Times of the engine, in nanoseconds."""

    arrived_ns: float
    first_token_ns: float
    finished_ns: float
    computed_tokens: int
    """Prompt tokens that were not cached."""
    output_tokens: int
    prompt_tokens: int = 0
    hashes: tuple[int, ...] = ()
    """Hashes of the prompt's full blocks, if the source has them."""
    output_hashes: tuple[int, ...] = ()
    """Hashes of the later blocks that became full."""
    held: bool = False
    """True if a breakpoint held it, so that its times tell nothing about the engine."""


class Device(NamedTuple):
    """The device of an engine that has no other tier."""

    blocks: int
    block_tokens: int


class Measured(NamedTuple):
    """The content of a source; a source may lack equations or requests."""

    kind: str
    """recording, steps or requests."""
    equations: list[Equation]
    requests: list[Served]
    tokens_most: int | None = None
    """Most tokens that a step computed, if the source reports them."""
    running_most: int | None = None
    """Most requests that took part in a step."""
    begun_ns: Sequence[float] = ()
    """The begin of each iteration of a recording."""
    device: Device | None = None
    """None unless the source has the hashes of all blocks and found nothing below the device."""
    last_ones: Sequence[Equation] = ()
    """Iterations of a recording after which none of their requests went on, to the begin of the next."""


def read_measured(path: Path, batch_tokens: int) -> Measured:
    """Read a recording, or a table in CSV, JSON or JSON lines. ``batch_tokens`` is the most of a table's step.

    Raises ``UsageError`` and ``RecordingError``.
    """
    if path.is_dir() or path.suffix == ".mcap":
        return of_recording(Recording.open(path))
    rows = _rows(path)
    first = next(iter(rows), {})
    if "prefill_tokens" in first:
        steps = [_step(path, number, row) for number, row in enumerate(rows, start=1)]
        at_ns = accumulate(step[-1] for step in steps)
        return Measured("steps", [Equation(ended, 1.0, *step) for ended, step in zip(at_ns, steps, strict=True)], [])
    if "prompt_tokens" in first:
        requests = [served for number, row in enumerate(rows, start=1) if (served := _served(path, number, row))]
        requests.sort()
        return Measured("requests", equations_of(requests, batch_tokens), requests)
    raise UsageError(
        f"{path} must have the columns {', '.join(STEP_COLUMNS)} of steps, or {', '.join(REQUEST_COLUMNS)} of requests"
    )


# --- tables ---


def _rows(path: Path) -> list[Mapping[str, Any]]:
    try:
        text = read_bounded(path, TABLE_BYTES_MAX).decode()
        rows: list[Any]
        if path.suffix == ".csv":
            rows = list(islice(csv.DictReader(io.StringIO(text, newline="")), ROWS_MAX + 1))
        else:
            decode = msgspec.json.decode
            rows = decode(text) if text.lstrip().startswith("[") else [
                decode(line) for line in text.splitlines() if line.strip()
            ]
    except UnicodeDecodeError:
        raise UsageError(f"{path} is neither a recording nor a table: it holds no text") from None
    except (OSError, csv.Error, msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if len(rows) > ROWS_MAX:
        raise UsageError(f"{path} must have at most {ROWS_MAX:,} rows")
    if not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} must hold an object in each row")
    return rows


def _number(path: Path, number: int, row: Mapping[str, Any], name: str) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{path}, row {number}: {name} must be a number, got {row.get(name)!r}") from None
    if not 0 <= value < 2**63:
        raise UsageError(f"{path}, row {number}: {name} must be from 0 to 2^63, got {row[name]}")
    return value


def _time(path: Path, number: int, row: Mapping[str, Any], name: str) -> float:
    """A time in nanoseconds; the column may have another unit at its end."""
    stem = name.removesuffix("_ns")
    for unit, size in UNITS_NS.items():
        if f"{stem}_{unit}" in row:
            return _number(path, number, row, f"{stem}_{unit}") * size
    return _number(path, number, row, name)


def _step(path: Path, number: int, row: Mapping[str, Any]) -> tuple[float, float, float]:
    prefill_tokens, decode_requests = (_number(path, number, row, name) for name in STEP_COLUMNS[:2])
    return prefill_tokens, decode_requests, _time(path, number, row, STEP_COLUMNS[2])


def _served(path: Path, number: int, row: Mapping[str, Any]) -> Served | None:
    """The request of a row, None without a first token."""
    if row.get("first_token_ns", 0) in (None, ""):
        return None
    arrived, first, finished = (_time(path, number, row, name) for name in REQUEST_COLUMNS[:3])
    prompt, output = (int(_number(path, number, row, name)) for name in REQUEST_COLUMNS[3:])
    cached = sum(int(_number(path, number, row, name)) for name in CACHED_COLUMNS if row.get(name) not in (None, ""))
    if not arrived <= first <= finished:
        raise UsageError(f"{path}, row {number}: arrival, first token and end must follow each other")
    return Served(arrived, first, finished, max(1, prompt - cached), max(1, output))


def equations_of(requests: list[Served], batch_tokens: int) -> list[Equation]:
    """Equations of the steps after each request's first token, and of first tokens computed while no other request
    ran."""
    by_first = sorted(requests, key=lambda served: served.first_token_ns)
    firsts = [served.first_token_ns for served in by_first]
    prefilled = [0, *accumulate(served.computed_tokens for served in by_first)]
    sampled = _Sampled(requests)
    equations: list[Equation] = []
    busy_ns = -1.0
    for at, served in enumerate(requests):
        _, first_ns, finished_ns, computed, output = served[:5]
        alone = served.arrived_ns >= busy_ns and (
            at + 1 == len(requests) or requests[at + 1].arrived_ns >= first_ns
        )
        if alone:
            steps = -(-computed // batch_tokens)
            equations.append(Equation(first_ns, steps, computed, 0.0, first_ns - served.arrived_ns))
        busy_ns = max(busy_ns, finished_ns)
        if output > 1:
            low, high = bisect_right(firsts, first_ns), bisect_right(firsts, finished_ns)
            equations.append(Equation(
                finished_ns, output - 1, prefilled[high] - prefilled[low],
                sampled.until(finished_ns) - sampled.until(first_ns), finished_ns - first_ns,
            ))
    equations.sort()
    return equations


class _Sampled:
    """Tokens after first tokens that all requests sampled up to a moment, each request at its own even pace."""

    def __init__(self, requests: list[Served]) -> None:
        changes: dict[float, list[float]] = {}
        for served in requests:
            lasts_ns = served.finished_ns - served.first_token_ns
            if served.output_tokens > 1 and lasts_ns > 0:
                pace = (served.output_tokens - 1) / lasts_ns
                changes.setdefault(served.first_token_ns, [0.0])[0] += pace
                changes.setdefault(served.finished_ns, [0.0])[0] -= pace
        self._at_ns = sorted(changes)
        self._paces = list(accumulate(changes[at_ns][0] for at_ns in self._at_ns))
        lengths = (later - earlier for earlier, later in zip(self._at_ns, self._at_ns[1:], strict=False))
        self._sums = [0.0, *accumulate(pace * length for pace, length in zip(self._paces, lengths, strict=False))]

    def until(self, at_ns: float) -> float:
        """The tokens up to ``at_ns``."""
        at = bisect_left(self._at_ns, at_ns)
        if at == 0:
            return 0.0
        return self._sums[at - 1] + self._paces[at - 1] * (at_ns - self._at_ns[at - 1])


# --- recordings ---


class _Life:
    """A slot while the recording is read."""

    __slots__ = ("arrived_ns", "cached", "computed", "filled", "first_ns", "hashes", "held", "prompt", "state")

    def __init__(self, arrived_ns: float, prompt: int, hashes: tuple[int, ...]) -> None:
        self.arrived_ns = arrived_ns
        self.prompt = prompt
        self.hashes = hashes
        self.filled: dict[int, None] = {}
        """Hashes of blocks that the slot computed after its prompt."""
        self.state = SlotState.INITIALIZED
        self.computed = 0
        self.cached: int | None = None
        self.first_ns: float | None = None
        self.held = False

    def clone(self) -> "_Life":
        """A copy for a sequence that goes on from here."""
        other = copy.copy(self)
        other.filled = {}
        return other


class _Reading:
    """The fold of a recording into steps and requests."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.last_ones: list[Equation] = []
        self._requests: list[tuple[float, int, Served]] = []
        self._device: Device | None = None
        self._devices = 0
        self._below = False
        """True if blocks were found below the device."""
        self._whole = True
        """True if all requests are known from their beginning and none has clones; others cannot be served again."""
        self._lives: dict[int, _Life] = {}
        self._last: tuple[float, int, int, int, set[int]] | None = None
        """Begin, number, prompt tokens, decoding requests and slots of the last iterations."""
        self.tokens_most = self.running_most = 1
        self.begun_ns: list[float] = []

    def take(self, event: ev.Event, at_ns: float) -> None:
        """Fold the next event, with the engine's time of the event."""
        if isinstance(event, ev.SlotOpened):
            self._lives[event.slot] = _Life(at_ns, event.prompt_tokens, tuple(unpack_hashes(event.hashes)))
        elif isinstance(event, ev.SlotCloned) and event.parent in self._lives:
            self._whole = False
            self._lives[event.slot] = self._lives[event.parent].clone()
        elif isinstance(event, ev.SlotMoved) and event.slot in self._lives:
            self._moved(event, self._lives[event.slot], at_ns)
        elif isinstance(event, ev.SlotHeld) and event.slot in self._lives:
            self._lives[event.slot].held = True
        elif isinstance(event, ev.SlotClosed):
            self._lives.pop(event.slot, None)
        elif isinstance(event, ev.IterationAdvanced):
            self._iterated(event, at_ns)
        elif isinstance(event, ev.SourceLost):
            self._whole = self._whole and event.gone  # an engine that ended reported everything before
            self._last = None
        elif isinstance(event, ev.BlocksFilled):
            hashes = iter(unpack_hashes(event.hashes))
            for slot, count in zip(event.slots, event.counts, strict=True):
                for key in islice(hashes, count):
                    if slot in self._lives and key not in self._lives[slot].hashes:
                        self._lives[slot].filled[key] = None
        elif isinstance(event, ev.PrefixScored):
            self._below |= any(event.hits[1:])
        elif isinstance(event, ev.PoolKnown) and event.tier is Tier.G1:
            self._devices += 1
            if event.capacity_blocks:
                self._device = Device(event.capacity_blocks, event.block_tokens)

    def gap(self) -> None:
        """Forget the requests in flight, because events are missing here."""
        self._whole = False
        self._last = None
        self._lives.clear()

    def measured(self) -> Measured:
        """The result."""
        requests = [
            served for _, _, served in sorted(self._requests, key=lambda row: row[:2])
        ] if self._whole else []
        device = self._device if self._devices == 1 and not self._below else None
        if device is not None and not all(_has_hashes(served, device.block_tokens) for served in requests):
            device = None
        return Measured(
            "recording", self.equations, requests, self.tokens_most, self.running_most, self.begun_ns, device,
            self.last_ones,
        )

    def _moved(self, event: ev.SlotMoved, life: _Life, at_ns: float) -> None:
        life.state = event.new
        if life.first_ns is None and first_token_came(event, life.prompt):
            life.first_ns = at_ns
        if event.new is SlotState.PREFILLING and event.old is not SlotState.SKIPPED_PREFILL:
            life.computed = event.computed_tokens
            if life.cached is None:
                life.cached = event.computed_tokens
        elif event.reason is not None and life.cached is not None:
            tokens = event.computed_tokens - life.prompt + 1
            if tokens >= 1:
                first_ns = at_ns if life.first_ns is None else life.first_ns
                self._requests.append((life.arrived_ns, event.slot, Served(
                    life.arrived_ns, first_ns, at_ns, max(1, life.prompt - life.cached), tokens, life.prompt,
                    life.hashes, tuple(life.filled), life.held,
                )))
            life.cached = None

    def _iterated(self, event: ev.IterationAdvanced, at_ns: float) -> None:
        self.begun_ns.append(at_ns)
        taking = {slot for slot, life in self._lives.items() if life.state is SlotState.DECODING}
        decoding, prefill = len(taking), 0
        for slot, position in zip(event.slots, event.positions, strict=True):
            life = self._lives.get(slot)
            if life is None:  # the slot was opened before the recording, or in a gap
                self._whole, self._last = False, None
                return
            prefill += max(0, position - life.computed)
            life.computed = position
            taking.add(slot)
        self.tokens_most = max(self.tokens_most, prefill + decoding)
        self.running_most = max(self.running_most, len(taking))
        if self._last is not None:
            began_ns, steps, prompt, decoded, before = self._last
            equation = Equation(at_ns, steps, prompt, decoded * steps, at_ns - began_ns)
            if before & taking and at_ns > began_ns:
                self.equations.append(equation)
            elif before:
                self.last_ones.append(equation)
        self._last = at_ns, event.count, prefill, decoding, taking


def of_recording(recording: Recording) -> Measured:
    """The steps and requests of a recording."""
    reading = _Reading()
    times = origins_of(recording)
    expected = None
    for batch in recording.events():
        for event in batch:
            if expected is not None and event.seq != expected:
                reading.gap()
            expected = event.seq + 1
            reading.take(event, times.get(event.cause, event.at_ns))
    return reading.measured()


def _has_hashes(served: Served, block_tokens: int) -> bool:
    """True if the hashes of all full blocks of a request are known."""
    full = (served.prompt_tokens + served.output_tokens - 1) // block_tokens
    prompt = served.prompt_tokens // block_tokens
    return len(served.hashes) == prompt and len(served.output_hashes) >= full - prompt


def origins_of(recording: Recording) -> dict[int, int]:
    """Each stimulus that carries the engine's own time, to that time."""
    return {
        stimulus.n: stimulus.origin_ns for batch in recording.stimuli() for stimulus in batch
        if stimulus.origin_ns is not None
    }
