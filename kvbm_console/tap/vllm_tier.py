"""``KvbmTier``: an entry of ``secondary_tiers`` around another one.

    "secondary_tiers": [{"type": "KvbmTier", "module_path": "kvbm_console.tap.vllm_tier", "integrity": "fail",
                         "inner": {"type": "fs", "root_dir": "/nvme/kv", "locality": "LOCAL"}}]

``inner`` is the entry of any tier of vLLM's TieringOffloadingSpec. ``integrity`` is ``off`` (the default), ``report``
or ``fail``, and ``sample`` checks one block of so many; see ``tiers``.

Law of this file: importing it needs vLLM, so nothing else of this program imports it.
"""

from importlib import import_module
from typing import Any, Final

from kvbm_console.tap.tiers import make_tier

_base: Final[Any] = import_module("vllm.v1.kv_offload.tiering.base")
_factory: Final[Any] = import_module("vllm.v1.kv_offload.tiering.factory")
_lookups: Final[Any] = import_module("vllm.v1.kv_offload.base")

KvbmTier = make_tier(_base.SecondaryTierManager, _factory.SecondaryTierFactory, _lookups.LookupResult.MISS)
