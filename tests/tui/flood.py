"""A daemon that plays a recording at a steady rate: the real service and its stream, with events instead of an engine.

Law of this file: it never waits for a reader; events come at their time or, when the machine cannot, as fast as it can.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Final

import grpc

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Note
from kvbm_console.core.snapshots import encode_facts
from kvbm_console.core.stimuli import NoteReported
from kvbm_console.recording.reader import Recording
from kvbm_console.service import HEARTBEAT_S, LeaderService, Snapshot
from kvbm_console.stream.ring import Ring
from kvbm_console.wire.protocol import SERVER_OPTIONS
from server.options import Endpoint
from server.servicer import ConsoleServicer, Identity

SLICE_S: Final = 0.005
"""Events are published in slices of this length, as from an engine with short iterations."""
BLOCK_BYTES: Final = 131_072


class Tape(LeaderService):
    """A service whose facts are a recording's."""

    def __init__(self, recording: Recording, rate: int) -> None:
        start = recording.state_at(recording.first_seq)
        super().__init__(LeaderConfig(), time.monotonic_ns, ring=Ring(next_seq=start.seq))
        self.recording, self.rate = recording, rate
        self.clock = lambda: self.leader.state.at_ns
        self.leader.state = start
        self.met = asyncio.Event()
        """Somebody wants to see it."""

    def snapshot(self) -> Snapshot:
        """The facts now."""
        self.met.set()
        self.broadcaster.flush()
        state = self.leader.state
        return Snapshot(state.seq, 0, state.at_ns, encode_facts(state))

    def _take_base(self) -> None:
        """Nothing is ever undone here, so no base is kept."""
        self._base = self._shown = Snapshot(0, 0, 0, b"")
        self._since_base.clear()

    async def beat(self) -> None:
        """Heartbeats and scheduled flushes; nothing that would submit events of its own."""
        self.broadcaster.later = asyncio.get_running_loop().call_later
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.broadcaster.beat()

    async def play(self) -> None:
        """Publish all events of the recording, each at its time."""
        state, broadcaster = self.leader.state, self.broadcaster
        began, published = time.monotonic(), 0
        for events in self.recording.events(state.seq):
            for first in range(0, len(events), 256):
                part = events[first : first + 256]
                for event in part:
                    state.apply(event)
                broadcaster.publish(NoteReported(0, part[0].at_ns, 0, None, Note.ENGINE_SUMMARY, ""), part)
                published += len(part)
                ahead = published / self.rate - (time.monotonic() - began)
                if ahead > SLICE_S:
                    await asyncio.sleep(ahead)
                else:
                    await asyncio.sleep(0)


async def serve(path: Path, rate: int, address: str) -> None:
    """Listen, wait for the first subscriber, play, and stay."""
    recording = Recording.open(path)
    service = Tape(recording, rate)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    servicer = ConsoleServicer(service, Identity("flood", "flood", 1, BLOCK_BYTES))
    server.add_generic_rpc_handlers((servicer.handler(),))
    endpoint = Endpoint(address)
    endpoint.bind(server)
    await server.start()
    running = asyncio.create_task(service.beat())
    print("ready", flush=True)
    await service.met.wait()
    await service.play()
    print("played", flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
