"""Flags of the cache that ``simulate`` and ``compare`` share, and the progress bar of long runs.

Law of this file: the parts that own a value check it; here flags only become fields. Progress goes to stderr, and only
where somebody looks at it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import PRESETS, PolicyConfig

if TYPE_CHECKING:
    from kvbm_console.engines.workloads import Workload

F = TypeVar("F", bound=Callable[..., Any])

_LINES_CHUNK: Final = 1 << 20


def trace_options(command: F) -> F:
    """Which trace, and how much of it."""
    for option in (
        click.option("--seed", type=int, metavar="N", help="Seed of a generated trace."),
        click.option("--limit", type=int, metavar="N", help="At most this many requests."),
        click.option("--trace", metavar="SPEC",
                     help="mooncake:FILE, azure:FILE, burstgpt:FILE or multiturn[:key=value,...]."),
    ):
        command = option(command)
    return command


def policy_options(command: F) -> F:
    """The parameters of the policies."""
    for option in (
        click.option("--pin-ttl-s", type=float, metavar="S", help="How long a pin lasts.  [default: 60]"),
        click.option("--pin-tail-tokens", type=int, metavar="N",
                     help="Keep finished sequences up to N tokens from their end for a while.  [default: 0]"),
        click.option("--half-life-s", type=float, metavar="S",
                     help="lrfu: a touch counts half after this.  [default: 300]"),
        click.option("--frequency-credit-s", type=float, metavar="S",
                     help="adaptive_lru: seconds that an unpopular block is set back.  [default: 1000]"),
        click.option("--frequency-weight", type=float, metavar="W",
                     help="adaptive_lru: 0 is pure recency, 1 pure frequency.  [default: 0.3]"),
    ):
        command = option(command)
    return command


def policy_config(policy: str | None, preset: str | None, **parameters: Any) -> PolicyConfig:
    """The configuration of a preset with what was said on the command line in its place."""
    said = {} if preset is None else dict(PRESETS[preset])
    if policy is not None:
        said["policy"] = policy
    said |= {name: value for name, value in parameters.items() if value is not None}
    try:
        return PolicyConfig(**said)
    except UsageError as error:
        field, space, rest = str(error).partition(" ")
        raise UsageError(f"--{field.replace('_', '-')}{space}{rest}") from None


def require_trace(trace: str | None) -> str:
    """``--trace`` was said; a run has nothing to run otherwise."""
    if trace is None:
        raise click.UsageError("--trace must name a trace, for example mooncake:FILE or multiturn:requests=1000")
    return trace


def expected_requests(workload: "Workload", limit: int | None) -> int | None:
    """How many requests a run will see, for the progress bar; None when only running it can tell."""
    from kvbm_console.engines.multiturn import Multiturn

    if isinstance(workload, Multiturn):
        return workload.settings.requests or None
    path = getattr(workload, "path", None)
    if path is None:
        return limit
    lines = 0
    with path.open("rb") as file:
        while chunk := file.read(_LINES_CHUNK):
            lines += chunk.count(b"\n")
    return lines if limit is None else min(lines, limit)


@contextmanager
def progress_bar(label: str, length: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is told how much is done in all; silent when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with click.progressbar(length=length or 1, label=label, file=sys.stderr, show_pos=True) as bar:
        yield lambda done: bar.update(max(0, done - bar.pos))
