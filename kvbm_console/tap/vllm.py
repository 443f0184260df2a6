"""The taps for vLLM: at its scheduler, and where a release does not allow this, at its connector.

``KVBM_TAP=unix:/run/kvbm.sock`` in the environment puts the tap at the scheduler: vLLM loads the entry point
``kvbm_console.tap.plugin``. ``--scheduler-cls kvbm_console.tap.vllm.TapScheduler`` does the same without the entry
point. The tap at the connector is this module's path beside a connector's own name in ``--kv-transfer-config``:

    {"kv_connector": "OffloadingConnector", "kv_connector_module_path": "kvbm_console.tap.vllm", "kv_role": "kv_both",
     "kv_connector_extra_config": {"cpu_bytes_to_use": 8e9, "kvbm": {"daemon": "unix:/run/kvbm.sock"}}}

is a tap around that connector: vLLM still knows the connector's name and its support for hybrid memory. ``KvbmTap`` as
the name stands alone, or beside others in vLLM's MultiConnector. ``kvbm`` takes ``daemon`` (``unix:PATH`` or
``HOST:PORT``; without it the default socket), ``token_file``, ``tls_ca`` and ``name``. ``serve`` starts a daemon if
none listens, ``medium`` names the medium of the connector inside, and ``python`` an interpreter that has kvbm-console.
``send`` is false if a program in this process reads the tap. ``sanitize`` checks the bytes of OffloadingConnector's
copies. ``KvbmTap`` has these settings without ``kvbm``. It takes a connector that vLLM has no name for as
``connector``, an entry in the same form. When both taps are configured, only the tap at the scheduler reports.

Law of this file: importing it needs vLLM, so nothing else of this program imports it. Code that does not need vLLM
stands elsewhere.
"""

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator
from enum import Enum, auto
from importlib import import_module
from typing import Any, Final

from kvbm_console.tap import VARIABLE, settings_of
from kvbm_console.tap.connector import arguments_of, make_tap
from kvbm_console.tap.copies import ConnectorWatch, Sizes
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import NULL_BLOCKS, MovingWindow, TapRecorder
from kvbm_console.tap.sanitizing import Marker, Options, Sanitizer, missing_calls, options_of
from kvbm_console.tap.scheduler import SchedulerTap, missing_methods
from kvbm_console.tap.sender import Sender, TapSettings

_base: Final[Any] = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
_factory: Final[Any] = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
_log: Final[Any] = import_module("vllm.logger").init_logger("vllm.kvbm_console")
_BASES: Final = tuple(
    getattr(_base, name) for name in ("KVConnectorBase_V1", "SupportsHMA") if hasattr(_base, name)
)
MEDIA: Final = {"OffloadingConnector": "CPU", "SimpleCPUOffloadConnector": "CPU", "LMCacheConnectorV1": "CPU",
                "LMCacheMPConnector": "CPU"}
