"""The source that is asked: one run of a recording, or a live daemon, with the same questions.

Law of this file: a recording is opened once, and a daemon is asked anew for each question.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from kvbm_console.analysis.diagnosis import Diagnosis, diagnose
from kvbm_console.analysis.notebook import RecordedRun
from kvbm_console.analysis.walk import Evidence
from kvbm_console.client import Access, Client
from kvbm_console.client.past import live_evidence
from kvbm_console.core.errors import UsageError
from kvbm_console.core.state import CacheState
from kvbm_console.stream.document import status_document
from kvbm_console.stream.feed import EventsArrived, SnapshotTaken

T = TypeVar("T")


class Facts(msgspec.Struct, frozen=True):
    """The facts of a source behind event ``seq``, with the document of ``status``."""

    seq: int
    at_ns: int
    state: CacheState
    document: dict[str, Any]


class AnswerSource(Protocol):
    """A recording or a daemon."""

    name: str
    live: bool

    async def evidence(self) -> Evidence:
        """Its events, for a walk."""
        ...

    async def facts(self, place: str | None) -> Facts:
        """Its facts at a place, or at its end. Raises ``UsageError`` and ``RecordingError``."""
        ...

    async def diagnosis(self) -> Diagnosis:
        """The findings of all lints."""
        ...


class RecordingSource:
    """A run of a recording. A recording that is still being written is read again for each question."""

    live = False

    def __init__(self, path: Path, run: str | None = None) -> None:
        self.run = RecordedRun(path, run)
        self.name = str(path)
        self._diagnosis: Diagnosis | None = None

    async def evidence(self) -> Evidence:
        """Its events."""
        if not self.run.recording.finished and self.run.recording.refresh():
            self._diagnosis = None
        return self.run.evidence

    async def facts(self, place: str | None) -> Facts:
        """Its facts at a place as ``replay --at`` takes it."""
        await self.evidence()
        moment = self.run.at("end" if place is None else place)
        return Facts(moment.seq, moment.at_ns, moment.state, moment.document)

    async def diagnosis(self) -> Diagnosis:
        """The findings, kept while the recording stays the same."""
        evidence = await self.evidence()
        if self._diagnosis is None:
            self._diagnosis = diagnose(evidence)
        return self._diagnosis


class LiveSource:
    """A daemon. Its past reaches as far back as its ring."""

    live = True

    def __init__(self, target: str, access: Access, client: str) -> None:
        self.name = target
        self._access = access
        self._client = client

    async def ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        """Open a connection, ask one question, close."""
        async with Client(self.name, name=self._client, access=self._access) as client:
            return await question(client)

    async def evidence(self) -> Evidence:
        """The events that its ring still holds."""
        return await self.ask(live_evidence)

    async def facts(self, place: str | None) -> Facts:
        """Its facts now. Raises ``UsageError`` for another place."""
        if place is not None:
            raise UsageError(f"a live daemon tells its facts of now; the place {place!r} needs a recording")
        evidence = await self.evidence()
        state = CacheState()
        for item in evidence.items():
            if isinstance(item, SnapshotTaken):
                state = item.state
            elif isinstance(item, EventsArrived):
                for event in item.events:
                    state.apply(event)
        at_ns = max(state.at_ns, evidence.now_ns or 0)
        document = status_document(state, at_ns=at_ns, incarnation="", subscribers=0, recorder=None)
        return Facts(state.seq - 1, at_ns, state, document)

    async def diagnosis(self) -> Diagnosis:
        """The findings of now."""
        return diagnose(await self.evidence())
