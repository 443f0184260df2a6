"""The other side of connectors whose blocks lie outside of vLLM: a directory, LMCache's memory, a peer over NIXL.

The scheduler half of each connector is the real one. Only the program beyond it is replaced.

=====================  =================================================================================
connector              stands for
=====================  =================================================================================
``ExampleConnector``   its worker, which makes a directory for the prompt that a step stores
``LMCacheConnectorV1`` LMCache's worker and server: chunks that were stored, and a lookup for them
``NixlConnector``      a prefilling engine that has each prompt; ``Copies`` reports the loads
=====================  =================================================================================

Law of this file: a lookup finds only blocks that an earlier step stored.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, Final

from kvbm_console.explore.scenario import BLOCK
from tests.vllm.adapters import NoSuchFeature
from tests.vllm.copies import parts

CHUNK: Final = 2 * BLOCK
"""Tokens in a chunk of LMCache."""


def example(directory: str) -> dict[str, Any]:
    """The entry of vLLM's connector that keeps prompts in a directory and loads them inside the step."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("ExampleConnector", "SharedStorageConnector"):
        if name in KVConnectorFactory._registry:
            return {"kv_connector": name, "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": directory}}
    raise NoSuchFeature("no ExampleConnector")


def store_prompts(connector: Any, metadata: Any) -> int:
    """Make the directories of the prompts that this step stores, as the connector's worker does. Returns the loads."""
    loads = 0
    for part in parts(metadata):
        for request in part.requests:
            loads += not request.is_store
            if request.is_store:
                connector._generate_foldername_debug(request.token_ids, request.mm_hashes, create_folder=True)
    return loads


def lmcache() -> dict[str, Any]:
    """The entry of LMCache's connector, whose loads end inside the step. Raises ``NoSuchFeature`` without LMCache."""
    os.environ.update(LMCACHE_CHUNK_SIZE=str(CHUNK), LMCACHE_LOCAL_CPU="True", LMCACHE_LOG_LEVEL="CRITICAL",
                      LMCACHE_TRACK_USAGE="false")
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        try:
            import lmcache.integration.vllm.vllm_v1_adapter  # noqa: F401
        except ImportError as error:
            raise NoSuchFeature(f"LMCache cannot be imported: {error}") from None
    for name in filter(lambda name: name.startswith("lmcache"), list(logging.root.manager.loggerDict)):
        logging.getLogger(name).disabled = True
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


class Chunks:
    """Stands for LMCache's lookup client and its worker: the chunks that earlier steps stored."""

    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()
        self._answers: dict[str, int] = {}

    def store(self, metadata: Any) -> int:
        """Store the chunks of a step. Returns the loads."""
        loads = 0
        for part in parts(metadata):
            for request in part.requests:
                loads += request.load_spec is not None and request.load_spec.can_load
                if request.save_spec is not None and request.save_spec.can_save:
                    tokens = [int(token) for token in request.token_ids]
                    self._known.update(tuple(tokens[:end]) for end in range(CHUNK, len(tokens) + 1, CHUNK))
        return loads

    # --- the interface of a lookup client ---

    def lookup_cache(self, lookup_id: str) -> int:
        """The answer of an earlier lookup; -1 without one."""
        return self._answers.get(lookup_id, -1)

    def lookup(self, token_ids: Any, lookup_id: str, request_configs: Any = None) -> int:
        """Tokens of the prefix that are stored."""
        tokens = [int(token) for token in token_ids]
        ends = range(CHUNK, len(tokens) + 1, CHUNK)
        found = next((at - CHUNK for at in ends if tuple(tokens[:at]) not in self._known), len(tokens) // CHUNK * CHUNK)
        self._answers[lookup_id] = found
        return found

    def clear_lookup_status(self, lookup_id: str) -> None:
        """Forget the answer of a lookup."""
        self._answers.pop(lookup_id, None)

    def close(self) -> None:
        """Nothing is open."""


def attend(engine: Any) -> None:
    """Put the other side behind the connector of this engine, if the connector has one here."""
    for connector in _all_of(engine.connector):
        name = type(connector).__name__
        if name in ("ExampleConnector", "SharedStorageConnector"):
            _after_meta(engine, lambda metadata, mine=connector: store_prompts(mine, metadata))
        elif name == "LMCacheConnectorV1":
            chunks = Chunks()
            connector._lmcache_engine._manager._lookup_client = chunks
            _after_meta(engine, chunks.store)


def _all_of(connector: Any) -> Iterator[Any]:
    """A connector as the engine made it, without a tap around it."""
    if connector is not None:
        inside = vars(connector).get("_tapped")
        yield connector if inside is None else inside


def _after_meta(engine: Any, store: Any) -> None:
    step = engine.copies.step

    def stepped(metadata: Any, ended_requests: Any = ()) -> Any:
        engine.copies.loads += store(metadata)
        return step(metadata, ended_requests)

    engine.copies.step = stepped


def from_peer(name: str, prompt: list[int]) -> dict[str, Any] | None:
    """Transfer parameters: a peer has prefilled the prompts of every second session."""
    if int(name.lstrip("s").partition("t")[0]) % 2:
        return None
    blocks = list(range(1, len(prompt) // BLOCK + 1))
    return {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": (blocks,),
            "remote_engine_id": "peer", "remote_request_id": name, "remote_host": "peer", "remote_port": 1,
            "tp_size": 1}
