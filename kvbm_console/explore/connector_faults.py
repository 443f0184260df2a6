"""Faults that ``explore vllm --fault`` plants in a connector's scheduler half, to show that the monitors find them.

Law of this file: a fault omits or spoils a step of the real connector, and the connector's source is not changed.
"""

from typing import Any

from kvbm_console.explore.connectors import Unsupported
from kvbm_console.explore.scenario import BLOCK


def _half(connector: Any) -> Any:
    half = getattr(connector, "connector_scheduler", None)
    if half is None:
        raise Unsupported("faults of a connector are planted in OffloadingConnector; this one is another")
    return half


def _no_flush(connector: Any) -> None:
    half, build = _half(connector), _half(connector).build_connector_meta

    def forget(output: Any) -> Any:
        metadata = build(output)
        metadata.jobs_to_flush = None
        return metadata

    half.build_connector_meta = forget


def _no_fence(connector: Any) -> None:
    half, finished = _half(connector), _half(connector).request_finished

    def forget(request: Any) -> Any:
        answer = finished(request)
        half._block_id_to_pending_jobs.clear()
        return answer

    half.request_finished = forget


def _no_unpin(connector: Any) -> None:
    _half(connector).manager.complete_load = lambda *_, **__: None


def _no_pin(connector: Any) -> None:
    manager = _half(connector).manager
    prepare, complete = manager.prepare_load, manager.complete_load

    def unpinned(keys: Any, *rest: Any) -> Any:
        spec = prepare(keys, *rest)
        complete(keys, *rest)
        return spec

    manager.prepare_load = unpinned
    manager.complete_load = lambda *_, **__: None


def _ready_at_once(connector: Any) -> None:
    manager = _half(connector).manager
    prepare, complete = manager.prepare_store, manager.complete_store

    def hasty(keys: Any, *rest: Any) -> Any:
        output = prepare(keys, *rest)
        if output is not None:
            complete(output.keys_to_store, *rest)
        return output

    manager.prepare_store = hasty
    manager.complete_store = lambda *_, **__: None


def _keeps_request(connector: Any) -> None:
    half, build = _half(connector), _half(connector).build_connector_meta

    def forget(output: Any) -> Any:
        kept = dict(half._req_status)
        metadata = build(output)
        for name, status in kept.items():
            half._req_status.setdefault(name, status)
        return metadata

    half.build_connector_meta = forget


def _asks_again(connector: Any) -> None:
    ask = connector.get_num_new_matched_tokens

    def forever(request: Any, computed: int, *rest: Any) -> Any:
        answer = ask(request, computed, *rest)
        return (None, False) if answer[0] and answer[0] > 3 * BLOCK else answer

    connector.get_num_new_matched_tokens = forever


def _wrong_key(connector: Any) -> None:
    manager = _half(connector).manager
    prepare = manager.prepare_load

    def turned(keys: Any, *rest: Any) -> Any:
        spec = prepare(keys, *rest)
        spec.block_ids = spec.block_ids[::-1]
        return spec

    manager.prepare_load = turned


CONNECTOR_FAULTS: dict[str, tuple[str, Any]] = {
    "connector-no-flush": ("the connector never asks the worker to flush", _no_flush),
    "connector-no-fence": ("places of finished requests are forgotten while stores read them", _no_fence),
    "connector-no-unpin": ("a load keeps its host blocks for ever", _no_unpin),
    "connector-no-pin": ("a load does not keep its host blocks", _no_pin),
    "connector-ready-at-once": ("a stored block is found before its copy has ended", _ready_at_once),
    "connector-keeps-requests": ("finished requests stay in the connector's table", _keeps_request),
    "connector-asks-again": ("hits of more than three blocks are answered with \"ask again\"", _asks_again),
    "connector-turned-keys": ("the blocks of a load are taken in reverse order", _wrong_key),
}
"""Faults of OffloadingConnector that ``--fault`` plants: each omits a step."""
