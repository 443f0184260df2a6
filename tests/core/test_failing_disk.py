"""A lower tier that fails every copy costs one try for each block, not an endless loop."""

from kvbm_console.core import stimuli as st
from kvbm_console.core.ids import CandidateStatus
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.dispatch import Dispatcher
from kvbm_console.simulator.embedded import build, default_engine_config, default_leader_config, parse_workload


class DeadDisk:
    """A mover that answers every copy at once with a failure."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.tried = 0

    def start(self, order: StartTransfer) -> None:
        self.tried += order.blocks
        assert self.tried < 100_000, "the same blocks are tried for ever"
        self.dispatcher.submit(st.TransferStarted, order.operation, order.epoch)
        self.dispatcher.submit(st.TransferFailed, order.operation, order.epoch, 0, "dead disk", b"")

    def cancel(self, operation: int) -> None:
        """Nothing is ever waiting."""

    def zero(self, pool: int) -> None:
        """Nothing was ever written."""


def test_a_store_that_fails_is_not_planned_again_at_once() -> None:
    workload = parse_workload("multiturn:sessions=4,turns=2,requests=8,seed=1")
    config = default_leader_config(workload, offload_threshold=0.0, g2_blocks=256, g3_blocks=0)
    rig = build(config, default_engine_config(workload), workload, check=True)
    disk = DeadDisk(rig.dispatcher)
    rig.dispatcher.mover = disk
    rig.run_to_end(60_000_000_000)
    totals = rig.leader.state.totals
    assert rig.done
    assert totals.candidates_ended[CandidateStatus.FAILED] > 0
    assert disk.tried > 0
    assert not rig.leader.state.slots
