"""The adapters of vLLM's own examples: prompts in a directory, and prompts that nobody has computed.

``ExampleConnector`` stores and loads a whole prompt inside a step. It finds a prompt by the directory that its worker
makes. ``DecodeBenchConnector`` fills the blocks of a prompt with a constant, to measure decoding alone. Here they are
filled with the contents that the prompt would have, so that the monitors see everything but the constant.

For example, the metadata says "load these 40 tokens into the places 7, 9 and 2". The adapter copies the slots of the
directory of these tokens, and the step that computes the rest reads them.

Law of this file: the directory of a prompt is there when the step that stores it has ended.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbm_console.explore.connectors import Adapter, emptied
from kvbm_console.explore.scenario import BLOCK
from kvbm_console.explore.shadow import Job, StepOrders


class ExampleAdapter(Adapter):
    """``ExampleConnector``."""

    connectors = ("ExampleConnector",)
    name = "example"
    half_name = ""

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        self._slots: dict[tuple[str, int], int] = {}
        """(directory, block of the prompt) to slot."""
        self._plan: tuple[Any, list[tuple[str, bool, list[int]]]] = None, []
        """The metadata of this step, with directory, True for a load, and places of each prompt."""
        self._stored: dict[int, str] = {}
        """Store to its directory."""
        self._jobs = 0

    @staticmethod
    def sized(extra: dict[str, Any], host_bytes: int, directory: str) -> None:
        extra.setdefault("shared_storage_path", f"{directory}/prompts")

    @staticmethod
    def around(entry: dict[str, Any], files: Path) -> contextlib.AbstractContextManager[None]:
        emptied(files)
        return contextlib.nullcontext()

    def attach(self, machine: Any) -> None:
        if len(machine.groups) > 1:
            raise ValueError("this connector has one group of layers")

    def orders(self, metadata: Any) -> StepOrders:
        if self._plan[0] is not metadata:
            self._plan = metadata, [(
                self.connector._generate_foldername_debug(entry.token_ids, entry.mm_hashes), not entry.is_store,
                [int(slot) // BLOCK for slot in entry.slot_mapping[::BLOCK]]) for entry in metadata.requests]
            self._jobs += len(metadata.requests)
        orders = StepOrders(self.kind)
        for at, (directory, load, places) in enumerate(self._plan[1]):
            slots = [self._slots.setdefault((directory, block), len(self._slots)) for block in range(len(places))]
            pairs = list(zip(slots, places, strict=True) if load else zip(places, slots, strict=True))
            job = Job(self._jobs - at, load, "", pairs, self.kind, sync=True)
            (orders.loads if load else orders.stores).append(job)
            if not load:
                self._stored[job.number] = directory
        return orders

    def ended(self, jobs: list[Job]) -> None:
        for job in jobs:
            if not job.load:
                Path(self._stored[job.number]).mkdir(parents=True, exist_ok=True)


class DecodeBenchAdapter(Adapter):
    """``DecodeBenchConnector``."""

    connectors = ("DecodeBenchConnector",)
    name = "decode bench"

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        self._machine: Any = None
        self._plan: tuple[Any, list[tuple[int, str, list[tuple[int, int]]]]] = None, []
        """The metadata of this step, with number, request and pairs of each load."""
        self._jobs = self._slots = 0

    def attach(self, machine: Any) -> None:
        if machine.groups != ["full"]:
            raise ValueError("this adapter has one group of layers with full attention")
        self._machine = machine

    def orders(self, metadata: Any) -> StepOrders:
        if self._plan[0] is not metadata:
            self._plan = metadata, list(self._planned(metadata))
        return StepOrders(self.kind, [
            Job(number, True, name, list(pairs), self.kind, sync=True) for number, name, pairs in self._plan[1]])

    def _planned(self, metadata: Any) -> Iterator[tuple[int, str, list[tuple[int, int]]]]:
        for name, (groups, tokens) in metadata.reqs_to_fill.items():
            chain = self._machine.chains[name]
            last = len(chain) - 1  # the engine computes the last token
            pairs = []
            for at, place in enumerate(groups[0], (last - tokens) // BLOCK):
                for worker in self._machine.workers:
                    worker.memory.host[self.kind, self._slots] = chain[min((at + 1) * BLOCK, last) - 1]
                    worker.memory.host_writer[self.kind, self._slots] = ("peer", 0, name, self._slots)
                pairs.append((self._slots, place))
                self._slots += 1
            self._jobs += 1
            yield self._jobs, name, pairs
