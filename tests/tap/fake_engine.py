"""A small engine with the objects of vLLM's connector interface: requests, blocks, steps, and a base class of its own.

Its base class has the methods that the tap knows, and others that nobody has seen. Its pool reuses the coldest blocks,
keeps what they held until then, and takes the youngest request's blocks when it has none left.

Law of this file: it shares no code with the program; what it keeps is the truth that tests compare with.
"""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import xxhash

BLOCK = 4


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_ABORTED = 5


class Base(ABC):
    """What connectors of this engine derive from."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self.role = role

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    def bind_kv_cache_manager(self, manager: Any) -> None:
        return

    def on_new_request(self, request: Any) -> None:
        return

    def update_connector_output(self, connector_output: Any) -> None:
        return

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return False, None

    def take_events(self) -> Any:
        return ()

    def reset_cache(self) -> bool | None:
        return None

    def shutdown(self) -> None:
        return

    @abstractmethod
    def predict_the_weather(self, place: str, *days: int, **options: Any) -> Any: ...

    def nobody_has_seen_this(self, first: Any, second: Any = 3) -> Any:
        return ("base", first, second)

    @property
    def likes_rain(self) -> bool:
        return False

    @classmethod
    def layout_of(cls, config: Any) -> Any:
        return ("base", config)

    @staticmethod
    def number_of(name: str) -> int:
        return len(name)


class Inner(Base):
    """A connector that finds nothing; ``answers`` are of its lookups."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[Any] = []
        self.rain = True
        self.extra = "mine"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("lookup", request.request_id, num_computed_tokens))
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append(("alloc", request.request_id))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return ("metadata", len(scheduler_output.num_scheduled_tokens))

    def predict_the_weather(self, place: str, *days: int, **options: Any) -> Any:
        return (self, place, days, options)

    @property
    def likes_rain(self) -> bool:
        return self.rain

    @likes_rain.setter
    def likes_rain(self, value: bool) -> None:
        self.rain = value

    @classmethod
    def layout_of(cls, config: Any) -> Any:
        return (cls.__name__, config)


@dataclass(eq=False)
class Request:
    """A request; its hashes chain, as those of an engine do."""

    request_id: str
    tokens: list[int]
    max_tokens: int
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    status: Status = Status.WAITING
    priority: int = 0
    session_id: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.hash()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash(self) -> None:
        while (len(self.block_hashes) + 1) * BLOCK <= len(self.tokens):
            at = len(self.block_hashes)
            before = self.block_hashes[-1] if at else b""
            text = before + str(self.tokens[at * BLOCK : (at + 1) * BLOCK]).encode()
            self.block_hashes.append(bytes(24) + xxhash.xxh3_64_digest(text))


@dataclass
class Block:
    block_id: int


@dataclass
class Blocks:
    """The engine's own list: it goes on growing with the request."""

    ids: list[int]

    @property
    def blocks(self) -> tuple[Any, ...]:
        return (self,)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> list[Any]:
        return [Block(one) for one in self.ids[part]]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


@dataclass
class NewRequest:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[Any] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: Cached
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str]


