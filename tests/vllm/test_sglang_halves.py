"""A request that one SGLang engine prefills and another decodes, under one leader. Run by ``make test-vllm``."""

import pytest

from tests.vllm.test_sglang_tap import Oracle, oracle

__all__ = ["oracle"]
pytestmark = pytest.mark.timeout(600)


def test_a_request_over_two_engines_is_one_course(oracle: Oracle) -> None:
    """SGLang's fake transfer, three polls long: a room joins the half that prefills and the half that decodes."""
    found = oracle.run([1, 3, 2], halves=True, polls=3, engine={"page": 16, "tokens": 1024})
    assert len(found["told"]) == 8
    for name, halves in found["told"].items():
        assert halves == [["prefill", f"prefill-{name}", 1, "finished"]]
    assert found["seen"]["prefill finishing"] > 0
    assert found["seen"]["decode onboarding"] > 0
    assert found["seen"]["decode decoding"] > 0


@pytest.mark.parametrize("page", [1, 16])
def test_aborts_and_retractions_in_both_engines(oracle: Oracle, page: int) -> None:
    engine = {
        "page": page, "tokens": 768, "num_reserved_decode_tokens": 1,
        "disaggregation_decode_retraction_backup": "cpu_tensor",
    }
    found = oracle.run([1, 8, 2, 160], halves=True, polls=2, aborts=0.01, engine=engine)
    assert found["finished"].keys() == {"length", "aborted"}
    assert found["preemptions"] > 0
