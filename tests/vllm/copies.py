"""The worker's side of vLLM's connectors: a copy ends some steps after it was ordered, and moves nothing.

Law of this file: it knows what a worker is told, and answers what a worker answers; nothing of the scheduler is read.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from vllm.v1.outputs import KVConnectorOutput

from kvbm_console.explore.connectors import worker_meta
from kvbm_console.explore.shadow import Job
from tests.vllm.adapters import made

LOAD_STEPS: Final = 2


class Copies:
    """The copies of all connectors of one engine.

    Of each ``fail_every`` loads the last one fails at its second half, 0: none. Each of ``workers`` reports a copy in a
    step of its own.
    """

    def __init__(self, load_steps: int = LOAD_STEPS, fail_every: int = 0, workers: int = 1) -> None:
        self.load_steps = load_steps
        self.workers = workers
        self.fail_every = fail_every
        self.steps = 0
        self.loads = self.failed = 0
        self.jobs: list[tuple[int, Job]] = []
        """Copies with the step in which each ends."""
        self._failing: dict[int, set[int]] = {}
        """Job to the blocks that will not arrive."""
        self._stored: set[str] = set()
        """Requests with stores, in releases whose workers report requests and not jobs."""
        self._ended: set[str] = set()
        """Those that have ended."""

    def step(self, metadata: Any, ended_requests: Iterable[str] = ()) -> KVConnectorOutput | None:
        """One step with what the connector attached to it; what ended in it."""
        self.steps += 1
        flushed: set[int] = set()
        for job in orders(metadata, flushed):
            self.jobs += [(self.steps + (0 if job.sync else self.load_steps + worker), job)
                          for worker in range(self.workers)]
            if job.load:
                self.loads += 1
                if self.fail_every and self.loads % self.fail_every == 0:
                    places = [place for _, place in job.pairs]
                    self.failed += 1
                    self._failing[id(job)] = set(places[len(places) // 2 :])
        due = [job for step, job in self.jobs if step <= self.steps or job.number in flushed]
        self.jobs = [(step, job) for step, job in self.jobs if step > self.steps and job.number not in flushed]
        sent = self._sent(due, ended_requests, metadata)
        if not due and not sent:
            return None
        open_jobs = {id(job) for _, job in self.jobs}
        received = {
            name for job in due if job.load and not job.sync and job.kind != "sending" and id(job) not in open_jobs
            for name in job.request.split(",") if name
        }
        output: KVConnectorOutput = made(
            KVConnectorOutput, kv_connector_worker_meta=worker_meta(metadata, due),
            finished_sending=sent or None, finished_recving=received or None,
            invalid_block_ids={place for job in due for place in self._failing.pop(id(job), ())},
        )
        return output

    def _sent(self, due: list[Job], ended_requests: Iterable[str], metadata: Any) -> set[str]:
        """Requests whose blocks nobody reads any more."""
        for part in parts(metadata):
            self._stored.update(getattr(part, "reqs_to_store", ()))
        self._ended |= self._stored & set(ended_requests)
        sent = self._ended - {job.request for _, job in self.jobs if job.kind == "by request" and not job.load}
        self._ended -= sent
        self._stored -= sent
        return sent | {job.request for job in due if job.kind == "sending"}


def parts(metadata: Any) -> Iterator[Any]:
    """The metadata of each connector, in a MultiConnector of each inside it."""
    inside = getattr(metadata, "metadata", None)
    if isinstance(inside, tuple):
        for part in inside:
            yield from parts(part)
    elif metadata is not None:
        yield metadata


def orders(metadata: Any, flushed: set[int]) -> Iterator[Job]:
    """The copies that a step orders. Adds the numbers of jobs that must end in this step to ``flushed``."""
    for part in parts(metadata):
        flushed |= getattr(part, "jobs_to_flush", None) or set()
        for load, name in ((False, "store_jobs"), (True, "load_jobs")):
            for number, entry in (getattr(part, name, None) or {}).items():
                yield Job(number, load, entry.req_id, _targets(entry) if load else [], "offloading",
                          sync=getattr(entry, "sync", False))
        for load, name in ((False, "reqs_to_store"), (True, "reqs_to_load")):
            for request, (_, target) in (getattr(part, name, None) or {}).items():
                yield Job(-1, load, request, [(0, int(place)) for place in target.block_ids] if load else [],
                          "by request")
        if getattr(part, "load_event", -1) >= 0:
            names = part.load_event_to_reqs.get(part.load_event, ())
            yield Job(part.load_event, True, ",".join(names), [], "simple")
        if getattr(part, "store_event", -1) >= 0:
            yield Job(part.store_event, False, "", [], "simple")
        for request in getattr(part, "reqs_to_recv", ()):
            yield Job(-1, True, request, [], "receiving")
        for request in getattr(part, "reqs_to_send", ()):
            yield Job(-1, False, request, [], "sending")


def _targets(entry: Any) -> list[tuple[int, int]]:
    target = getattr(entry, "dst_spec", None) or entry.transfer_spec[1]
    return [(0, int(place)) for place in target.block_ids]
