"""Our own leader with the embedded engine, driven through a scenario, under the monitors of an exploration.

The engine, the mover and the leader are those of ``serve`` and ``simulate``. ``Contents`` stands beside them and keeps
the prefix in each place, as bytes would. A model writes the prefix when blocks are filled, and a copy carries the
prefix at its start or at its end. A reallocated place loses its prefix at once. A running request whose block does not
hold its own prefix has read wrong bytes.

| monitor | comes from |
|---|---|
| right content | ``Contents``, and the contracts of ``ContractShadow`` about places |
| truth of answers | ``ContractShadow`` about hits; at the end the content of each tier, and the mirror |
| no leak | ``ContractShadow.finished`` |
| progress | the engine stands still without a hold, or is not done after ``STEPS_MAX`` steps |
| bounded wait | a request is overtaken ``OVERTAKEN_MAX`` times |
| no crash | an invariant or another exception |

Law of this file: the leader is judged by its events and by contents alone. Its facts are compared only with a fold.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_hashes, unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import FoldError, InternalError, InvariantViolation
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import Note, ResetMode, SlotState
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.leader import Outcome
from kvbm_console.core.snapshots import digest
from kvbm_console.core.state import CacheState
from kvbm_console.explore.contracts import Broken, ContractShadow
from kvbm_console.explore.leader_faults import COPY_FAULTS, plant, planted
from kvbm_console.explore.scenario import BLOCK, Arrive, CacheReset, Scenario, tokens_of
from kvbm_console.explore.vllm import OVERTAKEN_MAX, STEPS_MAX, Found, RunVerdict, ScenarioRun
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.link import DEFAULT_LINKS, Fault, LinkSpec
from kvbm_console.simulator.workloads import Capacities, GivenRequests, Request
from kvbm_console.testing.run import taping

STEP_NS: Final = 1_000_000
"""A step of the embedded engine, and of the scenario's clock."""
TOKEN_BYTES: Final = 1_000
HASH: Final = 2**63 - 1
DETAIL_CHARS_MAX: Final = 1_000
At = tuple[int, int]
"""A place: pool and index."""


class LeaderRelease:
    """The leader of this program."""

    name, version = "kvbm-console's", "leader"


