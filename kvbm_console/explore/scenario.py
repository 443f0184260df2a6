"""A scenario: everything that is random in one run, as plain data.

A prompt is a path of segments. A segment is (family, tokens). Two prompts that begin with the same family share its
tokens up to the shorter segment. Other prompts share no blocks. A turn of a chat repeats the segments of the turn
before and adds a segment.

``copies`` times the copies: the n-th job of a run takes entry n modulo its length. An entry is 3 * steps + order. The
job is reported after so many steps. Its blocks move at once (order 0), at the last moment (1), or spread (2).

Law of this file: a scenario and a release of the engine determine a run, and a profile and a seed determine a scenario.
"""

import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import Any

BLOCK = 16
"""Tokens in a block."""
Segment = tuple[int, int]
"""Family of tokens, and the number of tokens."""


@dataclass(frozen=True)
class Arrive:
    """Before step ``step`` a request arrives; its answer has ``output`` tokens. For the next turn of a chat, ``after``
    names a request. Its prompt, and its answer as far as it has come, stand in front of this prompt."""

    step: int
    name: str
    prompt: tuple[Segment, ...]
    output: int
    after: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt itself."""
        return sum(count for _, count in self.prompt)


@dataclass(frozen=True)
class Abort:
    """Before step ``step`` a request is aborted, if it is live."""

    step: int
    name: str


@dataclass(frozen=True)
class CacheReset:
    """Before step ``step`` the prefix cache is reset. With ``running``, running requests are preempted for it. With
    ``connector``, the connector's cache is reset too."""

    step: int
    running: bool
    connector: bool


Action = Arrive | Abort | CacheReset
KINDS = {"arrive": Arrive, "abort": Abort, "reset": CacheReset}


@dataclass(frozen=True)
class Scenario:
    """The input of a run. Sizes are in blocks of ``BLOCK`` tokens."""

    device_blocks: int
    host_blocks: int
    max_running: int
    batch_tokens: int
    actions: tuple[Action, ...]
    copies: tuple[int, ...] = field(default=(3,))
    machine: tuple[tuple[str, Any], ...] = ()
    """Further choices of ``VLLM`` or ``LEADER`` by name; a choice that is not named has its first value."""

    def option(self, name: str) -> Any:
        """The value of a choice."""
        return dict(self.machine).get(name, OPTIONS[name][0])

    @property
    def fits(self) -> bool:
        """True if the device has room for each request by itself, in every group of layers."""
        groups = str(self.option("groups")).count("+") + 1
        room = (self.device_blocks - 1) // groups * BLOCK
        known: dict[str, int] = {}
        for action in self.actions:
            if isinstance(action, Arrive):
                known[action.name] = known.get(action.after, 0) + action.tokens + action.output
        return all(tokens <= room for tokens in known.values())

    def to_json(self) -> str:
        """One line that ``from_json`` reads."""
        document = dataclasses.asdict(self)
        names = {kind: name for name, kind in KINDS.items()}
        document["actions"] = [
            {"do": names[type(action)], **dataclasses.asdict(action)} for action in self.actions
        ]
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> "Scenario":
        """The scenario of a line. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for any other text."""
        document = json.loads(text)
        actions = tuple(_action(dict(entry)) for entry in document.pop("actions"))
        document["machine"] = tuple((name, value) for name, value in document.get("machine", ()))
        return cls(**{**document, "copies": tuple(document["copies"])}, actions=actions)

    @property
    def size(self) -> int:
        """The measure that shrinking makes smaller: actions first, then tokens and waits."""
        tokens = sum(
            action.tokens + action.output + bool(action.after) for action in self.actions if isinstance(action, Arrive))
        last = max((action.step for action in self.actions), default=0)
        places = self.device_blocks + self.host_blocks + self.max_running
        choices = sum(1_000 + value if isinstance(value, int) else 1_000 + len(str(value)) for _, value in self.machine)
        choices += sum(self.copies) + len(self.copies)
        return 100_000 * len(self.actions) + 10 * (tokens + places) + last + choices


