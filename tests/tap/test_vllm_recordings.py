"""What the tap said of vLLM's own scheduler (``tests/vllm/record.py``), against the truth that was kept beside it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from kvbm_console.core.ids import SlotState, Tier
from kvbm_console.core.tiers import WRITING
from kvbm_console.tap.flatten import Flattener
from kvbm_console.tap.recorder import Recorder
from kvbm_console.tap.sender import Settings
from tests.tap.watching import Watching

KEPT = Path(__file__).resolve().parents[2] / "recordings" / "vllm"
UNPACKED_MAX = 64 * 2**20


@pytest.mark.parametrize("name", ["alone", "offload"])
def test_the_leader_comes_to_the_schedulers_own_truth_after_every_step(name: str) -> None:
    data = zstandard.ZstdDecompressor().decompress((KEPT / f"{name}.tap.zst").read_bytes(), UNPACKED_MAX)
    kept: Any = msgspec.msgpack.decode(data, strict=False)
    watch = Watching(Recorder(), Flattener(), msgspec.convert(kept["settings"], Settings))
    state = watch.leader.state
    loads = 0
    for messages, truth in kept["steps"]:
        watch.now += 10**7
        watch.take(messages)
        slots = {slot.request: slot for slot in state.slots.values() if slot.state is not SlotState.FINISHING}
        assert slots.keys() == truth["requests"].keys()
        coming: set[int] = set()
        for request, (blocks, computed, runs) in truth["requests"].items():
            slot = slots[request]
            assert slot.device_blocks == blocks
            if runs:
                assert slot.computed_tokens(state.iteration) == computed
            if slot.state is SlotState.ONBOARDING:
                coming |= set(blocks)
                loads += 1
        pool = state.pools[0]
        known = {
            place: key for place, key in enumerate(pool.hash_of)
            if key and place not in coming and pool.content[place] != WRITING
        }
        assert known == {place: key for place, key in truth["hashes"].items() if place not in coming}
    assert watch.rejected == []
    assert state.lost_sources == {}
    assert not state.slots
    assert state.totals.hit_blocks[0] > 0
    assert (loads > 0) is (name == "offload") is (state.totals.hit_blocks[Tier.G2 - 1] > 0)
    assert watch.mirror.totals == state.totals
