"""LMCache's own event log behind its own gRPC server, in a process of its own, driven by lines of JSON.

Run by ``tests/vllm/test_lmcache_events.py`` where LMCache is installed. The event bus, the module that keeps the log
and the server are LMCache's; only the storage that would publish to the bus is not there.
"""

import json
import sys

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBus, EventBusConfig
from lmcache.v1.multiprocess.config import MPServerConfig
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
from lmcache.v1.multiprocess.transport.grpc_impl.server import build_grpc_request_server


class Context:
    """Has the event bus, which is all that the module needs of its server."""

    def __init__(self) -> None:
        self.event_bus = EventBus(EventBusConfig(enabled=True))


def main() -> None:
    settings = json.loads(sys.argv[1])
    context = Context()
    module = KVEventModule(context, settings.get("log", 1_000))
    server = build_grpc_request_server(
        [module], MPServerConfig(transport="grpc", host="127.0.0.1", port=settings["port"])
    )
    context.event_bus.start()
    server.start()
    print("ready", flush=True)
    for line in sys.stdin:
        for kind, hashes, parents, tokens in json.loads(line):
            keys = [ObjectKey(bytes.fromhex(each), "m", 0) for each in hashes]
            if kind == "stored":
                context.event_bus.publish(Event(EventType.MP_TOKENS, metadata={
                    "chunk_hashes": [key.chunk_hash for key in keys], "token_chunks": tokens,
                    "parent_hashes": [None if each is None else bytes.fromhex(each) for each in parents],
                }))
                context.event_bus.publish(Event(EventType.L1_WRITE_FINISHED, metadata={"keys": keys}))
            else:
                context.event_bus.publish(Event(EventType.L1_KEYS_EVICTED, metadata={"keys": keys}))
        print("ok", flush=True)


if __name__ == "__main__":
    main()