def _action(entry: dict[str, Any]) -> Action:
    kind = KINDS[entry.pop("do")]
    if "prompt" in entry:
        entry["prompt"] = tuple((int(family), int(count)) for family, count in entry["prompt"])
    action: Action = kind(**entry)
    return action


def tokens_of(prompt: tuple[Segment, ...]) -> list[int]:
    """The token ids of a prompt. Equal family and position give the same token."""
    return [(family * 7919 + at * 31) % 997 + 2 for family, count in prompt for at in range(count)]


@dataclass(frozen=True)
class Profile:
    """The ranges of random scenarios."""

    device: tuple[int, int]
    host: tuple[int, int]
    sessions: tuple[int, int]
    turns: tuple[int, int]
    prompt: tuple[int, int]
    """Tokens that a turn adds."""
    output: tuple[int, int]
    gap: tuple[int, int]
    """Steps between the turns of a session."""
    wait: tuple[int, int]
    """Steps that a copy takes."""
    aborts: float = 0.0
    """The share of requests that are aborted."""
    resets: int = 0
    """The most resets of the prefix cache."""
    answers: float = 0.0
    """The share of turns whose prompt begins with the answer of the turn before."""
    machine: tuple[str, ...] = ()
    """The choices of ``VLLM`` that are drawn; of each, a value that is not the first."""


PROFILES = {
    "press": Profile((8, 32), (8, 64), (3, 8), (1, 3), (8, 120), (1, 24), (0, 30), (0, 6)),
    "hits": Profile((16, 32), (48, 128), (6, 12), (2, 3), (32, 160), (1, 12), (0, 10), (0, 6)),
    "abort": Profile((8, 32), (8, 64), (3, 8), (1, 3), (8, 120), (1, 24), (0, 20), (1, 8), aborts=0.4),
    "reset": Profile((10, 40), (8, 64), (3, 6), (1, 3), (8, 120), (1, 24), (0, 30), (1, 8), aborts=0.1, resets=3),
    "tight": Profile((6, 14), (4, 24), (2, 5), (1, 2), (16, 150), (1, 12), (0, 12), (1, 6)),
    "chat": Profile((8, 32), (16, 96), (2, 6), (2, 5), (4, 80), (1, 40), (10, 60), (0, 6), answers=0.8),
    "mild": Profile((48, 96), (32, 128), (2, 5), (1, 4), (8, 90), (4, 30), (10, 60), (0, 3)),
    "hybrid": Profile((16, 64), (16, 128), (3, 8), (1, 4), (8, 200), (1, 40), (0, 30), (0, 8), aborts=0.1, resets=1,
                      answers=0.3, machine=("groups",)),
    "ranks": Profile((8, 32), (8, 64), (3, 8), (1, 3), (8, 120), (1, 24), (0, 30), (0, 8), aborts=0.2, resets=1,
                     machine=("ranks",)),
    "failures": Profile((8, 32), (16, 96), (3, 10), (1, 3), (16, 140), (1, 24), (0, 20), (0, 6), aborts=0.1, resets=1,
                        answers=0.2, machine=("fails", "on_failure")),
}
"""``press``, ``tight``: more work than places. ``hits``: long prompts of many sessions come back from the host tier at
once. ``chat``: turns begin with the answers before them. ``mild``: room for all. ``abort`` and ``reset`` add aborts and
resets. ``hybrid``: layers with a sliding window beside layers with full attention. ``ranks``: several workers.
``failures``: loads fail."""
VLLM: dict[str, tuple[Any, ...]] = {
    "groups": ("full", "full+window", "full+window+window", "window"), "windows": ("kept", "all"), "ranks": (1, 2, 4),
    "fails": (0, 1, 3, 7), "on_failure": ("recompute", "recompute", "fail"),
}
"""Choices of a machine with vLLM. ``groups``: the kinds of its layers. ``windows``: which blocks it caches of a layer
with a sliding window. ``kept`` are those that vLLM keeps by default: since 0.33 the windows at the ends of prompts.
``all`` are all blocks, as before. ``ranks``: workers of tensor parallelism.
``fails``: of so many loads the last loses blocks, and ``on_failure`` is the engine's answer."""


