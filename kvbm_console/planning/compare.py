"""``compare``: policies and capacities side by side on one trace, next to a policy that knows the future.

Law of this file: every cell is a separate run, a function of the settings alone. Cells run on all cores and are
reported in the order of the grid.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing import active_children, get_context
from typing import Any, Final, TypeVar

import msgspec

from kvbm_console.core.curves import LruCurve
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import PRESETS, PolicyConfig
from kvbm_console.planning.cache_only import COMPARED, Miss, References, bound_of, policy_named, references_of, replay
from kvbm_console.planning.meter import RequestRecord
from kvbm_console.planning.options import SimulateOptions, check
from kvbm_console.planning.run import open_trace, simulate

CELLS_MAX: Final = 10_000
"""A grid beyond this is a mistake in a list."""
BELADY: Final = "belady"
CURVE_POINTS: Final = 64
"""Points of a curve from one block to all, evenly spread on a logarithmic scale."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Setting(msgspec.Struct, frozen=True):
    """A cell of the grid. ``label`` is the policy or ``preset NAME``."""

    label: str
    policy: str
    parameters: PolicyConfig
    options: SimulateOptions
    cache_only: bool

    @property
    def capacity(self) -> tuple[int, int]:
        """Blocks of the device (or of the only pool) and of the host tier."""
        return self.options.total_kv_blocks, 0 if self.cache_only else self.options.kv_cpu_blocks


class RequestOutcome(msgspec.Struct, frozen=True):
    """A request in a cell; ``why`` is the reason of its first miss."""

    request: str
    hits: int
    blocks: int
    why: str


class Cell(msgspec.Struct, frozen=True):
    """The outcome of a setting. Counts are in blocks; ``rows_of`` adds the figures that need the other cells."""

    label: str
    total_kv_blocks: int
    kv_cpu_blocks: int
    hits: int
    lookups: int
    hit_rate: float | None
    ttft_ms_mean: float | None
    evicted_blocks: int
    moved_bytes: int
    thrash_rate: float | None = None
    """The figure of ``simulate``'s report."""
    requests: list[RequestOutcome] = []
    """Every request, if ``keep_requests`` was set."""


def grid(
    options: SimulateOptions, policies: Sequence[str], presets: Sequence[str], totals: Sequence[int],
    hosts: Sequence[int], *, cache_only: bool,
) -> list[Setting]:
    """All settings: capacities outside, policies inside. Raises ``UsageError`` for an impossible setting."""
    for policy in policies:
        if policy not in COMPARED:
            raise UsageError(f"--policies must be of {', '.join(COMPARED)}, got {policy!r}")
    for preset in presets:
        if preset not in PRESETS:
            raise UsageError(f"--presets must be of {', '.join(PRESETS)}, got {preset!r}")
    if cache_only and any(hosts):
        raise UsageError("--cache-only has one pool; it takes --total-kv-blocks and no --kv-cpu-blocks above 0")
    named: list[tuple[str, str, PolicyConfig]] = [
        (policy, policy, options.policy if policy == BELADY else msgspec.structs.replace(options.policy, policy=policy))
        for policy in policies
    ]
    for preset in presets:
        config = PolicyConfig(**PRESETS[preset])
        named.append((f"preset {preset}", config.policy, config))
    settings = [
        Setting(
            label, policy, config,
            msgspec.structs.replace(options, total_kv_blocks=total, kv_cpu_blocks=host, policy=config), cache_only,
        )
        for total, host in product(totals, hosts) for label, policy, config in named
    ]
    check(0 < len(settings) <= CELLS_MAX, "policies", f"a grid of 1 to {CELLS_MAX} cells", len(settings))
    return settings


