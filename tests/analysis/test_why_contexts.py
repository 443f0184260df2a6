"""Why a prompt missed whose tokens were there under another LoRA, salt or image: a tap's requests beside a stream.

Law of this file: both come through the programs that read them, and each test has a case in which nothing is claimed.
"""

from typing import Any

import pytest

from kvbm_console.analysis.explain import Missed, explain
from kvbm_console.core import stimuli as st
from kvbm_console.core.columns import pack_hashes, pack_ids
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.events import Event
from kvbm_console.core.ids import Authority, Tier
from kvbm_console.core.leader import Leader
from kvbm_console.dispatch import Dispatcher
from kvbm_console.engines.kv_events.stream import EventStream
from tests.analysis.evidence import evidence
from tests.engines.payloads import batch, removed, stored

STREAM, TAP = 1, 2
TOKENS = 16
OTHERS = list(range(500, 500 + TOKENS))


class Both:
    """One engine with an event stream and a tap."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.dispatcher = Dispatcher(Leader(LeaderConfig(), check=True), lambda: 1_000)
        self.dispatcher.publish = lambda stimulus, outcome: self.events.extend(outcome.events)
        self.stream = EventStream(self.dispatcher, STREAM)
        self.seq = 0
        self.submit(st.PoolDeclared, 0, 0, Tier.G1, "device", 64, TOKENS, Authority.OBSERVED)

    def submit(self, kind: Any, *fields: Any) -> None:
        self.dispatcher.submit_from(TAP, None, kind, *fields)

    def tell(self, *events: Any) -> None:
        """A batch of the stream."""
        self.stream.accept(self.seq, batch(*events))
        self.seq += 1

    def asks(self, name: str, key: int) -> None:
        """A request of one block that misses and is computed."""
        self.submit(st.RequestArrived, name, pack_hashes([key]), TOKENS + 1, 4, 0, None)
        self.submit(st.LookupObserved, name, 0, 0, False, Tier.G1)
        self.submit(st.BlocksAllocated, name, pack_ids([0, 1]), 0)
        self.submit(
            st.IterationScheduled, 0, 1, (name,), (), (), (), (), (), (name,), (TOKENS + 1,), (), (), b"", 1, 0
        )

    def why(self, name: str) -> tuple[Missed, str]:
        missed = explain(evidence(self.events, LeaderConfig()), name).admissions[0].misses[0]
        return missed.reason, missed.text


@pytest.mark.parametrize(("theirs", "mine", "words"), [
    ({"lora_name": "en"}, {"lora_name": "de"}, ("with lora=en", "but not with lora=de")),
    ({}, {"lora_name": "de"}, ("without LoRA, salt and image", "but not with lora=de")),
    ({"lora_name": "en"}, {}, ("with lora=en", "but not without LoRA, salt and image")),
    ({"extra_keys": [["salt-a"]]}, {"extra_keys": [["salt-b"]]}, ("with salt=#", "but not with salt=#")),
])
def test_equal_tokens_under_another_context(theirs: Any, mine: Any, words: tuple[str, str]) -> None:
    both = Both()
    both.tell(stored(99, lora_name="first", token_ids=OTHERS))  # a stream whose blocks have no context tells no digests
    both.tell(stored(11, **theirs))
    both.asks("a", 12)
    both.tell(stored(12, **mine))
    reason, text = both.why("a")
    assert reason is Missed.OTHER_CONTEXT
    assert text.startswith("its tokens were in G1 ")
    for part in words:
        assert part in text


@pytest.mark.parametrize("other", [
    stored(11, lora_name="de"),  # the same context: another reason kept it from being found
    stored(11, lora_name="en", token_ids=OTHERS),
    stored(11, lora_name="en", parent=99),
], ids=["same context", "other tokens", "behind another block"])
def test_nothing_is_claimed_of_another_block(other: Any) -> None:
    both = Both()
    both.tell(stored(99, lora_name="first", token_ids=OTHERS))
    both.tell(other)
    both.asks("a", 12)
    both.tell(stored(12, lora_name="de"))
    assert both.why("a")[0] is Missed.NEVER_STORED


def test_nothing_is_claimed_of_a_block_that_came_later_or_had_gone() -> None:
    both = Both()
    both.tell(stored(11, lora_name="en"))
    both.tell(removed(11))
    both.asks("a", 12)
    both.tell(stored(12, lora_name="de"), stored(13, lora_name="en"))
    assert both.why("a")[0] is Missed.NEVER_STORED


def test_nothing_is_claimed_of_a_block_in_another_engine() -> None:
    """Two streams and one tap: which of them tells of the tapped engine is not known by so few blocks."""
    both = Both()
    other = EventStream(both.dispatcher, 3)
    other.accept(0, batch(stored(98, lora_name="first", token_ids=OTHERS)))
    other.accept(1, batch(stored(11, lora_name="en")))
    both.tell(stored(99, lora_name="first", token_ids=OTHERS))
    both.asks("a", 12)
    both.tell(stored(12, lora_name="de"))
    assert both.why("a")[0] is Missed.NEVER_STORED
