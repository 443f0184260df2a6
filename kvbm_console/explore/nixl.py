"""The adapter of NIXL's pull connector: prefill and decode on two engines.

One engine is driven, and its peer is ours. A request has one of three roles, by its name. The peer has prefilled the
prompt of the first kind (``do_remote_prefill``). The connector orders a load of the prompt's blocks, which lie in the
peer with the right contents. The peer decodes the second kind (``do_remote_decode``). The engine keeps its blocks after
the end until the peer has read them. The third kind has no peer.

For example, the peer prefilled request s2t0 into its blocks 40 to 43. The adapter puts the contents of the prompt into
the slots 40 to 43. The metadata orders "s2t0: blocks 40 to 43 into places 7, 8, 9 and 2".

Law of this file: the peer makes no mistake, and it reads blocks before it reports them as sent.
"""

import zlib
from collections.abc import Iterator
from typing import Any

from kvbm_console.explore.connectors import Adapter, Unsupported
from kvbm_console.explore.shadow import Job, StepOrders

FAR = "peer"
"""The peer's name."""


class NixlAdapter(Adapter):
    """``NixlConnector``, which pulls."""

    connectors = ("NixlPullConnector",)  # NixlConnector is another name of the class
    name = "nixl"
    peers = True
    fails_by_request = True

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        if not hasattr(self.half, "_reqs_need_recv"):
            raise Unsupported(f"{type(self.half).__name__} has no _reqs_need_recv here")
        self._slots = self._jobs = 0
        self._numbers: dict[tuple[str, bool], int] = {}
        """(request, True for a load) to the number of its job, which is the same on all ranks."""
        self._sent: dict[str, tuple[list[int], ...]] = {}
        """Request to the places that the peer was told to read."""
        self._machine: Any = None

    def attach(self, machine: Any) -> None:
        self._machine = machine
        finished = self.half.request_finished

        def told(request: Any, block_ids: Any) -> Any:
            answer = finished(request, block_ids)
            if answer[0]:
                self._sent[request.request_id] = answer[1]["remote_block_ids"]
            return answer

        self.half.request_finished = told

    def arrive(self, name: str, contents: list[int]) -> dict[str, Any] | None:
        role = zlib.crc32(name.encode()) % 3
        if role == 2:
            return None
        if role == 1:
            return self.for_peer(name)
        far = []
        for group in range(len(self._machine.groups)):
            first, self._slots = self._slots, self._slots + len(contents)
            far.append(list(range(first, self._slots)))
            for worker in self._machine.workers:
                for slot, content in zip(far[-1], contents, strict=True):
                    worker.memory.host[self.kind, slot] = self._machine.of_group(content, group)
                    worker.memory.host_writer[self.kind, slot] = ("peer", 0, name, slot)
        return self.from_peer(name, far)

    def from_peer(self, name: str, far: list[list[int]]) -> dict[str, Any]:
        """The transfer parameters of a request that the peer has prefilled into these blocks of each group."""
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": tuple(far),
                "remote_engine_id": FAR, "remote_request_id": name, "remote_host": FAR, "remote_port": 1, "tp_size": 1}

    def for_peer(self, name: str) -> dict[str, Any]:
        """The transfer parameters of a request that the peer is to decode."""
        return {"do_remote_decode": True, "do_remote_prefill": False}

    def orders(self, metadata: Any) -> StepOrders:
        orders = StepOrders(self.kind)
        for name, entry in metadata.reqs_to_recv.items():
            pairs = list(self._pairs(entry))
            if getattr(entry, "awaiting_kvs", bool(pairs)):  # otherwise the peer is only told to free its blocks
                orders.loads.append(Job(self.number(name, True), True, name, pairs, self.kind))
        for name in metadata.reqs_to_send:
            pairs = [(place, -1 - place) for group in self._sent[name] for place in group if place]
            orders.stores.append(Job(self.number(name, False), False, name, pairs, self.kind, peer=True))
        return orders

    def _pairs(self, entry: Any) -> Iterator[tuple[int, int]]:
        """The last blocks of the peer, as many as this engine lacks, with their places here."""
        for far, here in zip(entry.remote.block_ids, entry.local_block_ids, strict=False):
            if here:
                yield from zip(far[-len(here):], here, strict=True)

    def number(self, name: str, load: bool) -> int:
        """The number of a request's job, which is the same on all ranks."""
        if (name, load) not in self._numbers:
            self._jobs += 1
            self._numbers[name, load] = self._jobs
        return self._numbers[name, load]
