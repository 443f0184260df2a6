"""A tier whose places were never used costs nobody memory: the service, a reader of its stream, a console.

Law of this file: facts of 2**24 places reach a reader, and all together take less than one copy of their bytes.
"""

import subprocess
import sys

import pytest

from kvbm_console.client.subscription import SNAPSHOT_BYTES_MAX, StreamItems
from kvbm_console.core.errors import ConnectionLost
from kvbm_console.wire.v1 import console_pb2 as pb
from tests.server.daemons import ROOT

GROWTH_MAX = 32 * 1024 * 1024
SERVED = """if True:
    import sys
    from kvbm_console.client.past import copies
    from kvbm_console.client.subscription import StreamItems
    from kvbm_console.core.config import LeaderConfig
    from kvbm_console.core.ids import Authority, Tier
    from kvbm_console.core.snapshots import digest
    from kvbm_console.core.stimuli import PoolDeclared
    from kvbm_console.service import LeaderService
    from kvbm_console.wire.frames import snapshot_frames
    from kvbm_console.wire.v1 import console_pb2 as pb
    from tui.model.mirror import Mirror
    from tui.model.reel import Reel

    places = int(sys.argv[1])
    service = LeaderService(LeaderConfig(g2_blocks=places), lambda: 0)
    service.start()
    service.dispatcher.submit(PoolDeclared, 0, 0, Tier.G2, "CPU", places, 16, Authority.LEADER)
    service.broadcaster.flush()
    service.keyframe()
    snapshot = service.snapshot()
    assert len(service.state.pools[0]) == places
    reader = StreamItems("the daemon")
    taken = [
        reader.take(pb.SubscribeReply.FromString(frame))
        for frame in snapshot_frames(snapshot.seq, snapshot.at_ns, "run", snapshot.facts, snapshot.digest)
    ][-1]
    past = copies([taken])
    mirror, reel = Mirror(), Reel(eager=True)
    mirror.take(taken, 0)
    reel.add(taken, lambda: 0)
    reel.look(mirror, lambda: 0)
    for state in (taken.state, *(item.state for item in past()), reel.state_at(snapshot.seq - 1)):
        assert digest(state) == snapshot.digest == service.digest()[1]
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_with(places: int) -> int:
    """The most memory in bytes that a process of its own has resident, which serves and reads so many places."""
    done = subprocess.run([sys.executable, "-c", SERVED, str(places)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout)


def test_a_tier_that_was_never_used_costs_neither_the_service_nor_its_readers() -> None:
    assert peak_with(2**24) - peak_with(16) < GROWTH_MAX


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([pb.SubscribeReply(snapshot_begin=pb.SnapshotBegin(total_bytes=SNAPSHOT_BYTES_MAX + 1))], "above 1073741824"),
        ([pb.SubscribeReply(snapshot_begin=pb.SnapshotBegin(total_bytes=5)),
          pb.SubscribeReply(snapshot_part=pb.SnapshotPart(data=bytes(6)))], "a snapshot without end"),
        ([pb.SubscribeReply(snapshot_begin=pb.SnapshotBegin(total_bytes=5)),
          pb.SubscribeReply(snapshot_part=pb.SnapshotPart(data=bytes(4))),
          pb.SubscribeReply(snapshot_end=pb.SnapshotEnd())], "an incomplete snapshot"),
        ([pb.SubscribeReply(snapshot_part=pb.SnapshotPart(data=bytes(4))),
          pb.SubscribeReply(snapshot_end=pb.SnapshotEnd())], "an incomplete snapshot"),
    ],
)
def test_a_snapshot_that_lies_is_refused(replies: list[pb.SubscribeReply], says: str) -> None:
    reader = StreamItems("the daemon")
    for reply in replies[:-1]:
        reader.take(reply)
    with pytest.raises(ConnectionLost, match=f"the daemon sent .*{says}"):
        reader.take(replies[-1])
