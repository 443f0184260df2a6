"""What stands in for a device under vLLM's own engine: tokens that are made up, and copies that take some steps.

``--distributed-executor-backend tests.vllm.executor.FakeExecutor`` puts it under vLLM's server. All that is above it,
from HTTP down to the block pool, its connectors and its events, is vLLM's.

Law of this file: it knows what a worker is told, and answers what a worker answers; nothing of the scheduler is read.
"""

import random
from concurrent.futures import Future
from typing import Any, Final

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from tests.vllm.copies import Copies

WORDS: Final = 1000
"""Tokens of the model that is not there."""


def token(name: str, known: int) -> int:
    """What the model says after so many tokens of a request."""
    return random.Random(f"{name} {known}").randrange(2, WORDS)


def answered(value: Any, non_block: bool) -> Any:
    """A value, or the future of it."""
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FakeExecutor(Executor):
    """One device. ``--num-gpu-blocks-override`` says how many blocks it has."""

    def _init_executor(self) -> None:
        self._known: dict[str, int] = {}
        """Tokens of each request that the worker has: those it was sent, and those it has sampled."""
        self._copies = Copies()
        self._sampled: ModelRunnerOutput | None = None

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        size = self.cache_config.block_size
        return [{"layer": FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=128, dtype=torch.float32)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def determine_available_memory(self) -> list[int]:
        return [2**30]

    def collective_rpc(self, method: Any, *args: Any, non_block: bool = False, **kwargs: Any) -> Any:
        """What is asked of a worker without a model beyond steps: ready made, or that nothing is done."""
        answers: dict[str, Any] = {
            "set_kv_cache_layout": None, "initialize_from_config": None, "get_kv_connector_handshake_metadata": None,
            "reset_mm_cache": None, "shutdown": None, "get_supported_tasks": ("generate",),
            "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
        }
        return answered([answers[method]], non_block)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """A step. One token for each request of which all known tokens are computed after it."""
        for name in scheduler_output.finished_req_ids:
            self._known.pop(name, None)
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            self._known[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(scheduler_output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            if computed[name] + scheduler_output.num_scheduled_tokens[name] < self._known[name]:
                sampled.append([])
                continue
            sampled.append([token(name, self._known[name])])
            self._known[name] += 1
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
            kv_connector_output=self._copies.step(
                scheduler_output.kv_connector_metadata, scheduler_output.finished_req_ids),
        )
        if not names:
            return answered(output, non_block)
        self._sampled = output
        return answered(None, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """What the last step has sampled."""
        return answered(self._sampled, non_block)

    def check_health(self) -> None:
        return
