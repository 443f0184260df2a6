"""Breakpoints that are kept from run to run, in a file.

Law of this file: the file is what is armed. It is written anew, whole, whenever a breakpoint that persists changes, and
a disk that refuses is told to the log and stops nothing.
"""

import logging
from pathlib import Path

import msgspec

from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import Refused, UsageError
from kvbm_console.debug.files import read_specs, renumbered, write_specs
from kvbm_console.service import LeaderService

log = logging.getLogger("kvbm_console.server")


class KeptBreakpoints:
    """Sets the breakpoints of a file at the start, and keeps those that persist in it."""

    def __init__(self, path: Path, service: LeaderService) -> None:
        self._path = path
        self._service = service
        self._seen: object = None
        self._gate: object = None
        self._written: list[BreakpointSpec] = []

    def load(self) -> int:
        """Set them, as the daemon's; how many. Raises ``UsageError`` for a file that is not understood."""
        if not self._path.exists():
            return 0
        sessions = self._service.sessions
        session = sessions.open("file", lease=False)
        numbers: dict[int, int] = {}
        specs = read_specs(self._path)
        for spec in specs:
            try:
                verdict = sessions.set(session, msgspec.structs.replace(renumbered(spec, numbers), persist=True))
            except Refused as error:
                raise UsageError(f"{self._path}: breakpoint {spec.id}: {error}") from None
            numbers[spec.id] = verdict.id
        self._written = self._kept()
        return len(specs)

    def look(self) -> None:
        """After every publication: write the file when what it keeps has changed."""
        leader = self._service.leader
        if leader.state.breakpoints is self._seen and leader.gate is self._gate:
            return  # every change of a breakpoint makes one of the two anew
        self._seen, self._gate = leader.state.breakpoints, leader.gate
        kept = self._kept()
        if kept == self._written:
            return
        self._written = kept
        try:
            write_specs(self._path, kept)
        except OSError as error:
            log.warning("breakpoints are not kept: %s: %s", self._path, error.strerror)

    def _kept(self) -> list[BreakpointSpec]:
        return [
            msgspec.structs.replace(known.spec, enabled=known.enabled)
            for known in self._service.state.breakpoints.values() if known.spec.persist
        ]
