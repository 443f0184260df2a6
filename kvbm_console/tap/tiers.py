"""A tap around one tier below vLLM's host tier: its blocks are checked when they come back.

Theory of operation
-------------------
vLLM's ``TieringOffloadingManager`` gives each tier jobs: a store reads places of the host tier, a load fills them. The
manager polls the tier for the results of its jobs. The tap stands between both and passes everything on.

With ``integrity`` a thread sums up the sampled blocks of a store while the manager keeps them pinned. The sums are kept
if the store works. When a load has ended, the thread sums up the places that it filled, and the result waits for that.
With ``fail`` a damaged block turns the result into a failure that names the other blocks as loaded. The manager then
drops the damaged block. Its lookup is answered as a miss, so the request computes it again or loads it from another
tier. Without the miss the tier would offer the block again and again. A new store of the block ends the miss, unless
the block was damaged twice.

A breakpoint at ``dispatch.will`` may hold a load. The tap at the scheduler or the connector then asks the daemon before
the load, under a number of its own (``will_ask``). The tap here keeps the job until there is a verdict, and other jobs
go on. ``drain_jobs`` begins all loads, because vLLM waits for their end.

Example: a load of blocks a and b ends well, and b has another sum than at its store. The manager gets a failed job that
loaded a. The log, the event ``ContentMismatched`` and the warning name the request, the tier, b's key and both sums.

Law of this file: a member that is not defined here is the inner tier's own. An error of the tap's own part is counted
and never reaches the engine. Nothing here needs vLLM, whose classes come as arguments (``make_tier``).
"""

import inspect
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, ClassVar, Final

from kvbm_console.tap.flatten import group_and_hash
from kvbm_console.tap.recorder import TapRecorder
from kvbm_console.tap.sums import SumTable, chosen_sum, tag_of

_log: Final = logging.getLogger("vllm.kvbm_console")
MODES: Final = ("off", "report", "fail")
DAMAGED_MAX: Final = 4_096
"""Damaged blocks that are remembered; one that is forgotten is found again at its next load."""
SAMPLE_MAX: Final = 1_000_000
KIND, STAGE = "damaged-block", "tier"
"""The words of a finding in ``ContentMismatched``."""


class _Check:
    """A job whose blocks are summed up. ``result`` is set when the inner tier has reported it."""

    __slots__ = ("bad", "done", "job", "known", "result")
    # A store is done when its sums are taken: then its places may go to others. The sums are kept before the next load.

    def __init__(self, job: Any) -> None:
        self.job = job
        self.result: Any = None
        self.known: list[tuple[int, int]] = []
        """(tag, sum) of the sampled blocks of a store."""
        self.bad: list[tuple[bytes, int, list[int], int]] = []
        """Key, place, known sums and found sum of each damaged block of a load."""
        self.done = False