LEADER: dict[str, tuple[Any, ...]] = {
    "g3_blocks": (0, 0, 24, 96), "offload_threshold": (0.0, 0.5, 0.9), "offload_law": ("order", "order", "total"),
    "asynchronous": (True, True, False), "offload_batch_blocks": (64, 2),
    "policy": ("simple_lru", "lfu", "frequency_based", "adaptive_lru", "lrfu", "lrfu_auto"),
    "prefetch": ("none", "none", "chain"), "fails": (0, 0, 3, 7), "patience_ns": (0, 20_000_000),
}
"""Choices of a run of our own leader. ``fails``: each such copy loses its first block."""
OPTIONS = {**LEADER, **VLLM}
"""All choices. ``fails`` is one of both engines."""


def generate_for_leader(profile: str, seed: int) -> Scenario:
    """The scenario of a seed with a machine of our own leader."""
    dice = random.Random(f"leader {profile} {seed}")
    drawn = ((name, dice.choice(values)) for name, values in LEADER.items())
    machine = tuple((name, value) for name, value in drawn if value != LEADER[name][0])
    return dataclasses.replace(generate(profile, seed), machine=machine)


def generate(profile: str, seed: int) -> Scenario:
    """The scenario of a seed. Raises ``KeyError`` for an unknown profile."""
    shape, dice = PROFILES[profile], random.Random(f"{profile} {seed}")
    device = dice.randint(*shape.device)
    drawn = random.Random(f"machine {profile} {seed}")
    machine = {name: drawn.choice(VLLM[name][1:]) for name in shape.machine}
    groups = str(machine.get("groups", "")).count("+") + 1
    most = (device - 2) // groups * BLOCK  # a request that never fits would only be refused
    actions: list[Action] = []
    shared = dice.choice((0, 0, BLOCK, 3 * BLOCK, 40))
    for session in range(dice.randint(*shape.sessions)):
        prompt: tuple[Segment, ...] = ((0, shared),) if shared and dice.random() < 0.8 else ()
        step, after, after_tokens = dice.randint(0, 12), "", 0  # ``after_tokens`` includes the answer of ``after``
        for turn in range(dice.randint(*shape.turns)):
            before, output = after_tokens + sum(count for _, count in prompt), dice.randint(*shape.output)
            if before + output >= most:
                break
            prompt = (*prompt, (1 + 10 * session + turn, min(dice.randint(*shape.prompt), most - before - output)))
            name = f"s{session}t{turn}"
            actions.append(Arrive(step, name, prompt, output, after))
            if dice.random() < shape.aborts:
                actions.append(Abort(step + dice.randint(0, 12), name))
            if dice.random() < 0.25:  # the same prompt again, a little later
                again = min(dice.randint(*shape.output), most - after_tokens - sum(count for _, count in prompt))
                actions.append(Arrive(step + dice.randint(0, 6), f"{name}b", prompt, again, after))
            if shape.answers and dice.random() < shape.answers:
                after, after_tokens, prompt = name, after_tokens + sum(count for _, count in prompt) + output, ()
            step += dice.randint(*shape.gap)
    for _ in range(dice.randint(0, shape.resets)):
        actions.append(CacheReset(dice.randint(2, 40), dice.random() < 0.6, dice.random() < 0.6))
    actions.sort(key=lambda action: action.step)
    return Scenario(
        device_blocks=device, host_blocks=dice.randint(*shape.host), max_running=dice.randint(1, 6),
        batch_tokens=dice.choice((32, 64, 128, 256)), actions=tuple(actions),
        copies=tuple(3 * dice.randint(*shape.wait) + dice.randrange(3) for _ in range(dice.randint(1, 12))),
        machine=tuple(machine.items()),
    )


PROFILES_OF = {"vllm": tuple(PROFILES), "leader": tuple(name for name, kind in PROFILES.items() if not kind.machine)}
"""Engine to its profiles."""
GENERATE = {"vllm": generate, "leader": generate_for_leader}
"""Engine to the scenarios of its seeds."""
