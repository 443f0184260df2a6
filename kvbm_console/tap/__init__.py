"""The tap: vLLM's own scheduler or connector is observed, so a daemon sees and stops single requests.

``scheduler`` observes the scheduler, and ``connector`` a connector, beside or around vLLM's own. Both run in the
scheduler's thread and only append to the bounded queue of ``recorder``. ``sender`` is a thread that turns records into
bytes for a reporter, the process that speaks to the daemon. ``vllm`` binds both to vLLM's classes. This directory is
also a distribution of its own, for environments of engines (``pyproject.toml``).

Law of this package: the engine never waits for it, never meets an error of it, and imports nothing heavy because of it.
Records that it cannot keep up with are dropped and counted.
"""

import json
import logging
import os
from functools import wraps
from importlib import import_module
from typing import Any, Final

from kvbm_console.addresses import parse_address

VARIABLE: Final = "KVBM_TAP"
"""The environment variable that switches the tap at the scheduler on."""
SETTINGS: Final = ("daemon", "serve", "python", "name", "medium", "token_file", "tls_ca", "send")
"""Names of settings, see ``vllm``."""


def settings_of(text: str) -> dict[str, Any]:
    """The settings in ``KVBM_TAP``: a daemon's address, or a JSON object of settings.

    Raises ``ValueError`` with one sentence for a text that is neither.

    >>> settings_of("unix:/run/kvbm.sock"), settings_of('{"serve": true}')
    ({'daemon': 'unix:/run/kvbm.sock'}, {'serve': True})
    """
    text = text.strip()
    if not text.startswith("{"):
        return {"daemon": parse_address(text, _refuse)} if text else {}
    try:
        settings: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} must be an address or a JSON object: {error}") from None
    if unknown := settings.keys() - set(SETTINGS):
        raise ValueError(f"{VARIABLE} has no setting {min(unknown)!r}; settings are {', '.join(SETTINGS[:-1])}")
    if settings.get("daemon"):
        settings["daemon"] = parse_address(str(settings["daemon"]), _refuse)
    return settings


def _refuse(text: str) -> None:
    raise ValueError(f"the address in {VARIABLE} {text}")


def plugin() -> None:
    """The entry point that vLLM calls in each of its processes: observe its schedulers if ``KVBM_TAP`` is set.

    The engine runs unobserved, and a logged sentence names the reason, if the variable cannot be read or this release
    does not let us choose the scheduler."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    log = logging.getLogger("vllm.kvbm_console")
    config: Any = import_module("vllm.config").SchedulerConfig
    choose = getattr(config, "get_scheduler_cls", None)
    try:
        settings = settings_of(text)
    except ValueError as error:
        log.error("kvbm-console: %s. The engine is not observed.", error)
        return
    if choose is None:
        log.error("kvbm-console: this release has no SchedulerConfig.get_scheduler_cls. Use the connector tap instead.")
        return
    if hasattr(choose, "chosen_by_vllm"):
        return

    @wraps(choose)
    def get_scheduler_cls(self: Any) -> Any:
        # Only the process of the engine comes here, and others are spared the imports.
        return import_module("kvbm_console.tap.vllm").tapped(choose(self), settings)

    get_scheduler_cls.chosen_by_vllm = choose  # type: ignore[attr-defined]
    config.get_scheduler_cls = get_scheduler_cls
