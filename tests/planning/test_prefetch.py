"""Prefetch: guesses never change what a lookup may find, everything fetched is accounted for, memory is bounded.

Law of this file: whole machines over seeded loads, with the invariants verified after every stimulus.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some

from kvbm_console.cli.main import cli
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.config import BATCH_LEAST, LeaderConfig
from kvbm_console.core.events import BlocksReady, BlocksStaged, CandidatePlanned
from kvbm_console.core.ids import Route, Tier
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.leader import Leader, Outcome, foresight
from kvbm_console.core.leader.foresight import PrefetchMemory
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import simulate
from kvbm_console.planning.traces import parse_trace
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.link import DEFAULT_LINKS, Fault

REQUESTS = 36
PREDICTORS = ("chain", "ngram", "session")
STOPS = ("best_effort", "wait_complete", "timeout")


def chats(seed: int = 1, requests: int = REQUESTS) -> str:
    """Sessions that come back after a third of a second, more of them than fit."""
    return (
        f"multiturn:requests={requests},sessions=8,prompts=2,system=96,user=64,output=32,turns=4,think=0.3,ramp=0.005,"
        f"seed={seed}"
    )


class Watch:
    """Checks every stimulus's outcome, and counts what was copied ahead."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self.fetched: Counter[int] = Counter()
        self.log: list[Stimulus] = []

    def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
        self.log.append(stimulus)
        leader = self.leader
        if leader is None:
            return
        memory = leader.memory.prefetch
        host = next(pool for pool in leader.state.pools if pool.info.tier is Tier.G2)
        assert len(memory.asked) + len(memory.unused) <= int(leader.config.staging_share * len(host))
        assert memory.unused.keys() <= host.by_hash.keys()
        assert memory.waits.keys() <= leader.state.slots.keys()
        for event in outcome.events:
            if isinstance(event, BlocksStaged) and event.slot in leader.state.slots:
                slot, pool = leader.state.slots[event.slot], leader.state.pools[event.pool]
                if slot.staged:  # what a lookup was given is what its prompt goes on with
                    staged = [pool.hash_of[place] for place in unpack_ids(event.ids)]
                    at = slot.hashes.index(staged[0])
                    assert slot.hashes[at : at + len(staged)] == staged
            elif isinstance(event, CandidatePlanned) and event.route is Route.G3_G2:
                assert event.slot is None
                assert len(unpack_hashes(event.hashes)) <= min(BATCH_LEAST, leader.config.offload_batch_blocks)


def run(
    prefetch: str, stop: str = "best_effort", *, seed: int = 1, requests: int = REQUESTS, hosts: int = 1, g1: int = 40,
    orders: list[StartTransfer] | None = None, **config: Any,
) -> tuple[Rig, Watch]:
    watch = Watch()
    leader = LeaderConfig(
        g2_blocks=48, g3_blocks=400, offload_threshold=0.0, offload_batch_blocks=4, prefetch=prefetch,  # type: ignore[arg-type]
        prefetch_stop=stop, prefetch_timeout_ns=5_000_000, **config,  # type: ignore[arg-type]
    )
    rig = build(
        leader, EngineConfig(g1_blocks=g1), parse_trace(chats(seed, requests)), publish=watch, check=True,
        audit_every=10, hosts=hosts, links=DEFAULT_LINKS,
    )
    watch.leader = rig.leader
    if orders is not None:  # every second of these copies fails, some of them whole

        def fault(order: StartTransfer) -> Fault | None:
            if order.route is not Route.G3_G2:
                return None
            orders.append(order)
            return None if len(orders) % 2 else Fault(blocks=(0,) if len(orders) % 4 else ())

        rig.mover.faults = fault
    rig.run_to_end()
    return rig, watch


def counts(rig: Rig) -> PrefetchMemory:
    """The fate of the guesses, after everything fetched was accounted for."""
    memory = rig.leader.memory.prefetch
    assert memory.fetched == memory.used + memory.evicted + len(memory.unused)
    assert not memory.asked
    assert not memory.waits
    assert memory.late <= memory.from_disk
    return memory


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("prefetch", PREDICTORS)
def test_every_request_ends_and_every_block_is_accounted_for(prefetch: str, stop: str) -> None:
    """With audits all the way (conditions, references, I10, I13, I14)."""
    rig, _ = run(prefetch, stop, seed=2)
    assert rig.engine.totals.finished == REQUESTS
    memory = counts(rig)
    assert rig.leader.state.totals.moved_blocks.get(Route.G3_G2.label, 0) == memory.fetched
    assert (memory.fetched > 0) == (prefetch != "ngram")
    if stop == "wait_complete":
        assert not memory.late


