"""The parts of vLLM that change between releases, each looked up in the release itself.

Law of this file: no number of a release stands here. A part is asked for by its presence.
"""

import dataclasses
import inspect
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvbm_console.explore.connectors import PAGE
from kvbm_console.tap import vllm as binding
from kvbm_console.tap.scheduler import missing_methods

sha256 = import_module("vllm.utils").__dict__.get("sha256")
with suppress(ModuleNotFoundError):
    sha256 = import_module("vllm.utils.hashing").sha256


class NoSuchFeature(Exception):
    """This release lacks a feature; the text names the missing part."""


def hasher(unit: int) -> Any:
    """The function that makes a request's hashes, of ``unit`` tokens each."""
    init_none_hash(sha256)
    return get_request_block_hasher(unit, sha256)


def made(kind: Any, **arguments: Any) -> Any:
    """``kind`` made of the arguments that its constructor has; the others mean nothing in this release."""
    accepted = inspect.signature(kind).parameters
    return kind(**{name: argument for name, argument in arguments.items() if name in accepted})


def with_all(kind: Any, **arguments: Any) -> Any:
    """``kind`` made of these arguments. Raises ``NoSuchFeature`` if its constructor lacks any."""
    missing = arguments.keys() - inspect.signature(kind).parameters.keys()
    if missing:
        raise NoSuchFeature(f"{kind.__name__} has no {', '.join(sorted(missing))}")
    return kind(**arguments)


def spec(kind: str, **fields: Any) -> Any:
    """A specification of a group of layers. Raises ``NoSuchFeature`` without this class or one of the fields."""
    found = getattr(interface, kind, None)
    if found is None:
        raise NoSuchFeature(f"no {kind}")
    if "use_mla" in inspect.signature(found).parameters:
        fields = {"use_mla": False, **fields}
    return with_all(found, **fields)


def kv_cache_config(blocks: int, groups: list[Any], layers: int, cache: Any) -> Any:
    """A cache of ``groups`` of ``layers`` layers; the n-th layers of all groups share a tensor.

    A block of a layer has ``PAGE`` bytes. Windows are kept as ``cache`` says, in a release that can be told."""
    names = [[f"layer{at}.{layer}" for layer in range(layers)] for at in range(len(groups))]
    kind = interface.KVCacheTensor
    accepted = {part.name for part in dataclasses.fields(kind)}
    # With strides the tensors are parts of a single allocation, and each has the size of the whole.
    size = blocks * PAGE * (layers if "block_stride" in accepted else 1)
    tensors = []
    for shared in zip(*names, strict=True):
        known = {"size": size, "shared_by": list(shared), "layers": list(shared), "layer_stride": blocks * PAGE,
                 "block_stride": PAGE}
        tensors.append(kind(**{name: field for name, field in known.items() if name in accepted}))
    return made(
        KVCacheConfig, num_blocks=blocks, kv_cache_tensors=tensors,
        prefix_cache_retention_interval=getattr(cache, "prefix_cache_retention_interval", None),
        kv_cache_groups=[KVCacheGroupSpec(*group) for group in zip(names, groups, strict=True)],
    )


def block_sizes(kv_cache: Any, config: VllmConfig) -> tuple[int, int]:
    """Tokens in a block of the scheduler and in a hash, as vLLM's engine sets them."""
    utils = import_module("vllm.v1.core.kv_cache_utils")
    if not hasattr(utils, "resolve_kv_cache_block_sizes"):
        return config.cache_config.block_size, config.cache_config.block_size
    size, unit = utils.resolve_kv_cache_block_sizes(kv_cache, config)
    kv_cache.hash_block_size = unit
    return size, unit


def scheduler(config: VllmConfig, kv_cache: Any, hook: dict[str, Any] | None = None) -> tuple[Any, int]:
    """The scheduler that vLLM's engine takes for this configuration, and the tokens in a hash.

    With ``hook`` the scheduler has a tap with these settings. Raises ``NoSuchFeature`` if it cannot be observed."""
    size, unit = block_sizes(kv_cache, config)
    choose = getattr(config.scheduler_config, "get_scheduler_cls", None)
    kind = Scheduler if choose is None else choose()
    if hook is not None:
        if choose is None:
            raise NoSuchFeature("SchedulerConfig has no get_scheduler_cls")
        if lacking := missing_methods(kind):
            raise NoSuchFeature(f"the scheduler has no {', '.join(lacking)}")
        kind = binding.tapped(kind, hook)
    signature = inspect.signature(Scheduler).parameters
    more = {"hash_block_size": unit} if "hash_block_size" in signature else {}
    return kind(
        vllm_config=config, kv_cache_config=kv_cache, log_stats=True, block_size=size,
        structured_output_manager=StructuredOutputManager(config), **more,
    ), unit


def request(name: str, prompt: list[int], sampling: Any, block_hasher: Any, **more: Any) -> Request:
    """A request. Raises ``NoSuchFeature`` for an argument that requests of this release lack."""
    if "eos_token_id" in inspect.signature(Request).parameters:
        more["eos_token_id"] = None
    made_request: Request = with_all(
        Request, request_id=name, prompt_token_ids=prompt, sampling_params=sampling, pooling_params=None,
        block_hasher=block_hasher, **more,
    )
    return made_request


def runner_output(names: list[str], sampled: list[list[int]], copies: KVConnectorOutput | None) -> Any:
    """The result of a step."""
    wanted = {field.name: str(field.type) for field in dataclasses.fields(ModelRunnerOutput)}
    if "ndarray" in wanted["sampled_token_ids"]:
        sampled = [np.array(tokens, dtype=np.int64) for tokens in sampled]  # type: ignore[misc]
    return made(
        ModelRunnerOutput, req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        kv_connector_output=copies,
    )


def cached_tokens(output: Any) -> tuple[int, int] | None:
    """Prompt tokens that the engine found in device memory and below; None if this output does not tell."""
    if hasattr(output, "prefill_stats"):
        stats = output.prefill_stats
        return None if stats is None else (stats.num_local_cached_tokens, stats.num_external_cached_tokens)
    total = output.num_cached_tokens
    external = getattr(output, "num_external_computed_tokens", 0)
    return total - external, external
