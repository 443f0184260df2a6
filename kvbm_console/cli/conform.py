"""``kvbm-console conform``: checks a publisher of KV events by the rules of its stream.

Law of this file: a broken rule exits 1, and a stream without a message is no success.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvbm_console.cli.output import number, print_result, table, warn
from kvbm_console.cli.params import FloatRange, format_option
from kvbm_console.core.errors import NotFound, UsageError

if TYPE_CHECKING:
    from kvbm_console.engines.conformance.hearing import Hearing
    from kvbm_console.engines.conformance.rules import Conformance, RuleChecker

LIVE: Final = ("http://", "https://", "zmq:", "tcp:", "lmcache:")
"""Prefixes of the address of a publisher; any other text is the path of a capture."""


class Capacity(click.ParamType):  # type: ignore[type-arg]
    """``MEDIUM=BLOCKS``."""

    name = "capacity"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """(medium, blocks)."""
        medium, _, blocks = str(value).partition("=")
        if not medium or not (blocks.isascii() and blocks.isdigit() and 0 < int(blocks) < 2**31):
            self.fail(f"must be MEDIUM=BLOCKS with 1 to {2**31 - 1} blocks, got {value!r}", param, ctx)
        return medium, int(blocks)


@click.command()
@click.argument("source", metavar="zmq://HOST:PORT|http://HOST:PORT|CAPTURE")
@click.option("--seconds", type=FloatRange(0, 1e7, min_open=True), metavar="N", help="End after N seconds.")
@click.option("--batches", type=click.IntRange(1), metavar="N", help="End after N batches.")
@click.option("--capacity", multiple=True, type=Capacity(), metavar="MEDIUM=BLOCKS",
              help="The blocks of a medium; several times for several media.")
@format_option("text", "json")
@click.pass_context
def conform(
    ctx: click.Context, source: str, seconds: float | None, batches: int | None,
    capacity: tuple[tuple[str, int], ...], form: str,
) -> None:
    """Check a publisher of KV events: a verdict for each rule of its stream, with the first violation.

    Hears a live publisher until ctrl-c, --seconds or --batches, and asks it for a replay; or reads a capture.
    A rule that the stream did not exercise is not passed. Exit 0 if no rule is broken, 1 otherwise.
    """
    blocks = dict(capacity)
    if source.startswith(LIVE):
        from kvbm_console.cli.ask import run

        reports = run(_hear(source, blocks, seconds, batches))
    elif seconds is not None or batches is not None:
        raise UsageError("--seconds and --batches need the address of a publisher, and a capture has its own end")
    else:
        reports = _read(Path(source), blocks)
    reports = [report for report in reports if report.messages or not report.ok]
    if not reports:
        raise NotFound(f"{source} brought no message, so no rule was checked")
    print_result(form, reports, lambda: [line for report in reports for line in _lines(report)])
    ctx.exit(0 if all(report.ok for report in reports) else 1)


def _read(path: Path, capacity: dict[str, int]) -> "list[Conformance]":
    """The reports on the publishers of a capture: each topic is a publisher."""
    from kvbm_console.engines.conformance.rules import RuleChecker
    from kvbm_console.engines.kv_events.capture import read_frames

    checkers: dict[str, RuleChecker] = {}
    for frame in read_frames(path):
        label = frame.topic.decode(errors="replace") or path.name
        checker = checkers.get(label) or checkers.setdefault(label, RuleChecker(capacity))
        checker.accept(frame.seq, frame.payload)
    return [checker.report(label) for label, checker in checkers.items()]


async def _hear(
    address: str, capacity: dict[str, int], seconds: float | None, batches: int | None
) -> "list[Conformance]":
    """Hear the publishers of an address, and compare their replays."""
    import anyio

    from kvbm_console.cli.streams import ended_by_signal, find_publishers, until_over
    from kvbm_console.engines.conformance.hearing import Hearing
    from kvbm_console.engines.conformance.rules import RuleChecker
    from kvbm_console.engines.kv_events.address import names_of
    from kvbm_console.engines.kv_events.zmq_source import new_context

    hearings = [Hearing(publisher, lambda: RuleChecker(capacity)) for publisher in find_publishers(address)]

    def messages() -> int:
        return sum(checker.messages for checker in _checkers(hearings).values())

    context = new_context(len(hearings))
    try:
        for hearing in hearings:
            hearing.open(context)
        warn(f"hearing {names_of([hearing.publisher for hearing in hearings])}; ctrl-c ends it")
        async with anyio.create_task_group() as group, ended_by_signal() as stopped:
            for hearing in hearings:
                group.start_soon(hearing.run)
            await until_over(
                stopped, seconds, lambda: batches is not None and messages() >= batches,
                lambda: warn(f"{number(messages())} messages"),
            )
            group.cancel_scope.cancel()
        for hearing in hearings:
            await hearing.compare()
    finally:
        context.destroy(linger=0)
    return [checker.report(label) for label, checker in _checkers(hearings).items()]


def _checkers(hearings: "list[Hearing]") -> "dict[str, RuleChecker]":
    return {label: checker for hearing in hearings for label, checker in hearing.checkers.items()}


def _lines(report: "Conformance") -> list[str]:
    broken = [verdict for verdict in report.verdicts if verdict.violations]
    lines = [
        f"{report.publisher}  {number(report.messages)} messages, {number(report.stored_blocks)} blocks stored, "
        f"{number(report.removed_blocks)} removed",
        *table(
            ("RULE", "VERDICT", "CHECKED", "VIOLATIONS"),
            [(each.rule, each.verdict, number(each.checked), number(each.violations)) for each in report.verdicts],
            right=(2, 3),
        ),
    ]
    for verdict in broken:
        assert verdict.example is not None
        lines += ["", f"{verdict.rule}: {verdict.text}", f"  {_place(verdict.example.message, verdict.example.event)}"
                                                         f"{verdict.example.text}"]
    notes = (
        (report.joined_late, "the first message has a number above 0, so blocks from before it are unknown"),
        (report.missed_messages, f"{number(report.missed_messages)} messages never came"),
        (report.restarts, f"the publisher began again {number(report.restarts)} times"),
        (report.restatements, f"{number(report.restatements)} stores announced cached blocks again"),
    )
    notes_lines = [text for said, text in notes if said]
    passed = sum(verdict.verdict == "pass" for verdict in report.verdicts)
    untested = len(report.verdicts) - passed - len(broken)
    return [*lines, *([""] if notes_lines else []), *notes_lines, "",
            f"{passed} rules kept, {len(broken)} broken, {untested} not exercised"]


def _place(message: int | None, event: int | None) -> str:
    if message is None:
        return ""
    return f"message {message}: " if event is None else f"message {message}, event {event}: "