class TierChecker:
    """The thread that sums up blocks, and the sums. The engine's thread orders and waits."""

    def __init__(self, view: memoryview, sample: int) -> None:
        self._bytes = view.cast("B")
        self._size = view.strides[0] if view.strides else 0
        self._sample = sample
        self.name, self._sum = chosen_sum()
        self.table = SumTable()
        self.checked = self.unknown = self.errors = self.spent_ns = 0
        self.stored: deque[_Check] = deque()
        """Stores that have ended well, whose sums are kept before the next load is compared. Waking the thread for each
        would cost the engine a microsecond."""
        self._orders: SimpleQueue[tuple[Any, _Check] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="kvbm-tier", daemon=True)
        self._thread.start()

    def order(self, what: Any, check: _Check) -> None:
        """Let the thread call ``what(check)``, behind everything that was ordered before."""
        self._orders.put((what, check))

    def wait(self) -> None:
        """Wait until everything that was ordered is done."""
        done = Event()
        self._orders.put((lambda _: done.set(), _Check(None)))
        done.wait()

    def close(self) -> None:
        """End the thread and let the memory go."""
        self._orders.put(None)
        self._thread.join()
        self._bytes.release()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            what, check = order
            began = time.thread_time_ns()
            try:
                what(check)
            except Exception:
                self.errors += 1
                check.bad.clear()
            check.done = True
            self.spent_ns += time.thread_time_ns() - began

    def _sampled(self, job: Any) -> Iterable[tuple[bytes, int, int]]:
        for key, place in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            tag = tag_of(key)
            if tag % self._sample == 0:
                yield key, tag, place

    def _sum_at(self, place: int) -> int:
        with self._bytes[place * self._size : (place + 1) * self._size] as block:
            return self._sum(block)

    def take(self, check: _Check) -> None:
        """Sum up the blocks of a store that has begun."""
        check.known = [(tag, self._sum_at(place)) for _, tag, place in self._sampled(check.job)]
        self._keep()

    def _keep(self) -> None:
        while self.stored and self.stored[0].done:
            for tag, value in self.stored.popleft().known:
                self.table.add(tag, value)

    def compare(self, check: _Check) -> None:
        """Compare the blocks of a load. The first load of an unknown block tells its sum."""
        self._keep()
        loaded = None if check.result.success else set(check.result.successful_keys or ())
        for key, tag, place in self._sampled(check.job):
            if loaded is not None and key not in loaded:
                continue
            known, found = self.table.sums(tag), self._sum_at(place)
            self.checked += 1
            if not known:
                self.unknown += 1
                self.table.add(tag, found)
            elif found not in known:
                check.bad.append((key, place, known, found))