def without_a_tier(setting: Setting) -> dict[str, Setting]:
    """Each lower tier of a setting, host and disk, to the setting without it. Empty for belady and for one pool.

    Without any lower tier a policy has no work, so the settings of all policies are one there.
    """
    less = {}
    for tier, field in (("host", "kv_cpu_blocks"), ("disk", "kv_disk_blocks")):
        if not setting.cache_only and setting.policy != BELADY and getattr(setting.options, field):
            options = msgspec.structs.replace(setting.options, **{field: 0})
            less[tier] = msgspec.structs.replace(setting, options=options)
            if not options.kv_cpu_blocks + options.kv_disk_blocks:
                rule = PolicyConfig()
                options = msgspec.structs.replace(options, policy=rule)
                less[tier] = Setting(rule.policy, rule.policy, rule, options, False)
    return less


# --- running ---


def run_grid(
    settings: Sequence[Setting], *, workers: int | None = None, keep_requests: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Cell]:
    """Run every cell, on ``workers`` processes (None for a process on each core), in the order of the settings."""
    open_trace(settings[0].options)
    return run_all(partial(run_cell, keep_requests=keep_requests), settings, workers=workers, progress=progress)


def run_all(
    work: Callable[[Item], Result], items: Sequence[Item], *, workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """The results of ``work`` for all items, on ``workers`` processes (None for a process on each core), in order."""
    count = min(len(items), workers or _cores())
    if count == 1:
        results = []
        for done, item in enumerate(items, start=1):
            results.append(work(item))
            if progress is not None:
                progress(done)
        return results
    result_of: dict[int, Result] = {}
    with _workers(count) as pool:
        with _interrupts_wait():  # the processes start here, and their signal mask is ours
            futures = {pool.submit(work, item): at for at, item in enumerate(items)}
        for future in as_completed(futures):
            result_of[futures[future]] = future.result()
            if progress is not None:
                progress(len(result_of))
    return [result_of[at] for at in range(len(items))]


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes that ends at once when the block fails, because a cell may take minutes."""
    # Processes are spawned, because a fork would copy the locks of the parent's threads.
    before = set(active_children())
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    try:
        yield pool
    except BaseException:
        for child in set(active_children()) - before:
            child.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Block SIGINT: ctrl-c reaches every process of a terminal, and workers with this mask leave it to their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


_read: dict[tuple[str, int | None, int | None, int], References] = {}
"""The references of the last trace that this process read, which the cells of a grid share."""


def _references(options: SimulateOptions) -> References:
    key = (options.trace, options.limit, options.seed, options.block_size)
    if key not in _read:
        _read.clear()
        _read[key] = references_of(open_trace(options), options.block_size)
    return _read[key]


def lru_curve(options: SimulateOptions) -> list[tuple[int, float]]:
    """Blocks and hit rate of the exact LRU curve of a pool without an engine, in one pass over the trace: what
    ``simple_lru`` has at each of these capacities."""
    curve = LruCurve()
    for keys in _references(options).keys:
        curve.add(keys)
    if not curve.references:
        return []
    last = max(2, curve.capacities[-1])
    sizes = sorted({round(last ** (at / (CURVE_POINTS - 1))) for at in range(CURVE_POINTS)})
    return [(blocks, curve.hits(blocks) / curve.references) for blocks in sizes]


def run_cell(setting: Setting, keep_requests: bool) -> Cell:
    """Run a setting."""
    if setting.cache_only:
        return _replayed(setting, keep_requests)
    if setting.policy == BELADY:
        return _bound(setting, keep_requests)
    return _simulated(setting, keep_requests)


def _replayed(setting: Setting, keep_requests: bool) -> Cell:
    references = _references(setting.options)
    capacity = setting.options.total_kv_blocks
    policy = policy_named(setting.policy, setting.parameters, capacity, references)
    misses: list[Miss | None] | None = [] if keep_requests else None
    result = replay(references, policy, capacity, misses=misses)
    names = references.names
    requests = [
        RequestOutcome(name, found, len(keys), _why(miss, names))
        for name, found, keys, miss in zip(names, result.hits_of, references.keys, misses or (), strict=False)
    ]
    return Cell(
        setting.label, capacity, 0, result.hits, result.references, result.hit_rate if result.references else None,
        None, result.evicted_blocks, 0, None, requests,
    )


def _why(miss: Miss | None, names: Sequence[str]) -> str:
    if miss is None:
        return "all found"
    if miss.evicted_for is None:
        return f"block {miss.block} never stored"
    return f"block {miss.block} evicted for {names[miss.evicted_for]}"


def _bound(setting: Setting, keep_requests: bool) -> Cell:
    options = setting.options
    names, hits_of, blocks_of, evicted = bound_of(open_trace(options), options)
    hits, lookups = sum(hits_of), sum(blocks_of)
    return Cell(
        setting.label, options.total_kv_blocks, options.kv_cpu_blocks, hits, lookups,
        hits / lookups if lookups else None, None, evicted, 0, None,
        [RequestOutcome(*row, "the future is known") for row in zip(names, hits_of, blocks_of, strict=True)]
        if keep_requests else [],
    )


def _simulated(setting: Setting, keep_requests: bool) -> Cell:
    run = simulate(setting.options, keep_records=keep_requests)
    document = run.document
    return Cell(
        setting.label, setting.options.total_kv_blocks, setting.options.kv_cpu_blocks,
        sum(document["hit_blocks"].values()), document["prompt_blocks"], document["prefix_hit_rate"],
        document["ttft_ms"]["mean"], sum(document["evicted_blocks"].values()), sum(document["moved_bytes"].values()),
        document["thrash_rate"],
        [
            RequestOutcome(record.request, sum(record.hits), record.prompt_blocks, _why_of(record))
            for record in run.records
        ] if keep_requests else [],
    )


def _why_of(record: RequestRecord) -> str:
    if not record.prompt_blocks and record.reason:
        return f"never admitted: {record.reason}"
    return "all found" if record.first_miss is None else f"block {record.first_miss} {record.why_missed}"


# --- results of a grid ---


def differences(cell: Cell, other: Cell, most: int) -> list[tuple[RequestOutcome, RequestOutcome]]:
    """The requests whose hits differ most between two cells, the largest difference first, then by name."""
    others = {outcome.request: outcome for outcome in other.requests}
    pairs = [
        (outcome, others[outcome.request]) for outcome in cell.requests
        if outcome.request in others and outcome.hits != others[outcome.request].hits
    ]
    return sorted(pairs, key=lambda pair: (-abs(pair[0].hits - pair[1].hits), pair[0].request))[:most]


def by_capacity(cells: Sequence[Cell]) -> Iterator[tuple[tuple[int, int], list[Cell]]]:
    """Cells of the same capacities, in the order of the grid."""
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.total_kv_blocks, cell.kv_cpu_blocks), []).append(cell)
    yield from groups.items()


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each cell: its figures, ``best`` for the best policy of its capacity, and the distance to the bound."""
    rows = []
    for _, group in by_capacity(cells):
        rate_of = {cell.label: cell.hit_rate or 0.0 for cell in group}
        bound = rate_of.get(BELADY)
        recency = rate_of.get("simple_lru")
        best = max((rate for label, rate in rate_of.items() if label != BELADY), default=None)
        for cell in group:
            rate = rate_of[cell.label]
            gap = None if bound is None or recency is None or bound <= recency else (rate - recency) / (bound - recency)
            rows.append({
                "policy": cell.label, "total_kv_blocks": cell.total_kv_blocks, "kv_cpu_blocks": cell.kv_cpu_blocks,
                "hits": cell.hits, "lookups": cell.lookups, "hit_rate": cell.hit_rate,
                "best": cell.label != BELADY and rate == best,
                "below_belady": None if bound is None else bound - rate, "gap_closed": gap,
                "ttft_ms_mean": cell.ttft_ms_mean, "evicted_blocks": cell.evicted_blocks,
                "moved_bytes": cell.moved_bytes, "thrash_rate": cell.thrash_rate,
            })
    return rows