"""The media of well known connectors; another connector's blocks are elsewhere."""
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
OURS: Final = "kvbm"
"""Our settings among those of a connector."""
_EACH_BLOCK: Final = "self_describing_kv_events"
_TELL_ALL: Final = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors that report every block they store and remove, if events are switched on."""
_WHOLE: Final = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec")
"""Specifications of groups that keep a whole prefix. The tap reports the first such group."""
_WINDOWS: Final = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
"""Specifications of groups that give back their first blocks while the request runs. The tap reports the first group if
all are such groups."""


class _Keeps(Enum):
    """Blocks of a running request that its group of layers keeps."""

    PREFIX = auto()
    WINDOW = auto()
    OTHER = auto()
    """It gives back blocks in a way of its own, so that nobody can follow them."""


class _Nothing(*_BASES):  # type: ignore[misc]
    """A connector that finds, loads and stores nothing: the tap's inner connector when none is named."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return _base.KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    request_finished_all_groups = request_finished

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no request is handed off, so none is recomputed because of a hand-off."""
        return False

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None


for _name in getattr(_Nothing, "__abstractmethods__", ()):
    setattr(_Nothing, _name, _Nothing._nothing)
_Nothing.__abstractmethods__ = frozenset()


class _Vllm:
    """The binding of vLLM: it makes the connector inside and describes the engine to the daemon.

    ``around`` is the class of the connector inside; with None the configuration names the class.
    """

    def __init__(self, around: type | None = None) -> None:
        self._around = around
        self._last: type = around or _Nothing

    def inner(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        vllm_config, role, kv_cache_config = args
        kind, (config, *_), _ = self.inner_class(args, kwargs)
        scheduler = getattr(vllm_config, "scheduler_config", None)
        hybrid = not getattr(scheduler, "disable_hybrid_kv_cache_manager", True)
        if hybrid and len(_BASES) > 1 and self._around is None and not issubclass(kind, _BASES[1]):
            raise ValueError(
                f"{kind.__name__} does not support hybrid memory: give its own name as kv_connector with "
                f'"kv_connector_module_path": "{__name__}", or set --disable-hybrid-kv-cache-manager.'
            )
        options = options_of(self._ours(vllm_config))
        if options is not None:
            _check_sanitize(options, kind, vllm_config.kv_transfer_config)
        def make(config: Any) -> Any:
            return kind(*arguments_of(kind, (config, role, kv_cache_config)))

        if role is _base.KVConnectorRole.SCHEDULER and kind.__name__ in _TELL_ALL:
            inside, tap._events_are_ours = _made_with_events(make, config)
        else:
            inside = make(config)
        if options is not None and role is _base.KVConnectorRole.WORKER:
            tap._sanitizer = _sanitizer(options, inside)
        return inside

    def _ours(self, vllm_config: Any) -> dict[str, Any]:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return extra if self._around is None else extra.get(OURS) or {}

    def inner_class(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
        changed = tuple(map(self._inside, args))
        named = {key: self._inside(argument) for key, argument in kwargs.items()}
        return self._last, changed, named

    def _inside(self, argument: Any) -> Any:
        """An argument that carries our configuration, as the connector inside sees it; ``_last`` keeps the class."""
        if self._around is not None:
            return _without_ours(argument)
        if isinstance(argument, dict) and isinstance(argument.get("connector"), dict):
            spec = argument["connector"]
            self._last = _factory.KVConnectorFactory.get_connector_class(_transfer_config(spec, None))
            return spec.get("kv_connector_extra_config", {})
        if hasattr(argument, "kv_connector_extra_config"):
            spec = argument.kv_connector_extra_config.get("connector")
            if spec is None:
                self._last = _Nothing
                return argument
            inside = _transfer_config(spec, argument)
            self._last = _factory.KVConnectorFactory.get_connector_class(inside)
            return inside
        return _replaced(argument, "kv_transfer_config", self._inside)

    def recorder(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapRecorder | None:
        vllm_config, role, kv_cache_config = args
        if role is not _base.KVConnectorRole.SCHEDULER:
            return None
        if _building:
            _log.warning("kvbm-console: the tap at the scheduler reports. The tap in kv_transfer_config steps aside.")
            return None
        extra = self._ours(vllm_config)
        inside = (extra.get("connector") or {}).get("kv_connector")
        if self._around is not None:
            inside = vllm_config.kv_transfer_config.kv_connector
        # Beside another connector, no call reports the blocks that the other loads into until their request computes.
        tap.sender, tap._marker = _sender(
            vllm_config, kv_cache_config, extra, inside, tap._tapped, beside=inside is None
        )
        if inside is not None:
            tap.sender.recorder.watch.attach(tap._tapped)
        if extra.get("send", True):
            tap.sender.start()
        recorder: TapRecorder = tap.sender.recorder
        return recorder


def _sender(
    vllm_config: Any, kv_cache_config: Any, ours: dict[str, Any], inside: str | None, connector: Any, *,
    beside: bool = False, at_scheduler: bool = False,
) -> tuple[Sender, Marker | None]:
    """The sender of a tap with a new recorder, and the marker of ``sanitize`` if the settings ask for it.

    ``ours`` are the settings, and ``inside`` is the name of the ``connector``, None without one."""
    group, sizes, keeps = _groups(kv_cache_config, vllm_config)
    recorder = TapRecorder(by_place=len(sizes) > 1 or beside or at_scheduler or keeps is not _Keeps.PREFIX)
    if inside in _TELL_ALL:
        recorder.below = {}
    if inside is not None:
        recorder.watch = ConnectorWatch(recorder, MEDIA, _sizes(kv_cache_config, vllm_config))
    sees_pool = at_scheduler or hasattr(_base.KVConnectorBase_V1, "bind_kv_cache_manager")
    recorder.alone = at_scheduler and inside is None and len(sizes) == 1
    recorder.one_size = len(set(sizes)) == 1
    if keeps is _Keeps.OTHER:
        recorder.audit_every = 0
    elif keeps is _Keeps.WINDOW:
        recorder.window = MovingWindow(group, sparse=_retention(kv_cache_config) not in (None, 1))
    cache = vllm_config.cache_config
    parallel = getattr(vllm_config, "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", None)
    if rank is None:
        rank = getattr(parallel, "data_parallel_rank", 0) or 0
    blocks = getattr(kv_cache_config, "num_blocks", None) or getattr(cache, "num_gpu_blocks", None) or None
    scheduling = getattr(vllm_config, "scheduler_config", None)
    settings = TapSettings(
        target=str(ours.get("daemon", "")), name=str(ours.get("name") or f"vLLM rank {rank}")[:256],
        block_tokens=sizes[group], capacity_blocks=blocks - NULL_BLOCKS if blocks else None,
        first_place=NULL_BLOCKS, dp_rank=rank,
        serve=bool(ours.get("serve")),
        medium="" if inside is None else str(ours.get("medium") or MEDIA.get(inside, "EXTERNAL")),
        token_file=str(ours.get("token_file", "")), tls_ca=str(ours.get("tls_ca", "")), group=group,
        others={at: size for at, size in enumerate(sizes) if at != group},
        windows=_window_sizes(kv_cache_config), retention=_retention(kv_cache_config),
        uncertain=keeps is _Keeps.OTHER or not sees_pool,
        host_blocks=_host_blocks(connector),
        running_most=getattr(scheduling, "max_num_seqs", None),
        step_tokens_most=(
            getattr(scheduling, "max_num_scheduled_tokens", None)
            or getattr(scheduling, "max_num_batched_tokens", None)
        ),
        caching=bool(getattr(cache, "enable_prefix_caching", True)), silent=inside not in _TELL_ALL,
    )
    hash_tokens = (
        getattr(kv_cache_config, "hash_block_size", None) or getattr(cache, "hash_block_size", None)
        or math.gcd(*sizes)
    )
    flattener = Flattener(
        group=group, block_tokens=sizes[group], hash_tokens=hash_tokens, caching=settings.caching, beside=beside,
        sparse=keeps is _Keeps.WINDOW and settings.retention not in (None, 1),
    )
    options, marker = options_of(ours), None
    if options is not None:
        groups = import_module(f"{_OFFLOADING}.config").get_offloading_group_ids(kv_cache_config)
        marker = Marker(options.sample, sizes, hash_tokens, list(groups))
    return Sender(recorder, flattener, settings, python=str(ours.get("python", ""))), marker


def _host_blocks(connector: Any) -> int | None:
    """The blocks that fit into the host tier of vLLM's OffloadingConnector; None for any other connector."""
    connector = vars(connector).get("_tapped", connector) if connector is not None else None
    inside = getattr(connector, "connector_scheduler", None)
    config, manager = getattr(inside, "config", None), getattr(inside, "manager", None)
    each = getattr(config, "blocks_per_chunk", None) or getattr(config, "block_size_factor", None)
    tier = getattr(manager, "primary_tier", manager)
    for owner, name in ((tier, "_num_chunks"), (tier, "_num_blocks"), (getattr(tier, "backend", None), "num_blocks")):
        count = getattr(owner, name, None)
        if each == 1 and isinstance(count, int):
            return count
    return None