def test_every_stop_rule_acts_where_the_disk_is_slower_than_the_queue() -> None:
    """Nobody waits with best effort, so blocks come late; with the others a lookup waits for as long as it may.

    One wait may bring nothing, where a block before those that were fetched has left the host tier. Hence four loads.
    """
    late: dict[str, int] = {}
    coverage: dict[str, float] = {}
    for stop, timeout_s in (("best_effort", 1.0), ("timeout", 0.05), ("wait_complete", 1.0)):
        found = [
            simulate(SimulateOptions(
                trace=chats(seed), total_kv_blocks=70, kv_cpu_blocks=48, kv_disk_blocks=400, kv_offload_threshold=0.0,
                kv_transfer_bandwidth=0.004, prefetch_stop=stop, prefetch_timeout_s=timeout_s,  # type: ignore[arg-type]
            )).document["prefetch"]
            for seed in range(1, 5)
        ]
        late[stop] = sum(shown["late_blocks"] for shown in found)
        used, disk = (sum(shown[kind] for shown in found) for kind in ("used_blocks", "disk_blocks"))
        coverage[stop] = used / (used + disk)
    assert late["best_effort"] > late["timeout"] > late["wait_complete"] == 0
    assert coverage["best_effort"] < coverage["timeout"] < coverage["wait_complete"]


def test_nothing_is_fetched_and_nothing_remembered_without_a_predictor() -> None:
    rig, _ = run("none")
    memory = counts(rig)
    assert msgspec.structs.replace(memory, from_disk=0) == PrefetchMemory()
    assert memory.from_disk > 0
    assert Route.G3_G2.label not in rig.leader.state.totals.moved_blocks


def test_none_is_byte_for_byte_what_it_is_where_nothing_can_be_fetched() -> None:
    """Without a disk tier a predictor has no work, and neither output nor events tell which was asked for."""
    reports = [
        simulate(SimulateOptions(
            trace=chats(), total_kv_blocks=40, kv_cpu_blocks=60, kv_offload_threshold=0.0,
            prefetch=prefetch,  # type: ignore[arg-type]
        )).document
        for prefetch in ("none", *PREDICTORS)
    ]
    assert all(msgspec.json.encode(report) == msgspec.json.encode(reports[0]) for report in reports)
    assert reports[0]["prefetch"] is None


def test_failed_copies_are_not_counted_as_fetched_and_nobody_waits_for_them() -> None:
    for stop in STOPS:
        orders: list[StartTransfer] = []
        rig, _ = run("chain", stop, orders=orders)
        assert rig.engine.totals.finished == REQUESTS
        failed = sum(1 if number % 4 else order.blocks for number, order in enumerate(orders, 1) if not number % 2)
        assert failed > 0
        assert counts(rig).fetched == sum(order.blocks for order in orders) - failed > 0


@pytest.mark.parametrize("prefetch", PREDICTORS)
def test_hosts_agree_on_what_they_guess(prefetch: str) -> None:
    """Digests of facts and memory are compared after every stimulus."""
    rig, _ = run(prefetch, "timeout", hosts=2, requests=12)
    assert rig.engine.totals.finished == 12


@pytest.mark.parametrize("prefetch", PREDICTORS)
def test_a_leader_restored_from_its_keyframe_guesses_the_same(prefetch: str) -> None:
    rig, watch = run(prefetch, "timeout", seed=3)
    config = rig.leader.config
    whole, restored = Leader(config), None
    for number, stimulus in enumerate(watch.log):
        expected = whole.handle(stimulus).events
        if restored is not None:
            assert restored.handle(stimulus).events == expected
        if number in (len(watch.log) // 3, len(watch.log) * 2 // 3):
            restored = Leader.restore(config, encode_facts(whole.state), whole.export())
    assert restored is not None
    assert restored.memory_digest() == whole.memory_digest()


# --- what each predictor is for ---


def test_chain_fetches_for_those_who_queue() -> None:
    """Behind a long queue, most of what lookups find below the device was fetched before they came."""
    rig, _ = run("chain")
    memory = counts(rig)
    assert memory.used > 0
    assert rig.leader.state.totals.hit_blocks[Tier.G2 - 1] > run("none")[0].leader.state.totals.hit_blocks[Tier.G2 - 1]


def test_session_fetches_for_those_who_will_be_back() -> None:
    """Without a queue: nothing is known but that sessions return after about the same time."""
    rig, _ = run("session", g1=90)
    memory = counts(rig)
    assert memory.used > 0
    assert memory.gap_ns == pytest.approx(0.3e9, rel=0.5)


def test_ngram_knows_what_followed_before() -> None:
    memory = PrefetchMemory()
    assert list(memory.likely([1])) == []
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 6], [1, 7, 8], [1, 7]):
        memory.learn(prompt)
    assert list(memory.likely([0, 1])) == [[2, 3, 4], [7, 8], [6]]
    assert list(memory.likely([1, 2])) == [[3, 4], [5]]
    assert list(memory.likely([4])) == []
    memory.learn([1, 9])  # the rarest of four gives way
    assert len(list(memory.likely([1]))) == foresight.SUCCESSORS


