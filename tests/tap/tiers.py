"""A tier below the host tier that is made of arrays, and the part of vLLM's manager that a tap sees.

Law of this file: the names and the calls are vLLM's, and a block keeps its bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from kvbm_console.tap.tiers import make_tier

PLACES, SIZE = 16, 512
MISS, HIT = "miss", "hit"


@dataclass
class Result:
    """As vLLM's ``JobResult``."""

    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...] | None = None
    transfer_time: float | None = None


@dataclass
class Job:
    """As vLLM's ``TransferJob``."""

    job_id: int
    keys: list[bytes]
    chunk_ids: Any
    is_promotion: bool
    req_context: Any = field(default_factory=lambda: SimpleNamespace(req_id="a"))


class Base(ABC):
    """As vLLM's ``SecondaryTierManager``, as far as its members are looked at."""

    medium: ClassVar[Any] = None
    tolerates_off_thread_polling: ClassVar[bool] = False

    def __init__(self, view: memoryview, tier_type: str) -> None:
        self.view, self.tier_type, self.locality = view.cast("B"), tier_type, None

    @property
    def bp_detector(self) -> str:
        return "detector"

    @abstractmethod
    def lookup(self, key: bytes, context: Any) -> str: ...

    @abstractmethod
    def submit_store(self, job: Job) -> None: ...

    @abstractmethod
    def submit_load(self, job: Job) -> None: ...

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[Result]: ...

    def has_pending_work(self) -> bool:
        return False

    def touch(self, keys: list[bytes], context: Any) -> None:
        return

    @abstractmethod
    def drain_jobs(self) -> None: ...

    def shutdown(self) -> None:
        return

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {}

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return ()


class Dictionary(Base):
    """A tier that keeps the bytes of blocks, and does not write a block again that it has, as vLLM's fs tier."""

    medium = SimpleNamespace(value="STORAGE")
    tolerates_off_thread_polling = True

    def __init__(self, view: memoryview, tier_type: str) -> None:
        super().__init__(view, tier_type)
        self.blocks: dict[bytes, bytes] = {}
        self.results: list[Result] = []
        self.touched: list[bytes] = []

    def lookup(self, key: bytes, context: Any) -> str:
        return HIT if key in self.blocks else MISS

    def touch(self, keys: list[bytes], context: Any) -> None:
        self.touched += keys

    def submit_store(self, job: Job) -> None:
        for key, place in zip(job.keys, job.chunk_ids, strict=True):
            self.blocks.setdefault(key, bytes(self.view[place * SIZE : (place + 1) * SIZE]))
        self.results.append(Result(job.job_id, True, transfer_time=0.25))

    def submit_load(self, job: Job) -> None:
        found = [key for key in job.keys if key in self.blocks]
        for key, place in zip(job.keys, job.chunk_ids, strict=True):
            if key in self.blocks:
                self.view[place * SIZE : (place + 1) * SIZE] = self.blocks[key]
        works = len(found) == len(job.keys)
        self.results.append(Result(job.job_id, works, None if works else tuple(found) or None, 0.5))

    def get_finished_jobs(self) -> Iterable[Result]:
        ended, self.results = self.results, []
        return ended

    def drain_jobs(self) -> None:
        return

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {"of": extra_config["type"]}

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return ("info",)


class Factory:
    """As vLLM's ``SecondaryTierFactory``."""

    made: dict[str, Any]

    @classmethod
    def create_secondary_tier(cls, config: dict[str, Any], view: memoryview, spec: Any) -> Base:
        cls.made = config
        return Dictionary(view, config["type"])

    @staticmethod
    def get_tier_class(config: dict[str, Any]) -> type[Base]:
        return Dictionary


Tier: Any = make_tier(Base, Factory, MISS)
INNER = {"type": "dictionary"}


class FakeMetrics:
    """As vLLM's ``TieringMetricsTracker``, as far as the tap wraps it."""

    def on_job_finished(self, job: Any, result: Result) -> None:
        return


class FakeManager:
    """As vLLM's ``TieringOffloadingManager``: it registers jobs, gives them to its tier, and polls."""

    primary_tier = SimpleNamespace(medium=SimpleNamespace(value="CPU"))

    def __init__(self, **settings: Any) -> None:
        self.host = np.zeros((PLACES, SIZE), np.uint8)
        self.tier: Any = Tier(None, self.host.data, "KvbmTier", inner=INNER, **settings)
        self.tier._inner.locality = SimpleNamespace(value="LOCAL")
        self.secondary_tiers = [self.tier]
        self._metrics = FakeMetrics()
        self._jobs: dict[int, Job] = {}
        self.loaded: list[str] = []
        """The requests whose loads have ended, in that order."""
        self.numbers = 0

    def _register_job(self, job: Job, tier_idx: int) -> None:
        self._jobs[job.job_id] = job

    def begin(self, request: str, keys: list[bytes], places: list[int], *, load: bool) -> None:
        """A job of the tier."""
        self.numbers += 1
        context = SimpleNamespace(req_id=request)
        job = Job(self.numbers, keys, np.array(places, np.int32), load, context)
        self._register_job(job, 0)
        (self.tier.submit_load if load else self.tier.submit_store)(job)

    def poll(self) -> None:
        """Take the results of the tier."""
        for result in self.tier.get_finished_jobs():
            job = self._jobs.pop(result.job_id)
            self._metrics.on_job_finished(SimpleNamespace(transfer_job=job), result)
            if job.is_promotion:
                self.loaded.append(job.req_context.req_id)


def key(number: int, group: int = 0) -> bytes:
    """The key of a block."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")
