"""``why --what-if`` on machines under pressure: where a trouble is inevitable, and whether its remedies are the least.

Law of this file: each claim is replayed by the test, in other ways than the search does where there is one.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.analysis.explain import explain
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.main import cli
from kvbm_console.core.audit import audit
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import PrefixScored, SlotMoved, SlotOpened
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import SlotState
from kvbm_console.planning.meter import RequestRecord
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.plan import TIERS
from kvbm_console.planning.recorded import RecordedLoad, RecordedWorkload, read_run
from kvbm_console.planning.run import build_ledger
from kvbm_console.planning.tiered import TieredLedger
from kvbm_console.planning.what_if import Counterfactual, Remedy, Trouble, what_if
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.multiturn import Multiturn, Settings
from tests.planning.test_recorded import options_of, recorded

POLICIES = ("simple_lru", "lrfu_auto", "lfu")


def pressed(seed: int, place: Path) -> tuple[RecordedLoad, list[str]]:
    """A recording of chats on a machine that is too small, and the requests that missed or were preempted there."""
    dice = random.Random(seed)
    tiered = dice.random() < 0.7
    machine = SimulatedMachine(
        leader=LeaderConfig(
            g2_blocks=dice.randrange(20, 60) if tiered else 0, g3_blocks=dice.choice([0, 60]) if tiered else 0,
            offload_threshold=dice.choice([0.0, 0.5, 0.9]), eviction=PolicyConfig(policy=dice.choice(POLICIES)),
        ),
        engine=EngineConfig(g1_blocks=dice.randrange(36, 52), max_running=dice.choice([2, 4]), max_batch_tokens=256),
    )
    settings = Settings(
        sessions=4, requests=14, think=dice.choice([0.05, 0.5]), seed=seed, prompts=2, system=64, user=48, output=80,
    )
    events = recorded(machine, Multiturn(settings), place)
    names: dict[int, str] = {}
    found: dict[str, None] = {}
    for event in events:
        if isinstance(event, SlotOpened):
            names[event.slot] = event.request
        elif (isinstance(event, PrefixScored) and event.again_blocks) or (
            isinstance(event, SlotMoved) and event.new is SlotState.PREEMPTED
        ):
            found[names[event.slot]] = None
    return read_run(str(place)), list(found)


def asked(run: RecordedLoad, place: Path, request: str) -> Counterfactual:
    return what_if(run, explain(evidence_of(Recording.open(place)), request))


# --- replays of the test ---


def outcome(
    run: RecordedLoad, request: str, changed: SimulateOptions, before_ns: int | None = None,
    now: SimulateOptions | None = None,
) -> RequestRecord:
    """The record of the request when the machine is changed in front of everything of this time, or from its start."""
    records: dict[str, RequestRecord] = {}

    def ended(record: RequestRecord) -> None:
        records[record.request] = record

    workload = RecordedWorkload(run.name.partition(":")[2])
    first = changed if before_ns is None else now or options_of(run)
    ledger = build_ledger(first, workload, windows=False, ended=ended)
    if before_ns is not None:
        ledger.engine.run(before_ns - 1)
        ledger.change(changed)
        if isinstance(ledger, TieredLedger):
            assert audit(ledger.leader.state) == []
    while request not in records:
        next_ns = ledger.engine.next_ns
        assert next_ns is not None
        ledger.engine.run(next_ns + 100_000_000)
    return records[request]


def spares(run: RecordedLoad, found: Counterfactual, trouble: Trouble, record: RequestRecord) -> bool:
    """True if the outcome is not the trouble."""
    if trouble.kind == "preemption":
        return record.preemptions == 0
    if trouble.kind == "wait":
        assert record.first_token_ns is not None
        return (record.first_token_ns - record.arrived_ns) / 1e6 <= found.limit_ms
    most = int(trouble.text.split()[-5])
    return min(record.prompt_tokens // run.block_tokens, sum(record.hits)) >= most and not record.preemptions


def alternatives(run: RecordedLoad) -> Iterator[SimulateOptions]:
    """Limits, the threshold and memory without end can change while a machine runs; a tier below also with copies of
    all that is above it."""
    now, engine = options_of(run), run.machine.engine
    for tier in TIERS.values():
        if size := getattr(now, tier):
            yield msgspec.structs.replace(now, **{tier: size + 4_096})
            if tier != "total_kv_blocks":
                yield msgspec.structs.replace(now, **{tier: size + 4_096}, kv_offload_threshold=0.0)
    for threshold in (0.0, 0.5, 0.9) if run.machine.leader.g2_blocks else ():
        yield msgspec.structs.replace(now, kv_offload_threshold=threshold)
    for factor in (0.25, 4):
        yield msgspec.structs.replace(now, max_num_seqs=max(1, int(engine.max_running * factor)))
        yield msgspec.structs.replace(now, max_num_batched_tokens=int(engine.max_batch_tokens * factor))


def told_machine(run: RecordedLoad, trouble: Trouble) -> SimulateOptions:
    """The machine that would have helped before the event. More memory than it has may help less."""
    words = trouble.inevitable.partition("before it, ")[2].removesuffix(" would have helped").split()
    assert words, trouble.inevitable
    fields = [flag.removeprefix("--").replace("-", "_") for flag in words[::2]]
    return msgspec.structs.replace(options_of(run), **{
        field: int(value) if value.isdecimal() else float(value)
        for field, value in zip(fields, words[1::2], strict=True)
    })


def flags_of(remedy: Remedy, less: int = 0) -> list[str]:
    """The flags of a remedy, with so many blocks less of its memory."""
    words = remedy.flags.split()
    memory = {f"--{field.replace('_', '-')}" for field in TIERS.values()}
    return [
        str(int(word) - less) if flag in memory and less else word
        for flag, word in zip(["", *words], words, strict=False)
    ]


def simulated(run: RecordedLoad, request: str, flags: list[str], place: Path) -> RequestRecord:
    """The record of the request by the command ``simulate``."""
    out = place / "rows.jsonl"
    out.unlink(missing_ok=True)
    result = CliRunner().invoke(cli, [
        "simulate", "--trace", run.name, *flags, "--stats-every", "0", "--requests-out", str(out),
    ])
    assert result.exit_code == 0, result.output
    row, = [row for row in map(msgspec.json.decode, out.read_text().splitlines()) if row["request"] == request]
    return RequestRecord(
        request, row["arrived_ns"], prompt_tokens=row["prompt_tokens"], first_token_ns=row["first_token_ns"],
        preemptions=row["preemptions"],
        hits=(sum(row[f"cached_g{tier}_tokens"] for tier in (1, 2, 3)) // run.block_tokens, 0, 0, 0),
    )


def check(seed: int, place: Path, *, wide: bool) -> int:
    """Check every claim about the first request with a remedy, or about three; returns the number of claims."""
    run, names = pressed(seed, place / "run")
    events = [event for batch in Recording.open(place / "run").events() for event in batch]
    claims = 0
    for name in (names[0], names[len(names) // 2], names[-1]) if wide else names:
        if claims and not wide:
            break
        found = asked(run, place / "run", name)
        assert found.alike
        for trouble in found.troubles:
            told = f"seed {seed}, {name}, {trouble}"
            for remedy in trouble.remedies:
                claims += 1
                assert spares(run, found, trouble, simulated(run, name, flags_of(remedy), place)), told
                if remedy.more_blocks:
                    less = simulated(run, name, flags_of(remedy, less=1), place)
                    assert not spares(run, found, trouble, less), told
            if not trouble.inevitable_ns:
                continue
            claims += 1
            at_ns = trouble.inevitable_ns
            event, = [event for event in events if event.seq == trouble.inevitable_seq]
            assert event.at_ns == at_ns, told
            helped = told_machine(run, trouble)
            assert spares(run, found, trouble, outcome(run, name, helped, at_ns)), told
            for later_ns in (1, 20_000_000):
                assert not any(
                    spares(run, found, trouble, outcome(run, name, one, at_ns + later_ns))
                    for one in (helped, *alternatives(run))
                ), told
    return claims


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_grows_in_front_of_all_requests_is_one_that_was_built_so(seed: int, tmp_path: Path) -> None:
    """``lrfu_auto`` sizes its shadows by the capacity at the beginning, so the others are compared."""
    run, names = pressed(seed, tmp_path)
    policy = msgspec.structs.replace(options_of(run).policy, policy=POLICIES[::2][seed % 2])
    now = options_of(run, policy=policy)
    before, differing = outcome(run, names[-1], now), 0
    for tier in TIERS.values():
        if size := getattr(now, tier):
            larger = msgspec.structs.replace(now, **{tier: size + 17})
            grown = outcome(run, names[-1], larger, 0, now)
            assert grown == outcome(run, names[-1], larger)
            differing += grown != before
    assert differing, "and it is not that of the machine as it was"


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_what_is_told_of_a_trouble_is_so_when_it_is_replayed(seed: int, tmp_path: Path) -> None:
    assert check(seed, tmp_path, wide=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 3, *range(5, 20)])
def test_what_is_told_of_many_troubles_is_so(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, wide=True)
