"""The ids that vLLM's own front end gives to the samples of a request. Run by ``make test-vllm``."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest

from kvbm_console.core.ids import is_called, request_match, sampled

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm runs these"),
    pytest.mark.timeout(600),  # a busy machine takes minutes to import vLLM's front end
]


def test_the_id_of_a_client_names_the_samples_that_vllm_makes_of_its_request() -> None:
    processor = importlib.import_module("vllm.v1.engine.input_processor").InputProcessor
    parents = importlib.import_module("vllm.v1.engine.parallel_sampling").ParentRequest
    parameters = importlib.import_module("vllm.sampling_params").SamplingParams
    for client in ("chatcmpl-7", "cmpl-8-0"):
        request = SimpleNamespace(
            request_id=client, external_req_id=None, params=parameters(n=3)
        )
        processor.assign_request_id(request)
        assert request.request_id != client
        parent = parents(request)
        samples = [parent.get_child_info(index)[0] for index in range(3)]
        assert len(set(samples)) == 3
        for sample in samples:
            assert is_called(sample, client.removesuffix("-0"))
            assert request_match(client)(sample) is not None
            assert sampled(sample) == request.request_id