class TierTap:
    """The part of ``KvbmTier`` that is written here; ``make_tier`` adds the members of the inner tier."""

    factory: ClassVar[Any]
    """Makes the inner tier."""
    miss: ClassVar[Any]
    """vLLM's answer to a lookup that found nothing."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, *,
        inner: dict[str, Any] | None = None, integrity: str = "off", sample: int = 1, **more: Any,
    ) -> None:
        """A setting that cannot be raises ``ValueError`` with one sentence."""
        if more:
            raise ValueError(
                f"KvbmTier has no setting {min(more)!r}; its settings are inner, integrity and sample. "
                "Settings of the tier itself stand in inner."
            )
        if not isinstance(inner, dict) or "type" not in inner:
            raise ValueError('inner of KvbmTier must be the entry of a tier, like {"type": "fs", ...}')
        if integrity not in MODES:
            raise ValueError(f"integrity of KvbmTier must be {', '.join(MODES[:-1])} or {MODES[-1]}, got {integrity!r}")
        if isinstance(sample, bool) or not isinstance(sample, int) or not 1 <= sample <= SAMPLE_MAX:
            raise ValueError(f"sample of KvbmTier must be a whole number from 1 to {SAMPLE_MAX}, got {sample!r}")
        self._recorder: TapRecorder | None = None
        self._heals = integrity == "fail"
        self._checks: dict[int, _Check] = {}
        """The jobs that are summed up, by their number."""
        self._ended: deque[_Check] = deque()
        """Those that the inner tier has reported, and whose check goes on, in the order of the reports."""
        self._ready: list[Any] = []
        """Results for the manager."""
        self._damaged: dict[bytes, int] = {}
        """Damaged blocks, to how often they were found."""
        self._missing: set[bytes] = set()
        """Those whose lookup is answered as a miss."""
        self._asking: dict[int, int] = {}
        """Jobs that ask before they begin, to their numbers at the recorder."""
        self._held: list[tuple[int, Any]] = []
        """(number, job) of the loads that wait for a verdict."""
        self.found = 0
        """Damaged blocks in all loads."""
        self._inner = self.factory.create_secondary_tier(
            _with_pressure(offloading_spec, inner), primary_kv_view, offloading_spec
        )
        self._checker = TierChecker(primary_kv_view, sample) if integrity != "off" else None
        if self._checker is not None:
            _log.info("kvbm-console: blocks of tier %s are checked (integrity %s, 1 of %d, %s).",
                      self._inner.tier_type, integrity, sample, self._checker.name)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)  # the inner tier could not be made
        return getattr(self._inner, name)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> Any:
        """Those of the inner tier."""
        inner = extra_config.get("inner") or {}
        return cls.factory.get_tier_class(inner).build_metric_definitions(inner)

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> Any:
        """Those of the inner tier."""
        inner = tier_config.get("inner") or {}
        return cls.factory.get_tier_class(inner).config_info_keys(inner)

    def watched_by(self, recorder: TapRecorder) -> None:
        """Report findings to this tap, too."""
        self._recorder = recorder
        if hasattr(type(self._inner), "watched_by"):  # a tier of ours (``vllm_slots``)
            self._inner.watched_by(recorder)

    def will_ask(self, job: int, number: int) -> None:
        """The load of this job is reported under this number, and waits for a verdict."""
        self._asking[job] = number

    def gauges(self) -> dict[str, float]:
        """Counts since the engine began, for the figures of the connector."""
        checker = self._checker
        inner: dict[str, float] = self._inner.gauges() if hasattr(type(self._inner), "gauges") else {}
        if checker is None:
            return inner
        return inner | {
            "damaged_blocks": self.found + inner.get("damaged_blocks", 0),
            "checked_blocks": checker.checked, "unknown_blocks": checker.unknown,
            "check_seconds": checker.spent_ns / 1e9, "check_errors": checker.errors,
            "sums": checker.table.kept, "forgotten_sums": checker.table.forgotten,
        }

    # --- the manager's calls ---

    def lookup(self, key: Any, req_context: Any) -> Any:
        """The inner tier's answer; a miss for a block that is known to be damaged."""
        if key in self._missing:
            return self.miss
        return self._inner.lookup(key, req_context)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin a store."""
        self._begin(job_metadata)
        self._inner.submit_store(job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin a load, or keep it until a breakpoint lets it go."""
        number = self._asking.pop(job_metadata.job_id, None) if self._asking else None
        if number is not None and self._waits(number):
            self._held.append((number, job_metadata))
        else:
            self._load(job_metadata)

    def _load(self, job: Any) -> None:
        self._begin(job)
        self._inner.submit_load(job)

    def _waits(self, number: int) -> bool:
        return self._recorder is not None and self._recorder.copy_must_wait(number)

    def _let_go(self, *, all_of_them: bool = False) -> None:
        """Begin the held loads that have their verdict."""
        held, self._held = self._held, []
        for at, (number, job) in enumerate(held):
            if not all_of_them and self._waits(number):
                self._held.append((number, job))
                continue
            if self._recorder is not None:
                self._recorder.forget_copy(number)
            try:
                self._load(job)
            except BaseException:
                self._held += held[at + 1 :]
                raise

    def _begin(self, job: Any) -> None:
        if self._checker is not None:
            check = self._checks[job.job_id] = _Check(job)
            if not job.is_promotion:
                self._checker.order(self._checker.take, check)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The results of the inner tier, those of checked jobs once they are checked."""
        if self._held:
            self._let_go()
        results: Iterable[Any] = self._inner.get_finished_jobs()
        if self._checker is None:
            return results
        self._take(results)
        while self._ended and self._ended[0].done:
            self._ready.append(self._judged(self._ended.popleft()))
        ready, self._ready = self._ready, []
        return ready

    def _take(self, results: Iterable[Any]) -> None:
        """Let the results of jobs that worked be checked; the others are ready."""
        assert self._checker is not None
        for result in results:
            check = self._checks.pop(result.job_id, None)
            if check is None or not (result.success or result.successful_keys):
                self._ready.append(result)
                continue
            check.result = result
            if check.job.is_promotion:
                self._checker.order(self._checker.compare, check)
            else:
                self._checker.stored.append(check)
            self._ended.append(check)

    def _judged(self, check: _Check) -> Any:
        """The result of a checked job, as the manager gets it."""
        if not check.job.is_promotion and self._missing:
            self._missing.difference_update(key for key in check.job.keys if self._damaged.get(key) == 1)
        if not check.bad:
            return check.result
        for key, place, known, found in check.bad:
            self._tell(check.job, key, place, known, found)
        if not self._heals:
            return check.result
        bad = {key for key, *_ in check.bad}
        loaded = check.job.keys if check.result.success else check.result.successful_keys
        good = tuple(key for key in loaded if key not in bad)
        return replace(check.result, success=False, successful_keys=good or None)

    def _tell(self, job: Any, key: bytes, place: int, known: list[int], found: int) -> None:
        """Count a damaged block, and log and report it."""
        assert self._checker is not None
        self.found += 1
        times = self._damaged.pop(key, 0) + 1
        self._damaged[key] = times
        if self._heals:
            self._missing.add(key)
        while len(self._damaged) > DAMAGED_MAX:
            oldest = next(iter(self._damaged))
            del self._damaged[oldest]
            self._missing.discard(oldest)
        if times > 1 and not self._heals:
            return  # nothing is mended, so each load finds it
        stored = f"{self._checker.name} {', '.join(f'{value:016x}' for value in known)}"
        came = f"{self._checker.name} {found:016x}"
        tell_damage(self._recorder, str(self._inner.tier_type), job, key, place, stored, came, used=not self._heals)

    def has_pending_work(self) -> bool:
        """True if the engine must keep stepping."""
        return bool(self._held or self._ended) or bool(self._inner.has_pending_work())

    def drain_jobs(self) -> None:
        """Wait until no copy and no check uses the host tier. All results are there afterwards."""
        self._let_go(all_of_them=True)
        self._inner.drain_jobs()
        if self._checker is not None:
            self._take(self._inner.get_finished_jobs())
            self._checker.wait()

    def shutdown(self) -> None:
        """End the tier, then the checks, whose memory goes away. Held loads never begin."""
        self._held.clear()
        try:
            self._inner.shutdown()
        finally:
            if self._checker is not None:
                self._checker.close()


def tell_damage(
    recorder: TapRecorder | None, tier: str, job: Any, key: bytes, place: int, stored: str, came: str, *, used: bool
) -> None:
    """Log and report that a load of this tier brought a block with another sum than it was stored with."""
    request = str(job.req_context.req_id)
    _log.error(
        "kvbm-console: tier %s gave request %s a damaged block: key %s was stored with %s and came back with %s "
        "(load %d, host place %d).%s", tier, request, bytes(key).hex(), stored, came, job.job_id, place,
        "" if used else " It is not used.",
    )
    if recorder is not None and recorder.on:
        group, block = group_and_hash(key)
        recorder.put(("sanitized", time.monotonic_ns(), [
            KIND, STAGE, request, 0, group, block, -1, place, job.job_id, tier, came, stored, "",
        ]))


def _with_pressure(spec: Any, inner: dict[str, Any]) -> dict[str, Any]:
    """The inner tier's entry with the back-pressure that vLLM has found for the entry of the tap."""
    for entry in getattr(spec, "secondary_tier_configs", None) or ():
        if entry.get("inner") is inner and "backpressure" in entry:
            return {"backpressure": entry["backpressure"], **inner}
    return inner


def make_tier(base: type, factory: Any, miss: Any) -> Any:
    """The class ``KvbmTier`` for vLLM's base class of tiers, its factory, and its answer to a failed lookup.

    Every public member of ``base`` that ``TierTap`` does not define is looked up at the inner tier."""
    members: dict[str, Any] = {
        name: property(attrgetter(f"_inner.{name}")) for name in dir(base)
        if not name.startswith("_") and not hasattr(TierTap, name)
        and not isinstance(inspect.getattr_static(base, name), (classmethod, staticmethod))
    }
    members |= {"factory": factory, "miss": miss, "__module__": __name__, "__doc__": TierTap.__doc__}
    return type(base)("KvbmTier", (TierTap, base), members)
