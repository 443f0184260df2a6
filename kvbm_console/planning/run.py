"""``simulate``: a trace through engine and tiers in virtual time.

Law of this file: everything is checked before the first request arrives, and the report depends on the options alone.
Instances share nothing: each has its own engine, leader and links, and its share of the requests.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from kvbm_console.bytes.ranks import BytesReport
from kvbm_console.core.errors import UsageError
from kvbm_console.core.ids import ResetMode
from kvbm_console.core.stimuli import ResetRequested
from kvbm_console.planning.connector import ConnectorLedger, refusal
from kvbm_console.planning.ledger import MachineLedger
from kvbm_console.planning.measured import SERVED_MAX, Served
from kvbm_console.planning.meter import Meter, RequestRecord, StatsLine
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.recorded import RecordedLoad, RecordedWorkload
from kvbm_console.planning.report import InstanceMeasures, make_report, measure
from kvbm_console.planning.tiered import TieredLedger
from kvbm_console.planning.traces import note_of, parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.multiturn import Multiturn
from kvbm_console.simulator.workloads import Capacities, Request, Workload

AUDIT_EVERY: Final = 50
"""Stimuli between two full audits under ``--check``; the cheap invariants are verified after every one."""
COMPARE_EVERY: Final = 50
"""Stimuli between two comparisons of the facts of hosts without ``--check``. A digest takes as long as a stimulus, and
with pools of 16,000 places three times as long."""

Progress = Callable[[int], None]
Ended = Callable[[int, RequestRecord], None]
"""Called with the instance and the record of each request that has ended."""


class SimulateRun(msgspec.Struct, frozen=True):
    """A finished run. ``records`` has each request if records were kept, or never dropped (``cleanup`` none)."""

    document: dict[str, Any]
    """The report, under the keys of ``report.KEYS``."""
    records: list[RequestRecord]
    held_records: int
    """Records of finished requests that were in memory when the last request ended."""
    carried: BytesReport | None = None
    """The fate of the bytes of a run that has some."""
    prefill_tokens_most: int = 0
    decode_requests_most: int = 0
    """The largest counts of one iteration."""


def simulate(
    options: SimulateOptions, *, progress: Progress | None = None, stats: Callable[[StatsLine], None] | None = None,
    keep_records: bool = False, windows: bool = True, leader: bool = False, ended: Ended | None = None,
) -> SimulateRun:
    """Run the trace to its end. ``progress`` gets the number of ended requests, ``stats`` the stats lines, ``ended``
    the instance and the record of each request.

    Undisturbed iterations run together unless ``windows`` is off. A ledger counts without events (``counted``) unless
    ``leader`` is on. The report and the stats lines are the same.
    """
    workload = open_trace(options)
    shares = [workload] if options.instances == 1 else [
        share_of(options, index) for index in range(options.instances)
    ]
    if (why := refusal(options)) is not None:
        raise UsageError(why)
    records: list[RequestRecord] = []
    connected = options.connects
    counts = connected or (counted(options, keep_records) and not leader)
    carried: BytesReport | None = None
    parts: list[_Part] = []
    done = 0
    for index, share in enumerate(shares):
        before = done

        def report(finished: int, before: int = before) -> None:
            if progress is not None:
                progress(before + finished)

        tell = None if ended is None else partial(ended, index)
        if connected and keep_records:
            tell = partial(_keep, records, tell)
        if counts:
            part = _count_share(build_ledger(options, share, stats, windows=windows, ended=tell), report)
        else:
            meter = Meter(
                keep_records=keep_records or options.cleanup != "incremental", stats_every=options.stats_every,
                stats=stats, ended=tell,
            )
            rig = build_rig(options, share, meter, windows=windows)
            with closing(rig):
                part = _run_share(options, rig, meter, report, keep_records)
            carried = None if rig.ranks is None else rig.ranks.report
        parts.append(part)
        done += part.measures.engine.finished
        report(0, done)
    records += [record for part in parts for record in part.records]
    return SimulateRun(
        make_report(options, note_of(workload), [part.measures for part in parts]), records,
        sum(part.held_records for part in parts), carried,
        max(part.measures.engine.prefill_tokens_most for part in parts),
        max(part.measures.engine.decode_requests_most for part in parts),
    )


def _keep(
    records: list[RequestRecord], tell: Callable[[RequestRecord], None] | None, record: RequestRecord
) -> None:
    records.append(record)
    if tell is not None:
        tell(record)


class _Part(msgspec.Struct, frozen=True):
    """The result of an instance; see ``SimulateRun``."""

    measures: InstanceMeasures
    records: list[RequestRecord] = []
    held_records: int = 0


def _run_share(options: SimulateOptions, rig: Rig, meter: Meter, report: Progress, keep_records: bool) -> _Part:
    """Run an instance with its leader."""
    rig.run_to_end(progress=report)
    rig.dispatcher.compare_hosts()
    meter.point("decode")
    measures, held = measure(rig, meter), len(meter.records)
    if options.cleanup != "none":
        rig.dispatcher.submit(ResetRequested, ResetMode.LOGICAL)
        if not keep_records:
            meter.free_finished()
    meter.point("cleanup")
    return _Part(measures, meter.records, held)


def _count_share(ledger: MachineLedger, report: Progress) -> _Part:
    """Run an instance without events."""
    ledger.run_to_end(report)
    ledger.point("decode")
    measures = ledger.measures()
    ledger.clear()
    ledger.point("cleanup")
    return _Part(measures)


def counted(options: SimulateOptions, keep_records: bool = False) -> bool:
    """True if no event is needed: only the report, the stats lines and the ended requests are wanted."""
    return not (
        options.check or options.hosts > 1 or options.ranks > 1 or options.with_bytes is not None or keep_records
        or options.cleanup == "none"
    )


def open_trace(options: SimulateOptions) -> Workload:
    """The workload of the options. Raises ``UsageError`` for an endless workload and for a seed of a recorded trace."""
    workload = parse_trace(options.trace, options.limit)
    if options.seed is not None:
        if not isinstance(workload, Multiturn):
            raise UsageError(f"--seed needs a generated trace, got {options.seed} with {workload.name}")
        workload = Multiturn(msgspec.structs.replace(workload.settings, seed=options.seed))
    if workload.endless:
        raise UsageError(f"--trace {workload.name} never ends; say how many requests with --limit")
    return workload


def build_rig(options: SimulateOptions, workload: Workload, meter: Meter, *, windows: bool = True) -> Rig:
    """An instance, ready to run. ``windows`` begin after the first decoding iteration, because its stats line is
    reported."""
    rig = build(
        options.leader_config(), engine_config(options), workload, publish=meter, hosts=options.hosts,
        check=options.check, audit_every=AUDIT_EVERY, links=options.links(), with_bytes=options.with_bytes,
        compare_every=1 if options.check else COMPARE_EVERY,
    )
    if isinstance(workload, RecordedWorkload):
        workload.follow(rig.mover, rig.leader)
    meter.watch(rig.leader.state)
    if windows:
        def begin() -> None:
            rig.engine.windows = True

        meter.after_prefill = begin
    return rig


def build_ledger(
    options: SimulateOptions, workload: Workload, stats: Callable[[StatsLine], None] | None = None, *,
    windows: bool = True, ended: Callable[[RequestRecord], None] | None = None,
) -> MachineLedger:
    """An instance without events, for options that are ``counted``."""
    config = engine_config(options)
    if options.connects:
        connected = ConnectorLedger(
            options.leader_config(), options.links(), config, workload, stats_every=options.stats_every, stats=stats,
            windows=windows, ended=ended,
        )
        if isinstance(workload, RecordedWorkload):
            workload.follow_loads(connected.mover, connected.name_of)
        return connected
    if options.tiered or len(config.groups) > 1:  # the counts of a leader are those of the first group
        ledger = TieredLedger(
            options.leader_config(), options.links(), config, workload,
            stats_every=options.stats_every, stats=stats, windows=windows, ended=ended,
        )
        if isinstance(workload, RecordedWorkload):
            workload.follow(ledger.mover, ledger.leader)
        return ledger
    return MachineLedger(
        config, workload, options.block_size, stats_every=options.stats_every, stats=stats,
        windows=windows, ended=ended,
    )


def engine_config(options: SimulateOptions) -> EngineConfig:
    """The numbers of the engine."""
    return EngineConfig(**options.engine_fields())


def by_machine(
    load: RecordedLoad, requests: Sequence[Served]
) -> Callable[[EngineConfig], list[tuple[Served, RequestRecord]]]:
    """A function that serves at most ``SERVED_MAX`` requests of a recording by its machine, with lower tiers, copies
    and the step times that it gets."""
    def again(config: EngineConfig) -> list[tuple[Served, RequestRecord]]:
        options = SimulateOptions(trace=load.name, **{
            **load.option_fields(), "step_base": config.step_base_ns, "step_prefill_token": config.prefill_token_ns,
            "step_decode_request": config.decode_request_ns,
        })
        arrived: dict[int, list[RequestRecord]] = {}

        def ended(record: RequestRecord) -> None:
            arrived.setdefault(record.arrived_ns, []).append(record)

        workload = RecordedWorkload(load.name.partition(":")[2], SERVED_MAX)
        build_ledger(options, workload, windows=False, ended=ended).run_to_end()
        return [
            (real, record) for real in requests
            if (found := arrived.get(round(real.arrived_ns))) and (record := found.pop()).first_token_ns is not None
        ]

    return again


def share_of(options: SimulateOptions, index: int) -> Workload:
    """The requests of one of several instances: every n-th request of a recorded trace, or a share of the chats."""
    workload = open_trace(options)
    count = options.instances
    if not isinstance(workload, Multiturn):
        return _EveryNth(workload, index, count)
    settings = workload.settings
    if settings.sessions < count or settings.requests < count:
        raise UsageError(f"--instances must be at most the sessions and requests of {workload.name}, got {count}")

    def part(whole: int) -> int:
        return whole // count + (index < whole % count)

    return Multiturn(
        msgspec.structs.replace(
            settings, sessions=part(settings.sessions), requests=part(settings.requests),
            seed=(settings.seed * INSTANCE_SEEDS + index) % 2**63,
        )
    )


INSTANCE_SEEDS: Final = 1_000_003
"""Distance between the seeds of instances, so that neighbouring values of ``--seed`` share no seed."""


class _EveryNth:
    """Round robin over a trace that has its own arrival times."""

    def __init__(self, workload: Workload, index: int, count: int) -> None:
        self._workload = workload
        self._index = index
        self._count = count
        self.name = workload.name
        self.endless = workload.endless

    @property
    def capacities(self) -> Capacities:
        """The capacities of the whole workload."""
        return self._workload.capacities

    def begin(self, block_tokens: int) -> None:
        """Begin the whole workload."""
        self._workload.begin(block_tokens)

    def arrivals(self) -> Iterator[Request]:
        """Every n-th request."""
        return islice(self._workload.arrivals(), self._index, None, self._count)

    def finished(self, request: Request, at_ns: int) -> Request | None:
        """The request that follows in the whole workload."""
        return self._workload.finished(request, at_ns)