# --- the scheduler itself ---

_building: Final[list[dict[str, Any]]] = []
"""The settings of each scheduler that is being made with a tap. A connector that it makes reports nothing itself."""


def tapped(kind: Any, settings: dict[str, Any]) -> Any:
    """A subclass of this scheduler class whose instances report; ``kind`` itself if it reports already.

    A class that lacks a needed method is returned as it is, and a warning names the method."""
    if getattr(kind, "reports_to_kvbm", False):
        return kind
    if lacking := missing_methods(kind):
        _log.warning(
            "kvbm-console: %s of this release has no %s, so it cannot be observed. Use the connector tap instead.",
            kind.__name__, ", ".join(lacking),
        )
        return kind

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with _events_switched_on(settings) as changed:
            kind.__init__(self, *args, **kwargs)
        self.kvbm_tap = _attach(self, settings, events_are_ours=bool(changed))

    return type(kind.__name__, (kind,), {
        "__init__": __init__, "__module__": kind.__module__, "__doc__": kind.__doc__, "reports_to_kvbm": True,
    })


class TapScheduler:
    """``--scheduler-cls kvbm_console.tap.vllm.TapScheduler``: vLLM's own scheduler for this configuration, observed.

    ``KVBM_TAP`` has the settings. Without this variable the daemon is at the default socket."""

    reports_to_kvbm = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = copy.copy((kwargs.get("vllm_config") or args[0]).scheduler_config)
        config.scheduler_cls = None
        settings = settings_of(os.environ.get(VARIABLE, ""))
        return tapped(config.get_scheduler_cls(), settings)(*args, **kwargs)


