"""``why --what-if``: each remedy is run again by another way, and a smaller one does not help.

Law of this file: outcomes are read from the events of a leader, and the search reads them from a ledger.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from kvbm_console.analysis.explain import Explanation, explain
from kvbm_console.analysis.walk import evidence_of
from kvbm_console.cli.main import cli
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import PrefixScored, SlotMoved, SlotOpened
from kvbm_console.core.ids import SlotState
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.plan import TIERS
from kvbm_console.planning.recorded import RecordedLoad, RecordedWorkload, read_run
from kvbm_console.planning.run import build_rig
from kvbm_console.planning.what_if import Counterfactual, Remedy, what_if
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.workloads import Capacities, GivenRequests, Request
from tests.planning.test_recorded import Taking, options_of, recorded

ROOT = Path(__file__).resolve().parents[2]
PRESSED = ROOT / "recordings" / "offload-pressure.mcap"
PREEMPTED = ROOT / "recordings" / "preempt-and-resume.mcap"


def explained(path: Path, request: str) -> Explanation:
    return explain(evidence_of(Recording.open(path)), request)


def seen(run: RecordedLoad, request: str, options: SimulateOptions) -> tuple[int, int]:
    """Blocks found at the first admission, and preemptions, by the events of a leader with these options."""
    taking = Taking()
    build_rig(options, RecordedWorkload(run.name.partition(":")[2]), taking, windows=False).run_to_end()
    slot, preemptions = -1, 0
    hits: list[int] = []
    for events in taking.events:
        for event in events:
            if isinstance(event, SlotOpened) and event.request == request:
                slot = event.slot
            elif isinstance(event, PrefixScored) and event.slot == slot:
                hits.append(sum(event.hits))
            elif isinstance(event, SlotMoved) and event.slot == slot and event.new is SlotState.PREEMPTED:
                preemptions += 1
    return hits[0], preemptions


def options_with(run: RecordedLoad, remedy: Remedy, less: int = 0) -> SimulateOptions:
    """The recorded machine with the flags of a remedy, by hand; ``less`` blocks are taken from its memory."""
    words = remedy.flags.split()
    fields: dict[str, Any] = {
        flag[2:].replace("-", "_"): float(value) if "." in value else int(value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    }
    for field in fields.keys() & set(TIERS.values()):
        fields[field] -= less
    return options_of(run, **fields)


@pytest.fixture(scope="module")
def miss() -> Counterfactual:
    return what_if(read_run(str(PRESSED)), explained(PRESSED, "chat.1"))


def test_the_remedies_of_a_miss_find_all_blocks_and_a_block_less_does_not(miss: Counterfactual) -> None:
    run = read_run(str(PRESSED))
    trouble, = miss.troubles
    assert (trouble.kind, miss.alike, miss.recorded_hits) == ("miss", True, 0)
    assert trouble.text == "found 0 of 12 blocks, and 10 with memory without end"
    assert len(trouble.remedies) == 3
    for remedy in trouble.remedies:
        assert seen(run, "chat.1", options_with(run, remedy)) == (10, 0)
        assert seen(run, "chat.1", options_with(run, remedy, less=1))[0] < 10
        assert remedy.outcome.hits == 10
    sizes = [remedy.memory_bytes for remedy in trouble.remedies]
    assert sizes == sorted(sizes)
    assert sizes[0] == 23 * 2**21


def test_a_miss_is_inevitable_from_the_first_loss_of_a_block_that_memory_would_have_kept(miss: Counterfactual) -> None:
    """The tail of a prompt is lost before its head: all ten blocks cannot be found any more when the first is lost."""
    admission, = explained(PRESSED, "chat.1").admissions
    named = [run for run in admission.misses if run.first is not None and run.first < 10]
    first = min(named, key=lambda run: run.seq or 0)
    assert (miss.troubles[0].inevitable_seq, miss.troubles[0].inevitable_ns) == (first.seq, first.at_ns)
    assert first.text in miss.troubles[0].inevitable
    assert (first.seq or 0) < (named[0].seq or 0)


def test_a_preemption_is_avoided_by_the_fewest_blocks() -> None:
    run = read_run(str(PREEMPTED))
    miss, trouble = what_if(run, explained(PREEMPTED, "long-b")).troubles
    assert (miss.text, miss.remedies) == ("found 0 of 7 blocks; memory without end finds no more", [])
    assert (trouble.kind, trouble.text) == ("preemption", "preempted once")
    assert seen(run, "long-b", options_of(run))[1] == 1
    remedy, = trouble.remedies
    assert seen(run, "long-b", options_with(run, remedy))[1] == 0
    assert seen(run, "long-b", options_with(run, remedy, less=1))[1] == 1


def test_a_wait_for_a_seat_is_ended_in_time_or_not_at_all(tmp_path: Path) -> None:
    """Three long answers on two seats: a third seat helps as long as one of the first two has not ended."""
    requests = [Request(f"r{at}", at * 1_000_137, (), tuple(range(20 * at + 1, 20 * at + 7)), 8, 96) for at in range(3)]
    machine = SimulatedMachine(
        leader=LeaderConfig(block_tokens=16), engine=EngineConfig(g1_blocks=64, max_running=2)
    )
    load = GivenRequests("three", requests, Capacities(16, 64, 0, 0, 8_192))
    recorded(machine, load, tmp_path)
    found = what_if(read_run(str(tmp_path)), explained(tmp_path, "r2"), within_ns=50_000_000)
    trouble, = found.troubles
    assert trouble.kind == "wait"
    remedies = {remedy.flags: remedy for remedy in trouble.remedies}
    assert remedies.keys() == {"--max-num-seqs 4", "--max-num-seqs 8"}
    latest_ns = remedies["--max-num-seqs 4"].latest_ns
    assert latest_ns is not None
    assert found.replayed.ttft_ms is not None
    # The request arrives after 2 ms and may wait 50: a seat at 46 ms is in time, and one at 56 ms is not.
    assert 35_000_000 < latest_ns < 56_000_000
    assert trouble.inevitable_ns == latest_ns


def test_a_first_time_cannot_be_found() -> None:
    path = ROOT / "recordings" / "thrash.mcap"
    trouble, = what_if(read_run(str(path)), explained(path, "chat-0.0")).troubles
    assert trouble.remedies == []
    assert trouble.inevitable == "the other blocks are asked for the first time"


# --- the command ---


def why(*words: str) -> Result:
    return CliRunner().invoke(cli, ["why", *words], prog_name="kvbm-console")


def test_the_command_prints_the_remedies_and_their_json(miss: Counterfactual) -> None:
    text = why("long-b", str(PREEMPTED), "--what-if").stdout
    assert "long-b   replayed as recorded: 0 blocks found, 1 preemptions" in text
    assert "--total-kv-blocks 27             7  14 MiB      0" in text
    document = msgspec.json.decode(why("chat.1", str(PRESSED), "--what-if", "--format", "json").stdout)
    assert msgspec.convert(document, Counterfactual).troubles == miss.troubles


@pytest.mark.parametrize(("words", "said"), [
    (("chat.1", "--what-if", "--target", "unix:/nowhere.sock"), "/nowhere.sock"),
    (("chat.1", str(PRESSED), "--what-if", "--target", "unix:/nowhere.sock"), "give a recording or --target, not both"),
    (("chat.1", str(PRESSED), "--within", "5ms"), "--within needs --what-if"),
    (("r#2", str(ROOT / "recordings" / "clone.mcap"), "--what-if"), "has no request"),
    (("chat.0#2", str(ROOT / "recordings" / "clone.mcap"), "--what-if"), "is a clone"),
])
def test_a_mistake_is_one_sentence(words: tuple[str, ...], said: str) -> None:
    result = why(*words)
    assert result.exit_code in (2, 3)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
