"""Prompts with images under vLLM's own scheduler: ``why`` of a tapped request beside the engine's event stream.

Law of this file: the extra keys are those that vLLM made of the requests' images.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from kvbm_console.analysis.explain import Missed, explain
from kvbm_console.core.config import LeaderConfig
from kvbm_console.engines.kv_events.stream import EventStream
from kvbm_console.tap import vllm as binding
from tests.analysis.evidence import evidence
from tests.tap.watching import Watching
from tests.vllm.engine import Engine
from tests.vllm.features import Kept

pytestmark = pytest.mark.timeout(300)

IMAGES = {"a": "A" * 64, "b": "B" * 64, "again": "A" * 64}
IMAGE = PlaceholderRange(offset=16, length=32)
"""The second and the third block of a prompt are an image."""
PROMPT = [*range(100, 116), *[9] * IMAGE.length, *range(200, 230)]


def with_image(name: str) -> dict[str, Any]:
    digest = IMAGES[name]
    return {"mm_features": [
        MultiModalFeatureSpec(data=None, modality="image", identifier=digest, mm_position=IMAGE, mm_hash=digest)
    ]}


def test_a_prompt_with_another_image_names_both_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "Sender", Kept)
    engine = Engine(tmp_path, None, hook={})
    # The model of these tests takes text alone, so its scheduler has no room for images.
    engine.scheduler.max_num_encoder_input_tokens = IMAGE.length
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4 * IMAGE.length)
    engine.arguments = with_image
    sender = engine.tap.sender
    watch = Watching(sender.recorder, sender.flattener, sender.settings)
    stream, taken = EventStream(watch.dispatcher, 2), 0
    for name in IMAGES:
        for _ in engine.run([(engine.steps, name, PROMPT, 4)], before=watch.pump):
            pass
        watch.pump()
        for seq in range(taken, len(engine.batches)):
            stream.accept(seq, msgspec.msgpack.encode(engine.batches[seq]))
        taken = len(engine.batches)
    assert watch.rejected == []
    facts = evidence([event for outcome in watch.outcomes for event in outcome], LeaderConfig())
    first, other, again = (explain(facts, name).admissions[0] for name in IMAGES)
    assert [missed.reason for missed in first.misses] == [*[Missed.NEVER_STORED] * 4, Missed.TOO_SHORT]
    missed = other.misses[0]
    assert missed.reason is Missed.OTHER_CONTEXT
    assert "with image=AAAAAAAAAAAAAAAA" in missed.text
    assert "but not with image=BBBBBBBBBBBBBBBB" in missed.text
    assert [missed.reason for missed in again.misses] == [Missed.TOO_SHORT], "the same image is found"
    engine.scheduler.shutdown()