@contextlib.contextmanager
def _events_switched_on(settings: dict[str, Any]) -> Iterator[list[bool]]:
    """While a scheduler makes its connector: a connector that can report all its blocks gets its events switched on.

    Yields a list that is not empty afterwards if only the tap asked for these events."""
    factory = _factory.KVConnectorFactory
    inside = factory.create_connector
    changed: list[bool] = []

    def create_connector(config: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside_name(config.kv_transfer_config) not in _TELL_ALL:
            return inside(config, *args, **kwargs)
        connector, ours = _made_with_events(lambda config: inside(config, *args, **kwargs), config)
        changed.extend([True] if ours else [])
        return connector

    _building.append(settings)
    factory.create_connector = create_connector
    try:
        yield changed
    finally:
        factory.create_connector = inside
        _building.pop()


def _inside_name(transfer: Any) -> str | None:
    """The name of the configured connector, or of the connector inside a tap; None without a connector."""
    if transfer is None or transfer.kv_connector != KvbmTap.__name__:
        return None if transfer is None else transfer.kv_connector
    return (transfer.kv_connector_extra_config.get("connector") or {}).get("kv_connector")


def _attach(scheduler: Any, settings: dict[str, Any], *, events_are_ours: bool) -> SchedulerTap:
    config = scheduler.vllm_config
    inside = _inside_name(config.kv_transfer_config)
    sender, _ = _sender(
        config, scheduler.kv_cache_config, settings, inside, scheduler.connector, at_scheduler=True
    )
    watch = sender.recorder.watch
    if watch is not None:  # first, so that our own part is not in the time of the connector's calls
        watch.bind(scheduler.kv_cache_manager)
        watch.attach(scheduler.connector)
    tap = SchedulerTap(sender, scheduler, events_are_ours=events_are_ours)
    if settings.get("send", True):
        sender.start()
    target = sender.settings.target or "the default socket"
    _log.info("kvbm-console: the tap at %s reports to %s.", type(scheduler).__name__, target)
    return tap


def _check_sanitize(options: Options, kind: type, transfer: Any) -> None:
    """Raises ``ValueError``, with one sentence, if ``sanitize`` cannot work."""
    if kind.__name__ != "OffloadingConnector":
        raise ValueError(f'"sanitize" knows the workers of OffloadingConnector, and not those of {kind.__name__}.')
    if lacking := list(missing_calls(_base.KVConnectorBase_V1)):
        raise ValueError(f'"sanitize" needs a release of vLLM whose connectors have {", ".join(lacking)}.')
    if options.action == "recompute" and getattr(transfer, "kv_load_failure_policy", "") != "recompute":
        raise ValueError('"action": "recompute" of "sanitize" needs "kv_load_failure_policy": "recompute" beside it.')


def _sanitizer(options: Options, connector: Any) -> Sanitizer:
    """A checker around the worker that this connector will make when it gets the tensors."""
    half = connector.connector_worker
    spec = half.spec
    if spec.config.canonical_layout:
        raise ValueError('"sanitize" needs host pages that look like device pages, which "canonical_layout" changes.')
    sanitizer = Sanitizer(options.action, stores_here=getattr(half, "_is_store_writer", True))
    get_worker = spec.get_worker

    def checked(kv_caches: Any) -> Any:
        from kvbm_console.sanitize.fingerprint import PageSide, Region

        worker = get_worker(kv_caches)
        on_host = host_tensors(worker)
        int8 = import_module("torch").int8
        tensors = [cache.tensor.view(int8).view((-1, cache.page_size_bytes)) for cache in kv_caches.tensors]
        device, host = (
            PageSide([[Region(side[ref.tensor_idx], per_row=pages, used=ref.page_size_bytes) for ref in refs]
                  for refs in kv_caches.group_data_refs])
            for side, pages in ((tensors, 1), (on_host, spec.blocks_per_chunk))
        )
        return sanitizer.attach(worker, device, host, rank=spec.config.parallel.rank, per_chunk=spec.blocks_per_chunk)

    spec.get_worker = checked
    return sanitizer


def host_tensors(worker: Any) -> list[Any]:
    """The host's tensors of an offloading worker. Raises ``ValueError`` for a worker that keeps them elsewhere."""
    for owner, name in ((worker, "cpu_tensors"), (getattr(worker, "_store_handler", None), "dst_tensors")):
        if getattr(owner, name, None) is not None:
            return list(getattr(owner, name))
    raise ValueError(f'"sanitize" does not know where {type(worker).__name__} of this release keeps its host tensors.')


def _replaced(owner: Any, field: str, change: Callable[[Any], Any]) -> Any:
    """A copy of ``owner`` with this field changed; ``owner`` itself without the field."""
    if getattr(owner, field, None) is None:
        return owner
    changed = copy.copy(owner)
    setattr(changed, field, change(getattr(owner, field)))
    return changed


def _without_ours(argument: Any) -> Any:
    """A configuration that names a connector with our path, as that connector sees it."""
    if isinstance(argument, dict):
        return {key: value for key, value in argument.items() if key != OURS}
    if hasattr(argument, "kv_connector_extra_config"):
        changed = _replaced(argument, "kv_connector_extra_config", _without_ours)
        changed.kv_connector_module_path = None
        return changed
    return _replaced(argument, "kv_transfer_config", _without_ours)


def _made_with_events(make: Callable[[Any], Any], config: Any) -> tuple[Any, bool]:
    """A connector that reports its blocks by events, and True if only the tap asked for these events."""
    if getattr(getattr(config, "kv_events_config", None), "enable_kv_cache_events", False):
        return make(config), False
    try:
        # With this setting a chunk of several blocks reports each block.
        return make(_with_events(config, **{_EACH_BLOCK: True})), True
    except ValueError as error:
        if _EACH_BLOCK not in str(error) or _EACH_BLOCK in config.kv_transfer_config.kv_connector_extra_config:
            raise
        return make(_with_events(config)), True  # some releases refuse it with tiers below the host


def _with_events(config: Any, **settings: Any) -> Any:
    changed = copy.copy(config)
    changed.kv_events_config = import_module("vllm.config").KVEventsConfig(
        enable_kv_cache_events=True, publisher="null"
    )
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_connector_extra_config = {**settings, **transfer.kv_connector_extra_config}
    changed.kv_transfer_config = transfer
    return changed


def _transfer_config(spec: dict[str, Any], outer: Any) -> Any:
    """The configuration of the connector inside; the tap's own values fill its gaps."""
    kind = import_module("vllm.config.kv_transfer").KVTransferConfig if outer is None else type(outer)
    common = {} if outer is None else {
        field: getattr(outer, field) for field in ("kv_role", "engine_id") if getattr(outer, field, None) is not None
    }
    return kind(**{**common, **spec})


def _groups(kv_cache_config: Any, vllm_config: Any) -> tuple[int, list[int], _Keeps]:
    """The reported group, the tokens in a block of each group, and which blocks of a request the reported group keeps.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    sizes = [int(group.kv_cache_spec.block_size) for group in groups] or [int(vllm_config.cache_config.block_size)]
    whole = [at for at, group in enumerate(groups) if _are(_WHOLE, group.kv_cache_spec)]
    if whole or not groups:
        return (whole[0] if whole else 0), sizes, _Keeps.PREFIX
    return 0, sizes, _Keeps.WINDOW if _are(_WINDOWS, groups[0].kv_cache_spec) else _Keeps.OTHER


def _window_sizes(kv_cache_config: Any) -> dict[int, int]:
    """See ``TapSettings.windows``."""
    windows = {}
    for at, group in enumerate(getattr(kv_cache_config, "kv_cache_groups", None) or ()):
        spec = group.kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", None) or {"": spec}
        sizes = {0} if _are(_WHOLE, spec) else {getattr(layer, "sliding_window", None) for layer in layers.values()}
        if len(sizes) == 1 and isinstance(size := sizes.pop(), int):
            windows[at] = size
    return windows


def _retention(kv_cache_config: Any) -> int | None:
    """See ``TapSettings.retention``. Releases without the setting keep all blocks."""
    if not any(_window_sizes(kv_cache_config).values()):
        return None
    interval = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
    return 1 if interval is None else int(interval)


def _sizes(kv_cache_config: Any, vllm_config: Any) -> Sizes:
    """The bytes of a block; unknown where stages of a pipeline or ranks that share their heads copy other parts."""
    parallel = getattr(vllm_config, "parallel_config", None)
    workers = int(getattr(parallel, "world_size", 1) or 1)
    apart = int(getattr(parallel, "pipeline_parallel_size", 1) or 1) > 1
    shared = workers > 1 and bool(getattr(getattr(vllm_config, "model_config", None), "use_mla", False))
    if apart or shared:
        return Sizes(workers=workers)
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    tensors, places = getattr(kv_cache_config, "kv_cache_tensors", None), getattr(kv_cache_config, "num_blocks", 0)
    place = None
    if tensors and places:  # with strides each tensor is a part of a single allocation, and has the size of the whole
        parts = tensors[:1] if hasattr(tensors[0], "block_stride") else tensors
        place = sum(tensor.size for tensor in parts) // places
    return Sizes(map(_block_bytes, groups), place, workers)


def _block_bytes(group: Any) -> int | None:
    spec, layers = group.kv_cache_spec, getattr(group, "layer_names", None)
    page = getattr(spec, "page_size_bytes", None)
    if page is None or not layers:
        return None
    return int(page) if hasattr(spec, "kv_cache_specs") else int(page) * len(layers)


def _are(kinds: tuple[str, ...], spec: Any) -> bool:
    """True if a specification is of these kinds; layers of one kind may have a specification each."""
    layers = getattr(spec, "kv_cache_specs", None) or {"": spec}
    return all(type(layer).__name__ in kinds for layer in layers.values())


KvbmTap = make_tap("KvbmTap", _BASES, _Vllm())
_around: Final[dict[str, type]] = {}


def __getattr__(name: str) -> Any:
    """A tap around vLLM's own connector of this name, under the same name."""
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in _around:
        try:
            kind = _factory.KVConnectorFactory.get_connector_class_by_name(name)
        except ValueError as error:
            raise AttributeError(f"vLLM has no connector {name!r} that a tap could stand around") from error
        bases = tuple(base for base in _BASES if issubclass(kind, base))
        _around[name] = make_tap(name, bases, _Vllm(kind))
    return _around[name]
