"""A connector outside of vLLM, and its adapter: an example for authors of connectors.

The connector keeps full blocks of finished requests on a shelf in host memory, by their hashes. A finished request
keeps its places until its worker has stored them. A load ends before its request is scheduled.

``kvbm-console explore vllm --adapter tests.vllm.shelf:ShelfAdapter --connector '{"kv_connector": "ShelfConnector",
"kv_connector_module_path": "tests.vllm.shelf"}'`` explores it.

Law of this file: it imports vLLM and ``kvbm_console.explore`` alone, as an author's module would.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from kvbm_console.explore.connectors import Adapter
from kvbm_console.explore.scenario import BLOCK
from kvbm_console.explore.shadow import Job, StepOrders

Pairs = list[tuple[int, int]]


class ShelfMetadata(KVConnectorMetadata):
    """Request to the (source, target) of the blocks that a step stores and loads."""

    def __init__(self, saves: dict[str, Pairs], loads: dict[str, Pairs]) -> None:
        self.saves, self.loads = saves, loads


class ShelfConnector(KVConnectorBase_V1):
    """The scheduler half. The worker half would copy tensors; the exploration has its own."""

    keeps_places = True
    """True if a finished request keeps its places until its blocks are stored."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.room = int(vllm_config.kv_transfer_config.get_from_extra_config("shelf_blocks", 64))
        self.shelf: dict[bytes, int] = {}
        """Hash to slot, the least recently used first."""
        self.ready: set[bytes] = set()
        """Hashes whose store has ended."""
        self.pins: Counter[bytes] = Counter()
        self._offered: dict[str, tuple[int, list[bytes]]] = {}
        """Request to the first block of its hit, and the hashes."""
        self._saving: dict[str, list[bytes]] = {}
        self._loading: dict[str, list[bytes]] = {}
        self._saves: dict[str, Pairs] = {}
        self._loads: dict[str, Pairs] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first, last = num_computed_tokens // BLOCK, (request.num_tokens - 1) // BLOCK
        found: list[bytes] = []
        for key in request.block_hashes[first:last]:
            if key not in self.ready:
                break
            found.append(key)
        self._offered[request.request_id] = first, found
        return len(found) * BLOCK, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first, found = self._offered.pop(request.request_id, (0, []))
        if num_external_tokens:
            places = blocks.get_block_ids()[0][first:]
            self._loads[request.request_id] = [
                (self.shelf[key], place) for key, place in zip(found, places, strict=False)]
            self._loading[request.request_id] = found
            self.pins.update(found)

    def build_connector_meta(self, scheduler_output: Any) -> ShelfMetadata:
        metadata = ShelfMetadata(self._saves, self._loads)
        self._saves, self._loads = {}, {}
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._offered.pop(request.request_id, None)
        if request.request_id in self._loading:  # aborted before its blocks came
            return False, None
        full = min(request.num_computed_tokens // BLOCK, len(request.block_hashes))
        pairs: Pairs = []
        saved: list[bytes] = []
        for key, place in zip(request.block_hashes[:full], block_ids, strict=False):
            if key in self.shelf:
                self.shelf[key] = self.shelf.pop(key)
            elif (slot := self._slot()) is not None:
                self.shelf[key] = slot
                pairs.append((place, slot))
                saved.append(key)
        if pairs:
            self._saves[request.request_id], self._saving[request.request_id] = pairs, saved
        return bool(pairs), None

    def _slot(self) -> int | None:
        """A slot that nobody uses; None without one."""
        if len(self.shelf) < self.room:
            return next(slot for slot in range(self.room) if slot not in self.shelf.values())
        oldest = next((key for key in self.shelf if key in self.ready and not self.pins[key]), None)
        if oldest is None:
            return None
        self.ready.discard(oldest)
        return self.shelf.pop(oldest)

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            self.pins.subtract(self._loading.pop(name))
            self.pins += Counter()  # drops the hashes without pins
        for name in connector_output.finished_sending or ():
            self.ready.update(self._saving.pop(name))

    def reset_cache(self) -> bool:
        for key in [key for key in self.ready if not self.pins[key]]:
            self.ready.discard(key)
            del self.shelf[key]
        self._offered.clear()
        return True

    # --- the worker half, which an exploration replaces ---

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class HastyShelfConnector(ShelfConnector):
    """A bug: the places of a finished request are given away while its store reads them."""

    keeps_places = False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        super().request_finished(request, block_ids)
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> ShelfMetadata:
        for saved in self._saving.values():
            self.ready.update(saved)
        self._saving.clear()
        return super().build_connector_meta(scheduler_output)


class ShelfAdapter(Adapter):
    """What the worker of ``ShelfConnector`` does: a load for each request, and a store for each that has ended."""

    connectors = ("ShelfConnector",)
    name = "shelf"
    half_name = ""
    caches = ("shelf", "ready")

    def __init__(self, connector: Any, kind: str) -> None:
        super().__init__(connector, kind)
        self._numbers: dict[tuple[str, str], int] = {}

    @staticmethod
    def sized(extra: dict[str, Any], host_bytes: int, directory: str) -> None:
        extra.setdefault("shelf_blocks", 16)

    def orders(self, metadata: Any) -> StepOrders:
        orders = StepOrders(self.kind)
        for name, pairs in metadata.loads.items():
            orders.loads.append(Job(self._number("load", name), True, name, list(pairs), self.kind))
        for name, pairs in metadata.saves.items():
            orders.stores.append(Job(self._number("save", name), False, name, list(pairs), self.kind))
            if self.connector.keeps_places:
                # tells vLLM that the request's places are free, when the store has ended
                orders.stores.append(Job(self._number("free", name), False, name, [], self.kind, peer=True))
        return orders

    def _number(self, what: str, name: str) -> int:
        """The number of a job, which is the same on all ranks."""
        return self._numbers.setdefault((what, name), len(self._numbers))

    def held(self) -> Iterator[tuple[bytes, int]]:
        yield from ((key, self.connector.pins[key]) for key in self.connector.shelf)
