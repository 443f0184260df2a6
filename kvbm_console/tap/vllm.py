"""``KvbmTap`` for vLLM: named in ``--kv-transfer-config`` by its class and the path of this module.

    {"kv_connector": "KvbmTap", "kv_connector_module_path": "kvbm_console.tap.vllm", "kv_role": "kv_both"}

alone, or as one of the ``connectors`` of vLLM's MultiConnector. In ``kv_connector_extra_config``: ``connector``
(another connector's entry in the same form: it is created inside and sees every call), ``daemon`` (``unix:PATH`` or
``HOST:PORT``; the default socket without it), ``serve`` (start a daemon where none listens), ``name``, ``medium``
(where the connector inside keeps blocks), ``token_file``, ``tls_ca``, ``python`` (one that has kvbm-console).

Law of this file: importing it needs vLLM, so nothing else of this program imports it; what is not vLLM's is elsewhere.
"""

import copy
import math
from importlib import import_module
from typing import Any, Final

from kvbm_console.tap.connector import make_tap
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import Recorder
from kvbm_console.tap.sender import Sender, Settings

_base: Final[Any] = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
_factory: Final[Any] = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
_BASES: Final = tuple(
    getattr(_base, name) for name in ("KVConnectorBase_V1", "SupportsHMA") if hasattr(_base, name)
)
MEDIA: Final = {"OffloadingConnector": "CPU", "SimpleCPUOffloadConnector": "CPU", "LMCacheConnectorV1": "CPU",
                "LMCacheMPConnector": "CPU"}
"""Where well known connectors keep blocks; of the others no more is known than that it is elsewhere."""
_WHOLE: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec")
"""Groups of blocks that keep a whole prefix: the first of them is told."""


class _Nothing(*_BASES):  # type: ignore[misc]
    """A connector that finds, loads and stores nothing: what the tap is around when no other is named."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return _base.KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed off, so nothing is recomputed because of it."""
        return False

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None


for _name in getattr(_Nothing, "__abstractmethods__", ()):
    setattr(_Nothing, _name, _Nothing._nothing)
_Nothing.__abstractmethods__ = frozenset()


class _Vllm:
    """What is vLLM's: how the connector inside is named and made, and what the daemon is told of the engine."""

    def __init__(self) -> None:
        self.last_class: type = _Nothing

    def inner(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        vllm_config, role, kv_cache_config = args
        kind, (config, *_), _ = self.inner_class(args, kwargs)
        made: Any = kind
        scheduler = getattr(vllm_config, "scheduler_config", None)
        hybrid = not getattr(scheduler, "disable_hybrid_kv_cache_manager", True)
        if hybrid and len(_BASES) > 1 and not issubclass(kind, _BASES[1]):
            raise ValueError(
                f"Connector {kind.__name__} does not support HMA but HMA is enabled. Please set "
                "`--disable-hybrid-kv-cache-manager`."
            )
        return made(config, role, kv_cache_config)

    def inner_class(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        changed = tuple(self._inside(one) for one in args)
        named = {key: self._inside(one) for key, one in kwargs.items()}
        return self.last_class, changed, named

    def _inside(self, argument: Any) -> Any:
        """An argument that carries our configuration, as the connector inside shall see it; the class is noted."""
        if isinstance(argument, dict) and isinstance(argument.get("connector"), dict):
            spec = argument["connector"]
            self.last_class = _factory.KVConnectorFactory.get_connector_class(_transfer_config(spec, None))
            return spec.get("kv_connector_extra_config", {})
        if hasattr(argument, "kv_connector_extra_config"):
            spec = argument.kv_connector_extra_config.get("connector")
            if spec is None:
                self.last_class = _Nothing
                return argument
            inside = _transfer_config(spec, argument)
            self.last_class = _factory.KVConnectorFactory.get_connector_class(inside)
            return inside
        if getattr(argument, "kv_transfer_config", None) is not None:
            changed = copy.copy(argument)
            changed.kv_transfer_config = self._inside(argument.kv_transfer_config)
            return changed
        return argument

    def recorder(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
        vllm_config, role, kv_cache_config = args
        if role is not _base.KVConnectorRole.SCHEDULER:
            return None
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        spec = extra.get("connector")
        group, sizes, whole = _groups(kv_cache_config, vllm_config)
        recorder = Recorder(by_place=len(sizes) > 1)
        rank = getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_rank", 0) or 0
        settings = Settings(
            target=str(extra.get("daemon", "")), name=str(extra.get("name") or f"vLLM rank {rank}")[:256],
            block_tokens=sizes[group], capacity_blocks=getattr(kv_cache_config, "num_blocks", None) or None,
            dp_rank=rank, serve=bool(extra.get("serve")),
            medium="" if spec is None else str(extra.get("medium") or MEDIA.get(spec.get("kv_connector"), "EXTERNAL")),
            token_file=str(extra.get("token_file", "")), tls_ca=str(extra.get("tls_ca", "")), group=group,
            others={at: size for at, size in enumerate(sizes) if at != group}, uncertain=not whole,
        )
        hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or getattr(
            getattr(vllm_config, "cache_config", None), "hash_block_size", None
        ) or math.gcd(*sizes)
        flattener = Flattener(
            group=group, block_tokens=sizes[group], hash_tokens=hash_tokens,
            nulls=0 if whole else kv_cache_config.num_blocks,
        )
        tap.sender = Sender(recorder, flattener, settings, python=str(extra.get("python", "")))
        tap.sender.start()
        return recorder


def _transfer_config(spec: dict[str, Any], outer: Any) -> Any:
    """The configuration of the connector inside; what it does not say is that of the tap."""
    kind = import_module("vllm.config.kv_transfer").KVTransferConfig if outer is None else type(outer)
    common = {} if outer is None else {
        field: getattr(outer, field) for field in ("kv_role", "engine_id") if getattr(outer, field, None) is not None
    }
    return kind(**{**common, **spec})


def _groups(kv_cache_config: Any, vllm_config: Any) -> tuple[int, list[int], bool]:
    """The group of blocks that requests are told with, the tokens in a block of each group, and whether the told one
    keeps a whole prefix: of a window's group blocks are given back while the request runs, which nothing tells."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    sizes = [int(group.kv_cache_spec.block_size) for group in groups] or [int(vllm_config.cache_config.block_size)]
    whole = [at for at, group in enumerate(groups) if _keeps_all(group.kv_cache_spec)]
    return (whole[0] if whole else 0), sizes, bool(whole) or not groups


def _keeps_all(spec: Any) -> bool:
    """Whether a request keeps its blocks until it ends; layers of one kind may have a specification each."""
    layers = getattr(spec, "kv_cache_specs", None) or {"": spec}
    return all(type(one).__name__ in _WHOLE for one in layers.values())


KvbmTap = make_tap("KvbmTap", _BASES, _Vllm())