def load_of(scenario: Scenario) -> GivenRequests:
    """The requests of a scenario as a workload."""
    requests: list[Request] = []
    chains: dict[str, tuple[list[int], list[int]]] = {}
    for action in scenario.actions:
        if isinstance(action, Arrive):
            before, chain = chains.get(action.after, ((), ()))
            tokens, contents = [*before], [*chain]
            _extend(tokens, contents, tokens_of(action.prompt))
            prompt = len(tokens)
            for _ in range(action.output):
                _extend(tokens, contents, [contents[-1] % 991 + 2])
            chains[action.name] = tokens, contents
            hashes = [content & HASH or 1 for content in contents[BLOCK - 1 :: BLOCK]]
            requests.append(Request(
                action.name, action.step * STEP_NS, tuple(hashes[: prompt // BLOCK]),
                tuple(hashes[prompt // BLOCK :]), prompt, action.output,
            ))
    return GivenRequests("explore", requests, Capacities(BLOCK, 64, 0, 0, 256))


def _extend(tokens: list[int], contents: list[int], more: list[int]) -> None:
    content = contents[-1] if contents else 1
    for token in more:
        content = hash((content, token)) or 1
        tokens.append(token)
        contents.append(content)


class Contents:
    """The prefix in each place. A copy reads and writes at its start, or at its end if the scenario says so."""

    def __init__(self, copies: tuple[int, ...], faults: tuple[str, ...]) -> None:
        self.copies, self.faults = copies, faults
        self.lies: dict[At, int] = {}
        self.moved = self.seen = 0
        self._running: dict[int, tuple[list[At], list[At], bool]] = {}
        self._started: set[int] = set()

    def before(self, stimulus: st.Stimulus) -> None:
        """Move the bytes of a copy that ends, before the leader hears of the end."""
        if isinstance(stimulus, st.TransferFinished | st.TransferFailed) and stimulus.operation in self._running:
            sources, targets, late = self._running.pop(stimulus.operation)
            failed = unpack_ids(stimulus.failed) or range(len(sources)) if isinstance(
                stimulus, st.TransferFailed) else ()
            if late:
                self._copy(sources, targets, failed)

    def take(self, events: list[ev.Event]) -> None:
        """Apply the events of a stimulus."""
        for event in events:
            if isinstance(event, ev.DeviceBlocksAssigned):
                for index in unpack_ids(event.ids)[event.reused :]:
                    self.lies[event.pool, index] = 0
            elif isinstance(event, ev.BlocksFilled):
                for index, key in zip(unpack_ids(event.ids), unpack_hashes(event.hashes), strict=True):
                    self.lies[event.pool, index] = key
            elif isinstance(event, ev.CandidatePromoted):
                entry = self.copies[self.seen % len(self.copies)]
                self.seen += 1
                sides = [[(pool, index) for index in unpack_ids(ids)] for pool, ids in (
                    (event.source_pool, event.sources), (event.target_pool, event.targets))]
                self._running[event.operation] = sides[0], sides[1], entry % 3 != 0
            elif isinstance(event, ev.OperationStarted):
                self._started.add(event.operation)
                sources, targets, late = self._running[event.operation]
                if not late:
                    self._copy(sources, targets, ())

    def _copy(self, sources: list[At], targets: list[At], failed: Any) -> None:
        pairs = [pair for at, pair in enumerate(zip(sources, targets, strict=True)) if at not in failed]
        for name in self.faults:
            if name in COPY_FAULTS and pairs:
                pairs = COPY_FAULTS[name][1](pairs)
        for source, target in pairs:
            self.lies[target] = self.lies.get(source, 0)
            self.moved += 1


class LeaderMachine:
    """A leader in a scenario."""

    def __init__(
        self, release: LeaderRelease, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...] = (),
    ) -> None:
        self.scenario, self.faults = scenario, faults
        self.run = ScenarioRun()
        self.contents = Contents(scenario.copies, faults)
        self.mirror = CacheState()
        self.overtaken: dict[str, int] = {}
        self._copies = 0
        resets = any(isinstance(action, CacheReset) for action in scenario.actions)
        self.shadow = ContractShadow(BLOCK, TOKEN_BYTES * BLOCK, () if resets or not self._option("asynchronous") else (
            self._links()), every=20)

    def _option(self, name: str) -> Any:
        return self.scenario.option(name)

    def _links(self) -> tuple[LinkSpec, ...]:
        """Links on which a copy takes as many steps as the scenario's copies do on average."""
        waits = [entry // 3 for entry in self.scenario.copies]
        base = sum(waits) * STEP_NS // len(waits)
        return tuple(
            LinkSpec(name=link.name, routes=link.routes, base_latency_ns=base, bytes_per_s=1e9)
            for link in DEFAULT_LINKS)

    def play(self) -> ScenarioRun:
        """Run to the end, or to the first verdict."""
        try:
            with planted(self.faults):
                self._play()
        except Found as found:
            self._end(found.monitor, found.sentence, found.kind)
        except Broken as broken:
            contract = str(broken).partition(" ")[0]
            monitor = "truth of answers" if contract in ("BC-3", "BC-5") else "right content"
            self._end(monitor, str(broken)[:300], contract)
        except (InternalError, FoldError) as error:
            stuck = "is stuck at" in str(error)
            kind = error.rule if isinstance(error, InvariantViolation) else type(error).__name__
            self._end("progress" if stuck else "no crash", str(error)[:300], "deadlock" if stuck else str(kind))
        except Exception as error:
            self._end("no crash", f"{type(error).__name__}: {str(error)[:200]}", type(error).__name__)
        self.run.moved_blocks = self.contents.moved
        return self.run

    def _end(self, monitor: str, sentence: str, kind: str) -> None:
        self.run.verdict = RunVerdict(monitor, self.run.steps, sentence, f"{monitor}: {kind}")

    def _play(self) -> None:
        scenario, option = self.scenario, self._option
        tiered = min(scenario.host_blocks, option("g3_blocks")) > 0
        config = LeaderConfig(
            block_tokens=BLOCK, g2_blocks=scenario.host_blocks, g3_blocks=option("g3_blocks"),
            offload_law=option("offload_law"), offload_threshold=option("offload_threshold"),
            offload_link_busy="skip", asynchronous=option("asynchronous"),
            offload_batch_blocks=option("offload_batch_blocks"),
            eviction=PolicyConfig(policy=option("policy")), prefetch=option("prefetch") if tiered else "none",
        )
        engine = EngineConfig(
            g1_blocks=scenario.device_blocks, max_batch_tokens=scenario.batch_tokens, max_running=scenario.max_running,
            step_base_ns=STEP_NS, prefill_token_ns=0, decode_request_ns=0, patience_ns=option("patience_ns"),
            token_bytes=TOKEN_BYTES,
        )
        rig = build(config, engine, load_of(scenario), publish=self._publish, links=self._links(), check=True)
        self.rig: Rig = rig
        plant(rig, self.faults)
        if option("fails"):
            rig.mover.faults = self._fault
        for action in scenario.actions:
            if isinstance(action, CacheReset):
                rig.calendar.at(action.step * STEP_NS, self._reset)
        rig.run_to_end(STEPS_MAX * STEP_NS)
        if not rig.done:
            raise Found("progress", f"not done after {STEPS_MAX} steps", "endless")
        self._finish(rig)

    def _reset(self) -> None:
        self.rig.dispatcher.submit(st.ResetRequested, ResetMode.LOGICAL, "explore")

    def _finish(self, rig: Rig) -> None:
        try:
            self.shadow.finished()
        except Broken as broken:
            raise Found("no leak", str(broken)[:300], "something is left") from broken
        for at, place in self.shadow.places.items():
            if place.ready and self.contents.lies.get(at) != place.hash:
                raise Found("truth of answers", f"place {at[1]} of {self._tier(at)} is said to hold {place.hash:x} and "
                            f"holds {self.contents.lies.get(at, 0):x}", f"{self._tier(at)} at the end")
        if digest(self.mirror) != rig.leader.digest():
            raise Found("truth of answers", "folding the events does not give the leader's facts", "mirror")

    def _tier(self, at: At) -> str:
        return self.shadow.tiers[at[0]].name

    def _fault(self, order: StartTransfer) -> Fault | None:
        self._copies += 1
        return Fault(blocks=(0,)) if self._copies % self._option("fails") == 0 else None

    def _publish(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        events = list(outcome.events)
        self.contents.before(stimulus)
        self.contents.take(events)
        self.run.digest = hash((self.run.digest, len(events)))
        for event in events:
            self.mirror.apply(event)
            if isinstance(event, ev.InvariantViolated):
                raise Found("no crash", f"{event.rule} was broken: {event.detail[:200]}", event.rule)
            if isinstance(event, ev.SlotMoved):
                self._moved(event)
        self.shadow.take(events)
        if isinstance(stimulus, st.IterationScheduled):
            self.run.steps += 1
            self._read()

    def _read(self) -> None:
        """The forward pass reads every computed block of the requests that run."""
        for life in self.shadow.slots.values():
            if life.state not in (SlotState.PREFILLING, SlotState.DECODING):
                continue
            pool = self.shadow._device()
            for at, block in enumerate(life.blocks[: len(life.hashes)]):
                if not self.shadow.places[pool, block].ready:
                    break
                self.run.reads += 1
                found = self.contents.lies.get((pool, block), 0)
                if found != life.hashes[at]:
                    raise Found("right content", f"request {life.request} reads block {at} in place {block} and wants "
                                f"{life.hashes[at]:x}, but finds {found:x}", "read")

    def _moved(self, event: ev.SlotMoved) -> None:
        self.run.pairs.add((event.old.label, event.new.label))
        if event.new is not SlotState.PREFILLING or event.old not in (SlotState.INITIALIZED, SlotState.ONBOARD_STAGED):
            return
        for number, life in self.shadow.slots.items():
            if number < event.slot and life.state in (SlotState.INITIALIZED, SlotState.ONBOARD_STAGED):
                self.overtaken[life.request] = self.overtaken.get(life.request, 0) + 1
                if self.overtaken[life.request] > OVERTAKEN_MAX:
                    raise Found("bounded wait", f"request {life.request} was overtaken {OVERTAKEN_MAX} times by "
                                "requests that arrived later", "overtaken")


class Recorded(LeaderMachine):
    """A machine that writes its recording, with the verdict as its last event."""

    def __init__(self, scenario: Scenario, faults: tuple[str, ...], path: Path, tell: Callable[[Any], None]) -> None:
        super().__init__(LeaderRelease(), {}, scenario, faults)
        self._path, self._tell = path, tell
        self._ended = False

    def play(self) -> ScenarioRun:
        """Run with a tape, and save the recording of a verdict."""
        with taping() as tapes:
            run = super().play()
            self._ended = True
            if run.verdict is not None:
                detail = f"{run.verdict.monitor}: {run.verdict.sentence}"[:DETAIL_CHARS_MAX]
                self.rig.dispatcher.submit(st.NoteReported, Note.VERDICT, detail)
                tapes.all[0].save(self._path, run.verdict.signature, program="explore", label="explore")
                self._tell({"recorded": str(self._path)})
        return run

    def _publish(self, stimulus: st.Stimulus, outcome: Outcome) -> None:
        if not self._ended:
            super()._publish(stimulus, outcome)

    def tell_rest(self) -> None:
        """Nothing: ``play`` has reported the recording."""


def recorded(
    release: LeaderRelease, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...], path: str,
    tell: Callable[[Any], None],
) -> LeaderMachine:
    """A machine that writes ``path`` at its end."""
    return Recorded(scenario, faults, Path(path), tell)


ENGINE: Final = (LeaderRelease, LeaderMachine)
"""Release and machine, as the worker makes them."""
