"""Writes what a Dynamo leader would have recorded, from a run of our own engine and leader.

Law of this file: it says what that recorder says and no more: no preemptions, no ends of iterations, no look-up that
was answered "ask again".
"""

import json
from collections.abc import Sequence
from typing import Any

from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import unpack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.leader import Outcome
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.embedded import Rig, build
from kvbm_console.simulator.hashing import Chain
from kvbm_console.simulator.workloads import Request
from kvbm_console.testing import Prompts

SALT = 1337


class Asked:
    """A request with the tokens that its hashes stand for."""

    def __init__(self, name: str, words: Sequence[tuple[int, int]], at_ms: int, output: int, block_tokens: int) -> None:
        self.tokens = [word for word, count in words for _ in range(count)]
        self.output = [1_000 + sum(name.encode())] * output
        chain = Chain(block_tokens, salt=SALT)
        chain.extend(self.tokens)
        hashes = tuple(chain.hashes)
        chain.extend(self.output)
        self.request = Request(
            request=name, arrival_ns=at_ms * 1_000_000, hashes=hashes, output_hashes=tuple(chain.hashes[len(hashes):]),
            prompt_tokens=len(self.tokens), output_tokens=output, session=None,
        )


class DynamoWriter:
    """Runs the requests and keeps the lines; ``hits`` is what our own leader scored."""

    def __init__(self, asked: Sequence[Asked], config: LeaderConfig, engine: EngineConfig) -> None:
        self.lines: list[dict[str, Any]] = []
        self.asked = {one.request.request: one for one in asked}
        self.computed: dict[str, int] = {}
        self.told: dict[str, list[int]] = {}
        """Blocks that the recording has named."""
        self.decoding: set[str] = set()
        self.out: set[str] = set()
        self.rig: Rig | None = None
        self.rig = build(
            config, engine, Prompts([one.request for one in asked], config.block_tokens), publish=self._publish
        )
        self.rig.run_to_end()
        self.totals = self.rig.leader.state.totals

    def text(self) -> str:
        return "".join(json.dumps(line) + "\n" for line in self.lines)

    def _write(self, at_ns: int, action: str, call: dict[str, Any], answer: dict[str, Any]) -> None:
        self.lines.append({"timestamp": at_ns // 1_000_000, "event": {action: [call, answer]}})

    def _publish(self, s: Stimulus, outcome: Outcome) -> None:
        if isinstance(s, st.RequestArrived):
            about = {"request_id": s.request, "lora_name": None, "salt_hash": SALT}
            self._write(s.at_ns, "CreateSlot", {"request": about, "tokens": self.asked[s.request].tokens}, {})
            self._write(s.at_ns, "HasSlot", {"request_id": s.request}, {"result": True})
        elif isinstance(s, st.MatchRequested):
            tokens = getattr(outcome.result, "tokens", None)
            if tokens is not None:
                self._write(s.at_ns, "GetNumNewMatchedTokens", {
                    "request_id": s.request, "request_num_tokens": len(self.asked[s.request].tokens),
                    "num_computed_tokens": s.computed_tokens,
                }, {"num_new_matched_tokens": tokens, "has_matched": tokens > 0})
                self.computed[s.request] = s.computed_tokens
        elif isinstance(s, st.BlocksAllocated):
            ids = unpack_ids(s.block_ids)
            if s.request not in self.told:
                self.told[s.request] = ids
                self.computed[s.request] += s.external_tokens
                self._write(s.at_ns, "UpdateStateAfterAlloc", {
                    "request_id": s.request, "block_ids": ids, "num_external_tokens": s.external_tokens,
                }, {})
        elif isinstance(s, st.RequestPreempted):
            for memory in (self.told, self.computed):
                memory.pop(s.request, None)
            self.decoding.discard(s.request)
            self.out.discard(s.request)
        elif isinstance(s, st.IterationScheduled):
            self._iteration(s)
        elif isinstance(s, st.RequestFinished):
            ids = self.told.pop(s.request, [])
            self.decoding.discard(s.request)
            self._write(s.at_ns, "RequestFinished", {"request_id": s.request, "block_ids": ids},
                        {"is_finished": bool(getattr(outcome.result, "delay_free", False))})

    def _iteration(self, s: st.IterationScheduled) -> None:
        assert self.rig is not None
        state = self.rig.leader.state
        self.decoding |= set(s.first_tokens)
        self.out = (self.out | set(s.skipped)) - set(s.unskipped)
        ends = dict(zip(s.progressed, s.positions, strict=True))
        ends |= {name: self.computed[name] + 1 for name in self.decoding - self.out if name not in ends}
        new, cached, scheduled = [], [], {}
        for name, end in ends.items():
            slot = state.slot_named(name)
            assert slot is not None
            begin = self.computed[name]
            scheduled[name] = end - begin
            blocks = list(slot.device_blocks)
            if name in s.new:
                new.append({"request_id": name, "prompt_token_ids": self.asked[name].tokens, "block_ids": blocks,
                            "num_computed_tokens": begin})
            else:
                known = [] if name in s.resumed else self.told[name]
                prompt = len(self.asked[name].tokens)
                generated = self.asked[name].output[max(0, begin - prompt) : max(0, end - prompt)]
                cached.append({
                    "request_id": name, "resumed_from_preemption": name in s.resumed,
                    "new_token_ids": [] if name in s.resumed else generated, "new_block_ids": blocks[len(known):],
                    "num_computed_tokens": begin,
                })
            self.told[name] = blocks
            self.computed[name] = end
        self._write(s.at_ns, "BuildConnectorMeta", {"scheduler_output": {
            "new_requests": new, "cached_requests": cached, "num_scheduled_tokens": scheduled,
        }}, {"metadata": {"iteration": s.iteration, "new_slots": [], "operations": []}})
