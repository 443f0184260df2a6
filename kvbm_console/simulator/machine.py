"""The numbers of a whole simulated machine, and the label by which a recording of it carries them.

A recording holds the leader's configuration. Step model, batch limits and links belong to the engine and the mover, and
no event tells them. The label ``machine`` has them, so a replay of the recording can build the same machine.

Law of this file: ``SimulatedMachine.of_labels(config, machine.labels())`` is the machine.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.simulator.config import OF_ENGINES, EngineConfig
from kvbm_console.simulator.link import DEFAULT_LINKS, LinkSpec

LABEL: Final = "machine"


class _Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: EngineConfig
    links: tuple[LinkSpec, ...]


class SimulatedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Leader, engine and links."""

    leader: LeaderConfig
    engine: EngineConfig
    links: tuple[LinkSpec, ...] = DEFAULT_LINKS
    own_connector: bool = False
    """True if the host tier belongs to the engine's own connector, as in vLLM. ``leader`` then has its numbers."""

    def labels(self) -> dict[str, str]:
        """The label of a recording of this machine; the leader's numbers are not in it."""
        label = msgspec.to_builtins(_Label(self.engine, tuple(self.links)))
        for field in OF_ENGINES:
            if getattr(self.engine, field) == getattr(EngineConfig(g1_blocks=1), field):
                del label["engine"][field]
        return {LABEL: msgspec.json.encode(label).decode()}

    def describe(self) -> str:
        """A line for people.

        >>> SimulatedMachine(leader=LeaderConfig(), engine=EngineConfig(g1_blocks=24)).describe()
        'G1 24 blocks; a step of 4 ms + 8 µs per prefill token + 40 µs per decoding request; 6 links'
        """
        engine = self.engine
        return (
            f"G1 {engine.g1_blocks:,} blocks; a step of {engine.step_base_ns / 1e6:g} ms + "
            f"{engine.prefill_token_ns / 1e3:g} µs per prefill token + {engine.decode_request_ns / 1e3:g} µs per "
            f"decoding request; {len(self.links)} links"
        )

    @classmethod
    def of_labels(cls, leader: LeaderConfig, labels: Mapping[str, str]) -> "SimulatedMachine | None":
        """The machine that these labels describe, None without the label or with a label that a newer version wrote."""
        text = labels.get(LABEL)
        if text is None:
            return None
        try:
            label = msgspec.json.decode(text, type=_Label)
        except (msgspec.DecodeError, UsageError):
            return None
        return cls(leader=leader, engine=label.engine, links=label.links)
