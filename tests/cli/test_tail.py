"""``tail`` prints a feed, with a sentence on stderr for what is missing."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvbm_console.cli.tail import Printer
from kvbm_console.stream.feed import FeedItem, GapSeen


@pytest.mark.parametrize(("gap", "sentence"), [
    (GapSeen(5, 5, "fell_behind"), "lost 1 event, 5 to 5: the reader fell behind\n"),
    (GapSeen(5, 5_004, "not_kept"), "lost 5,000 events, 5 to 5004: the daemon no longer kept them\n"),
    (GapSeen(1, 9, "restarted"), "lost 9 events, 1 to 9: another run began\n"),
])
def test_a_gap_is_told_in_words(gap: GapSeen, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def feed() -> AsyncIterator[FeedItem]:
        yield gap

    asyncio.run(Printer("text", None, 0, None).consume(feed()))
    assert capsys.readouterr() == ("", sentence)
