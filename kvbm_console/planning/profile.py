"""A profile: the step times and links of a machine as ``calibrate`` found them, with the range in which they hold.

Law of this file: ``read_profile`` reads what ``profile_text`` writes, and a file that lacks a number is refused.
"""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.files import read_bounded
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link_settings import FILE_BYTES_MAX, STEP, LinkSetting, settings_of


class StepProfile(msgspec.Struct, frozen=True):
    """The step model, and the largest counts of a measured step: beyond them the times are a guess."""

    base_ns: int
    prefill_token_ns: int
    decode_request_ns: int
    prefill_tokens_max: float
    decode_requests_max: float


class MachineProfile(msgspec.Struct, frozen=True):
    """The settings of ``--profile``, read from the file ``path``."""

    path: str
    step: StepProfile
    links: tuple[LinkSetting, ...]

    def settings(self) -> dict[str, int]:
        """The fields of ``CacheOptions`` with the step times."""
        step = self.step
        return {
            "step_base": step.base_ns, "step_prefill_token": step.prefill_token_ns,
            "step_decode_request": step.decode_request_ns,
        }

    def beyond(self, prefill_tokens: int, decode_requests: int) -> list[str]:
        """A sentence for each of the largest counts of a run's steps that is above the measured ones."""
        counts = (
            ("prompt tokens", prefill_tokens, self.step.prefill_tokens_max),
            ("decoding requests", decode_requests, self.step.decode_requests_max),
        )
        return [
            f"{self.path} was measured with up to {most:,.0f} {name} in a step, and a step of this run had {count:,}: "
            "its time is a guess"
            for name, count, most in counts if count > most
        ]


def read_profile(path: Path) -> MachineProfile:
    """The profile in a file of ``calibrate --out``. Raises ``UsageError`` with the end of a sentence."""
    try:
        tables: dict[str, Any] = tomllib.loads(read_bounded(path, FILE_BYTES_MAX).decode())
        profile = MachineProfile(str(path), msgspec.convert(tables[STEP], StepProfile), settings_of(tables))
        EngineConfig(
            g1_blocks=1, step_base_ns=profile.step.base_ns, prefill_token_ns=profile.step.prefill_token_ns,
            decode_request_ns=profile.step.decode_request_ns,
        )  # refuses times out of bounds
        return profile
    except OSError as error:
        raise UsageError(f"must name a file that can be read, got {str(path)!r}: {error.strerror}") from None
    except KeyError as error:
        raise UsageError(f"must name a file of calibrate --out, got {str(path)!r}: it has no {error}") from None
    except (ValueError, TypeError, RecursionError, UsageError, msgspec.ValidationError) as error:
        raise UsageError(f"must name a file of calibrate --out, got {str(path)!r}: {error}") from None


def profile_text(source: str, step: StepProfile, links: dict[LinkSetting, dict[str, float]]) -> str:
    """The file of a profile; each link with further numbers for people."""
    tables: dict[str, dict[str, Any]] = {STEP: msgspec.structs.asdict(step)}
    for link, more in links.items():
        tables[link.name] = {"bytes_per_s": round(link.bytes_per_s), "base_latency_ns": link.base_latency_ns, **more}
    return f"# The machine that kvbm-console calibrate found in {source}, for --profile.\n" + "".join(
        "\n".join([f'\n["{name}"]', *(f"{key} = {value}" for key, value in table.items()), ""])
        for name, table in tables.items()
    )