class Scheduler:
    """First come, first served. ``pool`` maps a block to its hash, ``owned`` a request to its blocks."""

    def __init__(self, connector: Any, *, blocks: int = 40, running: int = 6, budget: int = 24) -> None:
        self.connector = connector
        self.size, self.most, self.budget = blocks, running, budget
        self.hash_of: dict[int, bytes] = {}
        self.refs = [0] * blocks
        self.free = deque(range(1, blocks))
        self.owned: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.evicted: list[tuple[bytes, str]] = []
        self.reset_preempted: set[str] = set()
        connector.bind_kv_cache_manager(self)

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return (list(self.owned.get(name, [])),)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    # --- the pool ---

    def reset_prefix_cache(self) -> bool:
        """Forget every hash, when no request holds a block."""
        if any(self.refs):
            return False
        self.hash_of.clear()
        return True

    def reset(self) -> None:
        """Preempt all that run, then forget."""
        for request in list(self.running):
            self.preempt(request, self.reset_preempted)
        self.reset_prefix_cache()

    def preempt(self, victim: Request, preempted: set[str]) -> None:
        """Take the blocks of a request back."""
        self.running.remove(victim)
        self.release(victim.request_id)
        victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
        self.waiting.appendleft(victim)
        preempted.add(victim.request_id)

    def take(self, count: int, name: str) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            if block in self.hash_of:
                self.evicted.append((self.hash_of.pop(block), name))
            self.refs[block] = 1
        return taken

    def release(self, name: str) -> None:
        for block in reversed(self.owned.pop(name, [])):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    def prefix(self, request: Request) -> list[int]:
        where = {key: block for block, key in self.hash_of.items()}
        found: list[int] = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if key not in where:
                break
            found.append(where[key])
        return found

    # --- a step ---

    def step(self) -> Output:
        budget, scheduled, preempted = self.budget, {}, set()
        cached = Cached()
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            more = self.grow(request, count, preempted)
            if more is None:
                continue
            self.name(request, count)
            budget -= count
            scheduled[request.request_id] = count
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append((more,) if more else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
        for name in preempted & scheduled.keys():
            at = cached.req_ids.index(name)
            for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                del column[at]
            del scheduled[name]
        new = self.admit(budget, scheduled, cached) if not preempted else []
        output = Output(new, cached, scheduled, preempted | self.reset_preempted)
        self.reset_preempted = set()
        self.connector.build_connector_meta(output)
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        return output

    def grow(self, request: Request, count: int, preempted: set[str]) -> list[int] | None:
        need = -(-(request.num_computed_tokens + count) // BLOCK) - len(self.owned[request.request_id])
        while (more := self.take(max(0, need), request.request_id)) is None:
            victim = self.running[-1]
            self.preempt(victim, preempted)
            if victim is request:
                return None
        self.owned[request.request_id] += more
        return more

    def admit(self, budget: int, scheduled: dict[str, int], cached: Cached) -> list[NewRequest]:
        new: list[NewRequest] = []
        skipped: list[Request] = []
        while self.waiting and len(self.running) < self.most and budget > 0:
            request = self.waiting.popleft()
            prefix = self.prefix(request)
            tokens, _ = self.connector.get_num_new_matched_tokens(request, len(prefix) * BLOCK)
            if tokens is None:
                skipped.append(request)
                continue
            computed = len(prefix) * BLOCK
            count = min(budget, request.num_tokens - computed)
            for block in prefix:
                if not self.refs[block]:
                    self.free.remove(block)
                self.refs[block] += 1
            fresh = self.take(-(-(computed + count) // BLOCK) - len(prefix), request.request_id)
            if fresh is None:
                self.owned[request.request_id] = prefix
                self.release(request.request_id)
                skipped.append(request)
                break
            name = request.request_id
            self.owned[name] = prefix + fresh
            self.connector.update_state_after_alloc(request, Blocks(self.owned[name]), 0)
            request.num_computed_tokens = computed
            self.name(request, count)
            self.running.append(request)
            scheduled[name] = count
            budget -= count
            if request.status is Status.PREEMPTED:
                cached.req_ids.append(name)
                cached.resumed_req_ids.add(name)
                cached.new_block_ids.append((list(self.owned[name]),))
                cached.num_computed_tokens.append(computed)
            else:
                new.append(NewRequest(name, (list(self.owned[name]),), computed))
            request.status = Status.RUNNING
        self.waiting.extendleft(reversed(skipped))
        return new

    def name(self, request: Request, count: int) -> None:
        """Blocks that are full after this step carry their hash at once: the next request may already use them."""
        for at in range((request.num_computed_tokens + count) // BLOCK):
            block = self.owned[request.request_id][at]
            if block not in self.hash_of:
                self.hash_of[block] = request.block_hashes[at]

    def sample(self, output: Output) -> None:
        """One token for each request that has computed all it knows."""
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            request.tokens.append(xxhash.xxh32_intdigest(f"{name} {request.num_tokens}".encode()) % 100)
            request.hash()
            if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                self.end(request, Status.FINISHED_STOPPED)

    def end(self, request: Request, status: Status) -> None:
        request.status = status
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.connector.request_finished(request, (self.owned.get(request.request_id, []),))
        self.release(request.request_id)
        del self.requests[request.request_id]
