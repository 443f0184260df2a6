"""A scenario with the tap around the connector: the worker's half of a finding's recording.

Law of this file: it imports only modules that an environment with vLLM has, and none that makes the recording.
"""

import base64
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvbm_console.explore.scenario import Scenario
from kvbm_console.explore.vllm import Machine, Release
from kvbm_console.tap.flatten import drain

TAP: Final = {"kv_connector": "KvbmTap", "kv_connector_module_path": "kvbm_console.tap.vllm", "kv_role": "kv_both"}
RECORDS_MAX: Final = 100_000
"""More records than a step has, so each drain takes all records."""


class Tapped(Machine):
    """A machine that sends the tap's messages of each step."""

    def __init__(
        self, release: Release, connector: dict[str, Any], scenario: Scenario, faults: tuple[str, ...],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        around = {**TAP, "kv_connector_extra_config": {"connector": {"kv_role": "kv_both", **connector}, "send": False}}
        super().__init__(release, around, scenario, faults)
        self._tell = tell
        sender = self.connector.sender
        self._recorder, self._flattener = sender.recorder, sender.flattener
        self._recorder.listen()
        tell({"settings": msgspec.to_builtins(sender.settings)})

    def step(self) -> bool:
        try:
            return super().step()
        finally:
            self.tell_rest()

    def tell_rest(self) -> None:
        """Send the records since the last step."""
        messages = drain(self._recorder, self._flattener, RECORDS_MAX)
        if messages:
            packed = base64.b64encode(msgspec.msgpack.encode(messages)).decode()
            self._tell({"step": self.run.steps, "messages": packed})
