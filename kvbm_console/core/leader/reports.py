"""Reports of the mover: started, finished, failed, rank by rank.

Law of this file: an operation ends when every rank has reported it; a report of an older epoch, a duplicate or a late
one is refused and counted, and changes nothing else but to free the place that a reset had put under quarantine.
"""

from kvbm_console.core import events as ev
from kvbm_console.core import stimuli as st
from kvbm_console.core.candidates import OperationFacts
from kvbm_console.core.columns import pack_ids, unpack_ids
from kvbm_console.core.errors import Refused
from kvbm_console.core.ids import Authority, ReleaseReason
from kvbm_console.core.instructions import ReleaseDeviceBlocks
from kvbm_console.core.leader.frame import Decider

ERROR_CHARS_MAX = 512
"""An error text comes from outside and is recorded with the event; longer ones are cut."""


def transfer_started(leader: Decider, s: st.TransferStarted) -> None:
    """The mover began to copy."""
    operation = _current(leader, s.operation, s.epoch, -1)
    if operation is None:
        return
    if operation.started:
        _refuse(leader, s.operation, s.epoch, -1, "started twice")
    else:
        leader.emit(ev.OperationStarted, s.operation)


def transfer_finished(leader: Decider, s: st.TransferFinished) -> None:
    """One rank has copied its part."""
    _report(leader, s.operation, s.epoch, s.rank, True, "", b"")


def transfer_failed(leader: Decider, s: st.TransferFailed) -> None:
    """One rank could not copy; an error counts as a report."""
    _report(leader, s.operation, s.epoch, s.rank, False, s.error[:ERROR_CHARS_MAX], s.failed)


def _report(leader: Decider, number: int, epoch: int, rank: int, ok: bool, error: str, failed: bytes) -> None:
    if not 0 <= rank < leader.config.ranks:
        raise Refused(f"rank must be from 0 to {leader.config.ranks - 1}, got {rank}")
    operation = _current(leader, number, epoch, rank)
    if operation is None:
        return
    if rank in operation.reported:
        _refuse(leader, number, epoch, rank, "reported twice")
        return
    if any(not 0 <= at < len(operation.targets) for at in unpack_ids(failed)):
        raise Refused(f"failed blocks of operation {number} must be from 0 to {len(operation.targets) - 1}")
    if not operation.started:
        leader.emit(ev.OperationStarted, number)
    leader.emit(ev.OperationReported, number, rank, ok, error, failed)
    if len(operation.reported) == leader.config.ranks:
        leader.aids.complete.append(number)


def _current(leader: Decider, number: int, epoch: int, rank: int) -> OperationFacts | None:
    """The open operation of this epoch; otherwise the report is refused and, if it was late, its places are freed."""
    operation = leader.state.operations.get(number)
    if operation is not None and epoch == leader.state.epoch:
        return operation
    _refuse(leader, number, epoch, rank, "older epoch" if epoch < leader.state.epoch else "not open")
    late = leader.state.late.get(number)
    if late is not None and len(late - {-1}) == leader.config.ranks:
        _lift(leader, number)
    return None


def _refuse(leader: Decider, number: int, epoch: int, rank: int, why: str) -> None:
    leader.emit(ev.CompletionRefused, number, epoch, rank, why)


def _lift(leader: Decider, number: int) -> None:
    """The last rank of an operation of an older epoch has reported: its places are free again."""
    for pool in leader.state.pools:
        if not any(number in keepers for keepers in pool.quarantined.values()):
            continue
        # Several copies may read one place: it is free when the last of them has ended.
        places = sorted(place for place, keepers in pool.quarantined.items() if keepers == [number])
        leader.emit(ev.BlocksDropped, pool.info.pool, number, pack_ids(places), ReleaseReason.EPOCH)
        if pool.info.authority is Authority.LEADER:
            leader.free_places(pool, places)
        else:
            leader.ask(ReleaseDeviceBlocks(pool.info.source, "", pack_ids(places)))