@given(prompts=some.lists(some.lists(some.integers(0, 30), max_size=8), max_size=60))
def test_what_ngram_remembers_is_bounded(prompts: list[list[int]]) -> None:
    memory = PrefetchMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foresight, "CONTEXTS_MAX", 16)
        for prompt in prompts:
            memory.learn(prompt)
            assert len(memory.successors) <= 16
            assert all(1 <= len(known) <= foresight.SUCCESSORS for known in memory.successors.values())
            for way in memory.likely(prompt):
                assert 1 <= len(way) <= foresight.STEPS


def test_sessions_are_bounded_and_their_deadlines_go_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm_console.core.leader import prefetch as occasions

    monkeypatch.setattr(occasions, "SESSIONS_MAX", 3)
    rig, _ = run("session", g1=90)
    memory = counts(rig)
    assert 0 < len(memory.sessions) <= 3
    known = {session.number for session in memory.sessions.values()}
    assert {key for kind, key in rig.leader.memory.deadlines.values() if kind == "prefetch"} <= known


# --- as a user sees it ---


def test_the_report_has_every_figure_by_its_formula() -> None:
    args = ["simulate", "--trace", chats(), "--total-kv-blocks", "40", "--kv-cpu-blocks", "48",
            "--kv-disk-blocks", "400", "--kv-offload-threshold", "0", "--compat",
            "--kv-transfer-bandwidth", "1"]
    document = msgspec.json.decode(CliRunner().invoke(cli, [*args, "--format", "json"]).stdout)
    told = document["prefetch"]
    assert (told["predictor"], told["stop"]) == ("chain", "best_effort")
    assert told["fetched_blocks"] == document["moved_blocks"]["G3>G2"] > 0
    assert told["precision"] == told["used_blocks"] / told["fetched_blocks"]
    assert told["coverage"] == told["used_blocks"] / (told["used_blocks"] + told["disk_blocks"])
    assert told["timeliness"] == told["used_blocks"] / (told["used_blocks"] + told["late_blocks"])
    assert told["wasted_bytes"] == (told["fetched_blocks"] - told["used_blocks"]) * 16 * 131_072
    text = CliRunner().invoke(cli, args).stdout
    assert f"{100 * told['precision']:.2f} %" in text
    assert "prefetch" in text
    assert "prefetch  " not in CliRunner().invoke(cli, [*args, "--prefetch", "none"]).stdout


@pytest.mark.parametrize("said", ["0", "-1", "nan", "inf", "3601"])
def test_a_bad_timeout_is_one_sentence(said: str) -> None:
    result = CliRunner().invoke(
        cli, ["simulate", "--trace", "multiturn:requests=5", "--total-kv-blocks", "9", "--prefetch-timeout-s", said],
        prog_name="kvbm-console",
    )
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--prefetch-timeout-s must be above 0" in result.stderr


def test_fetched_blocks_arrive_like_any_others() -> None:
    """Written places become readable by the same events; a mirror needs to know nothing of predictors."""
    ready = Counter[int]()

    class Seen(Watch):
        def __call__(self, stimulus: Stimulus, outcome: Outcome) -> None:
            super().__call__(stimulus, outcome)
            for event in outcome.events:
                if isinstance(event, BlocksReady):
                    ready[event.pool] += len(unpack_ids(event.ids))

    watch = Seen()
    config = LeaderConfig(g2_blocks=48, g3_blocks=400, offload_threshold=0.0, prefetch="chain")
    rig = build(config, EngineConfig(g1_blocks=40), parse_trace(chats()), publish=watch, check=True)
    watch.leader = rig.leader
    rig.run_to_end()
    host = next(pool for pool in rig.leader.state.pools if pool.info.tier is Tier.G2)
    moved = rig.leader.state.totals.moved_blocks
    assert ready[host.info.pool] == moved[Route.G3_G2.label] + moved[Route.G1_G2.label]
