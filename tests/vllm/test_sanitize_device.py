"""``sanitize`` on a CUDA device: equal fingerprints on both sides, and a model with random weights under vLLM.

Law of this file: without a device every test is skipped with that reason, and nothing is replaced by something else.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

import torch

from kvbm_console.sanitize.fingerprint import PageSide, Region
from tests.vllm.engine import named

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand: nothing is run on one"),
]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32_000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}
SHARE_MAX = 0.03


@pytest.mark.parametrize("used", [4_096, 4_092, 1_000])
def test_a_device_and_the_host_agree(used: int) -> None:
    host = np.random.default_rng(used).integers(-128, 127, (64, 4_096), dtype=np.int8)
    device = torch.from_numpy(host).cuda()
    places = list(range(0, 64, 3))
    wanted = PageSide([[Region(host, used=used)]]).fingerprints(0, places).get()
    side = PageSide([[Region(device, used=used)]])
    for apart in (False, True):
        assert (side.fingerprints(0, places, apart=apart).get() == wanted).all()


def served(directory: Path, monkeypatch: pytest.MonkeyPatch, sanitize: dict[str, Any] | None) -> tuple[Any, float, Any]:
    """Prompts that press the device's blocks, twice: the answers, the seconds, and the scheduler's connector."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    (directory / "config.json").write_text(json.dumps(LLAMA))
    connector: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                                 "kv_connector_extra_config": {"cpu_bytes_to_use": 4 * 2**30}}
    if sanitize is not None:
        connector = named(connector, sanitize=sanitize)
    model = LLM(
        model=str(directory), load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, seed=1,
        num_gpu_blocks_override=1_024, kv_transfer_config=KVTransferConfig(**connector),
    )
    dice = np.random.default_rng(3)
    prompts = [{"prompt_token_ids": dice.integers(3, 32_000, 1_200).tolist()} for _ in range(64)]
    sampling = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True, detokenize=False)
    model.generate(prompts[:4], sampling, use_tqdm=False)
    torch.cuda.synchronize()
    began = time.perf_counter()
    answers = [one.outputs[0].token_ids for _ in range(2) for one in model.generate(prompts, sampling, use_tqdm=False)]
    torch.cuda.synchronize()
    return answers, time.perf_counter() - began, model.llm_engine.engine_core.engine_core.scheduler.connector


def test_the_copies_of_a_real_model_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, connector = served(tmp_path, monkeypatch, {"sample": 1.0})
    checked, mismatched, unknown, _ = connector._marker.totals
    assert checked > 1_000
    assert mismatched == unknown == 0


def test_one_percent_costs_at_most_three_percent_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without, bare_s, _ = served(tmp_path, monkeypatch, None)
    answers, checked_s, connector = served(tmp_path, monkeypatch, {"sample": 0.01})
    checked, mismatched, _, spent_ns = connector._marker.totals
    assert checked > 0
    assert mismatched == 0
    assert answers == without
    assert spent_ns / 1e9 <= SHARE_MAX * checked_s
    assert checked_s <= (1 + SHARE_MAX) * bare_s
