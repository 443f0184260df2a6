"""A worker with real bytes under vLLM's own OffloadingConnector: torch tensors of the host stand for the device's.

The model writes for each token a row that follows from all tokens up to it, so that each row that is read later can be
compared with what it must be. Copies move some steps after their order.

Law of this file: both halves of the connector are vLLM's, with the tap around them; only kernels and streams are ours.
"""

from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput

from kvbm_console.explore.scenario import BLOCK
from kvbm_console.tap.sanitizing import pairs_of
from tests.vllm.engine import Engine

HEAD: Final = 128


class TensorWorker(OffloadingWorker):
    """Copies pages of the host's memory; ``fault`` names what it does wrong."""

    def __init__(self, kv_caches: Any, per_chunk: int, chunks: int, delay: int, fault: str) -> None:
        self._device = [one.tensor.view(torch.int8).view((-1, one.page_size_bytes)) for one in kv_caches.tensors]
        self._pages = [one.page_size_bytes for one in kv_caches.tensors]
        self.cpu_tensors = [torch.zeros((chunks, page * per_chunk), dtype=torch.int8) for page in self._pages]
        self._per_chunk = per_chunk
        self._delay = delay
        self._fault = fault
        self._moment = 0
        self._jobs: list[tuple[int, int, bool, list[tuple[int, int, int]]]] = []
        self._copied: dict[int, int] = {}
        """Job to the bytes that were moved for it."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._submit(job_id, False, dst_spec, src_spec)

    def _submit(self, job: int, store: bool, device: Any, host: Any) -> bool:
        pairs = pairs_of(device.block_ids, host.block_ids, device.group_sizes, device.block_indices, self._per_chunk)
        self._jobs.append((self._moment + self._delay, job, store, pairs))
        return True

    def get_finished(self) -> list[TransferResult]:
        self._moment += 1
        due = [one for one in self._jobs if one[0] < self._moment]
        self._jobs = [one for one in self._jobs if one not in due]
        for _, job, store, pairs in due:
            self._move(job, store, pairs)
        return [TransferResult(job, True, self._copied.pop(job, 0), 0.001) for _, job, _, _ in due]

    def wait(self, job_ids: set[int]) -> None:
        if self._fault == "ignored-flush":
            return
        for _, job, store, pairs in self._jobs:
            if job in job_ids:
                self._move(job, store, pairs)
        self._jobs = [(0 if job in job_ids else due, job, store, [] if job in job_ids else pairs)
                      for due, job, store, pairs in self._jobs]

    def _move(self, job: int, store: bool, pairs: list[tuple[int, int, int]]) -> None:
        if self._fault == "swapped-blocks" and len(pairs) > 1:
            (one, first, group), (two, second, _), *rest = pairs
            pairs = [(one, second, group), (two, first, group), *rest]
        for at, (place, slot, _) in enumerate(pairs):
            row, page = divmod(slot, self._per_chunk)
            for layer, size in enumerate(self._pages):
                if self._fault == "torn-copy" and at == len(pairs) - 1 and layer:
                    continue
                device = self._device[layer][place]
                host = self.cpu_tensors[layer][row, page * size : (page + 1) * size]
                if store:
                    host.copy_(device)
                else:
                    device.copy_(host)
                self._copied[job] = self._copied.get(job, 0) + device.nbytes


class TensorSpec(CPUOffloadingSpec):
    """``spec_name`` of the connector's configuration; ``delay`` and ``fault`` stand beside it."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        extra = self.extra_config
        return TensorWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, int(extra.get("delay", 2)),
                            str(extra.get("fault", "")))


class Model:
    """The worker's process: tensors, the connector's worker half, and a model that reads and writes rows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        groups = engine.kv_cache.kv_cache_groups
        self.tensors = {
            name: torch.zeros((engine.kv_cache.num_blocks, 2, BLOCK, 1, HEAD))
            for group in groups for name in group.layer_names
        }
        self._groups = [[self.tensors[name] for name in group.layer_names] for group in groups]
        self.connector = KVConnectorFactory.create_connector(engine.config, KVConnectorRole.WORKER, engine.kv_cache)
        self.connector.register_kv_caches(self.tensors)
        self.jobs: list[Any] = []
        self.wrong: list[tuple[str, int]] = []
        """(request, token) of each row that was read and held something else."""
        self.rows = 0
        """Rows that were read."""
        engine.copies = self

    def step(self, metadata: Any, _: Any = ()) -> KVConnectorOutput | None:
        """One step, as vLLM's own runner does it."""
        connector, output = self.connector, self._engine.formed
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        self._forward(output)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        _, received = connector.get_finished(output.finished_req_ids)
        found = KVConnectorOutput(
            finished_recving=received or None, invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return found

    def _forward(self, output: Any) -> None:
        scheduler = self._engine.scheduler
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            tokens = list(scheduler.requests[name].all_token_ids)
            tables = scheduler.kv_cache_manager.get_block_ids(name)
            seed = 0
            for at in range(computed[name] + count):
                seed = hash((seed, tokens[at])) % 2**16
                if at < computed[name] and at % BLOCK:
                    continue  # of a block that is read one row stands for all
                for places, tensors in zip(tables, self._groups, strict=True):
                    self._row(name, at, seed, places[at // BLOCK], tensors, write=at >= computed[name])
                self.rows += at < computed[name]

    def _row(self, name: str, at: int, seed: int, place: int, tensors: list[Any], *, write: bool) -> None:
        """One token in the layers of a group; place 0 stands for what lies before a window."""
        for layer, tensor in enumerate(tensors):
            row = tensor[place, :, at % BLOCK, 0, :]
            if write:
                row.fill_(seed + layer / 64)
                row[1, : HEAD // 2] += 0.5
            elif place and float(row[0, 0]) != seed + layer / 64:
                self.wrong.append((name, at))
