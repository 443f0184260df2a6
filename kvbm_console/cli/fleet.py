"""``kvbm-console fleet``: many daemons on one screen, or once as text or JSON.

Law of this file: every daemon that was named is in the result, or counted as dropped. The exit status tells a script
whether one of them needs a person.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kvbm_console.addresses import default_target, parse_address
from kvbm_console.analysis.fleet import GONE, WORDS, DaemonRow, FleetReport, Located
from kvbm_console.cli.output import duration, number, on_terminal, print_json, print_lines, share, table
from kvbm_console.cli.params import access_options, block_hash, format_option
from kvbm_console.core.errors import ConnectionLost, KvbmConsoleError
from kvbm_console.files import read_bounded

if TYPE_CHECKING:
    from kvbm_console.client.broker import BrokerAddress
    from kvbm_console.client.fleet import FleetView

FLEET_MAX: Final = 10_000
"""Daemons of one view: each is a connection."""
FLEET_BYTES_MAX: Final = 4 << 20
"""Bytes of ``@FILE``: far above as many addresses with comments."""


@click.command()
@click.argument("names", metavar="[TARGET]...", nargs=-1)
@click.option("--target", "flags", multiple=True, metavar="T",
              help="A TARGET, several times for several; default KVBM_CONSOLE_TARGET, else the default socket.")
@click.option("--who-has", metavar="HASH|REQUEST",
              help="Name the daemons that hold a block (16 hexadecimal digits), or on which a request lives.")
@click.option("--fail-on", type=click.Choice(WORDS[:-1]), default=None,
              help="Exit status 1 when a daemon stands so, or worse.")
@click.option("--once", is_flag=True, help="Print the fleet once, also on a terminal.")
@format_option("text", "json", "prometheus")
@access_options
def fleet(
    names: tuple[str, ...], flags: tuple[str, ...], who_has: str | None, fail_on: str | None, once: bool, form: str
) -> None:
    """Many daemons at once: which of them needs a person, and which prefixes miss.

    TARGET is unix:PATH, HOST:PORT, dns:HOST:PORT for every address of a name, or @FILE with one TARGET on each line;
    or nats://HOST:PORT of a broker at which daemons publish (serve --fleet). On a terminal the fleet stays on the
    screen, and Enter opens a daemon's own console.
    """
    from kvbm_console.cli.ask import run

    opened = run(fleet_of((*names, *flags)))
    if who_has is not None:
        hashes, request = wanted(who_has)

        async def find() -> tuple[list[DaemonRow], dict[str, list[Located]]]:
            async with opened() as asked:
                return asked.rows, await asked.find(hashes, request)

        if form == "prometheus":
            _refuse("--format prometheus has no --who-has")
        rows, found = run(find())
        require_answer(rows)
        print_found(form, who_has, rows, found)
        raise SystemExit(0 if any(holds(answers) for answers in found.values()) else 1)
    if form == "text" and not once and fail_on is None and on_terminal():
        raise SystemExit(run(screen(opened)))

    async def look() -> FleetReport:
        async with opened() as asked:
            return await asked.first_look()

    report = run(look())
    if form == "prometheus":
        from kvbm_console.analysis.fleet_metrics import exposition

        click.echo(exposition(report), nl=False)
    else:
        require_answer(report.rows)
    if form == "json":
        print_json(report_document(report))
    elif form == "text":
        print_lines(report_lines(report))
    worst = WORDS.index(fail_on) if fail_on else -1
    raise SystemExit(int(any(WORDS.index(row.stands) <= worst for row in report.rows)))


def require_answer(rows: Sequence[DaemonRow]) -> None:
    """Raise ``ConnectionLost`` if no daemon of the fleet answered."""
    if not rows:
        raise ConnectionLost("no daemon publishes there; kvbm-console serve --fleet does")
    if all(row.error for row in rows):
        many = f"none of the {number(len(rows))} daemons answers; the first: " if len(rows) > 1 else ""
        raise ConnectionLost(f"{many}{rows[0].error}")


async def fleet_of(names: Sequence[str]) -> "Callable[[], FleetView]":
    """Opens the fleet that the TARGETs name. Raises ``UsageError`` for a wrong one."""
    from kvbm_console.cli.ask import access
    from kvbm_console.client.broker import SCHEMES, broker_address
    from kvbm_console.client.brokered import BrokeredFleet
    from kvbm_console.client.fleet import Fleet

    if any(name.startswith(SCHEMES) for name in names):
        if len(names) > 1:
            _refuse(f"a broker is the only TARGET, got {len(names)}")
        return partial(BrokeredFleet, broker_address(names[0], "TARGET"))
    return partial(Fleet, await addresses(names), access=access())


async def screen(fleet: "Callable[[], FleetView]") -> int:
    """The fleet on the screen, and the consoles of the daemons that are opened from it. Returns the exit status: that
    of a console that failed or was told to end, which ends the fleet too."""
    from kvbm_console.cli.ask import check_target
    from kvbm_console.cli.attach import console
    from tui.app import choose_ascii, choose_theme
    from tui.fleet import FleetApp, FleetDesk

    theme, ascii_only = choose_theme(None, False), choose_ascii(False)
    desk = FleetDesk(ascii_only=ascii_only)  # who comes back finds what was selected and searched

    while True:
        async with fleet() as asked:
            app = FleetApp(asked, desk, theme=theme, ascii_only=ascii_only)
            row = await app.run_async()
        if row is None:
            return app.return_code or 0
        opened: str | BrokerAddress = row.opens
        stream = asked.stream_of(row)
        if stream is not None:
            try:
                await check_target(row.opens)
            except KvbmConsoleError:  # no route to it, or it is gone: the broker has its events
                opened = stream
        status = await console([opened])
        if status:
            return status


async def addresses(names: Sequence[str]) -> list[str]:
    """The addresses of all TARGETs, each once and in their order. Raises ``UsageError`` for a wrong one."""
    from kvbm_console.client.fleet import targets_of

    found: dict[str, None] = {}
    for name in names or (default_target(),):
        for each in _lines(name) if name.startswith("@") else (name,):
            if each.startswith("dns:"):
                found.update(dict.fromkeys(await targets_of(each)))
            else:
                found[parse_address(each, lambda why: _refuse(f"TARGET {why}"))] = None
    if not found:
        _refuse(f"no TARGET stands in {', '.join(names)}")
    if len(found) > FLEET_MAX:
        _refuse(f"a fleet has at most {FLEET_MAX:,} daemons, got {len(found):,}")
    return list(found)


def _refuse(sentence: str) -> None:
    raise click.UsageError(sentence)


def _lines(name: str) -> Iterator[str]:
    """The targets of ``@FILE``: a line each, without blank lines and those that begin with ``#``."""
    path = Path(name[1:])
    try:
        text = read_bounded(path, FLEET_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"TARGET {name}: {path} cannot be read ({error})") from None
    for line in text.splitlines():
        if line.strip() and not line.strip().startswith("#"):
            yield line.strip()


def wanted(text: str) -> tuple[list[int], str]:
    """(hashes, request) of ``--who-has``: 16 hexadecimal digits are a hash and may be a request's name, too."""
    if not text:
        _refuse("--who-has must be a hash or the name of a request, got ''")
    found = block_hash(text)
    return ([] if found is None else [found]), text


def holds(answers: Sequence[Located]) -> bool:
    """True if the daemon has the block or the request."""
    return any(answer.tiers or answer.slot for answer in answers)


def print_found(form: str, who_has: str, rows: Sequence[DaemonRow], found: dict[str, list[Located]]) -> None:
    """Print which daemons have it, and which did not answer."""
    silent = [row for row in rows if row.error]
    having = {target: answers for target, answers in found.items() if holds(answers)}
    if form == "json":
        print_json({
            "who_has": who_has,
            "daemons": [
                {"target": target, "tiers": [tier for answer in answers for tier in answer.tiers],
                 "slot": answers[-1].slot, "state": answers[-1].state} for target, answers in having.items()
            ],
            "silent": [{"target": row.target, "error": row.error} for row in silent],
        })
        return
    lines = [
        f"{target}  " + "  ".join([
            *(tier.upper() for answer in answers for tier in answer.tiers),
            *([f"slot {answers[-1].slot} {answers[-1].state}"] if answers[-1].slot else []),
        ]) for target, answers in having.items()
    ] or [f"{who_has} is on none of the {number(len(found))} daemons that answered"]
    print_lines([*lines, *(f"{row.target}  no answer: {row.error}" for row in silent)])


def report_document(report: FleetReport) -> dict[str, Any]:
    """The fleet as ``--format json`` gives it."""
    digest = report.digest
    return {
        "daemons": [_row_document(row) for row in report.rows],
        "stands": report.stands,
        "dropped_daemons": report.dropped,
        "prompt_blocks": digest.prompt_blocks,
        "hit_blocks": {f"g{tier}": blocks for tier, blocks in enumerate(digest.hits, 1)},
        "missed_blocks": digest.missed_blocks,
        "reuse": msgspec.to_builtins(report.reuse),
        "finished_requests": digest.finished,
        "preemptions": digest.preemptions,
        "first_token_ns": _quantiles(digest.first_token),
        "latency_ns": _quantiles(digest.latency),
        "missing": [
            {"hash": each.hash, "blocks": each.missed.blocks, "error_blocks": each.missed.error,
             "requests": each.missed.requests, "why": each.missed.why, "lies_at": each.lies_at}
            for each in report.missing
        ],
    }


def _quantiles(times: Any) -> dict[str, int | None]:
    return {name: times.quantile(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


def _row_document(row: DaemonRow) -> dict[str, Any]:
    summary = row.summary
    return {
        "target": row.target, "name": row.name, "address": row.opens, "stands": row.stands, "error": row.error or None,
        "silent_s": round(row.silent_s, 1), "hit_rate": row.hit_rate,
        "seq": None if summary is None else summary.seq,
        "slots": {} if summary is None else summary.slots,
        "holds": 0 if summary is None else summary.holds,
        "tiers": {} if summary is None else {
            tier: {"resident_blocks": resident, "capacity_blocks": capacity}
            for tier, (resident, capacity) in summary.tiers.items()
        },
        "problems": [] if summary is None else msgspec.to_builtins(summary.problems),
        "passed_over_events": 0 if summary is None else summary.passed_over,
    }


def report_lines(report: FleetReport) -> Iterator[str]:
    """The fleet for people: the daemons by need, then the prefixes that miss."""
    digest = report.digest
    stands = "  ".join(f"{count} {word}" for word, count in report.stands.items() if count)
    hits = share(sum(digest.hits), digest.prompt_blocks) if digest.prompt_blocks else "–"
    first = digest.first_token
    dropped = f"  {number(report.dropped)} dropped, more than a view keeps" if report.dropped else ""
    yield f"{number(len(report.rows))} daemons  {stands}{dropped}"
    yield (f"hit rate {hits} of {number(digest.prompt_blocks)} prompt blocks  first token p50 "
           f"{_time(first.quantile(0.5))} p99 {_time(first.quantile(0.99))}  {number(digest.preemptions)} preemptions")
    if digest.prompt_blocks:
        reuse = report.reuse
        held, captured, delivered = (
            share(blocks, digest.prompt_blocks) for blocks in (reuse.held, reuse.captured, reuse.delivered)
        )
        yield f"reuse that the fleet held {held}  that routing captured {captured}  that engines delivered {delivered}"
    yield ""
    yield from table(
        ("DAEMON", "STANDS", "HIT RATE", "G1", "G2", "G3", "SLOTS", "HOLDS", "NEEDS YOU"),
        [_cells(row) for row in report.rows], right=range(2, 8),
    )
    if report.missing:
        names = {row.target: row.name for row in report.rows}
        yield ""
        yield from table(
            ("MISSES FROM BLOCK", "BLOCKS", "REQUESTS", "WHY", "LIES AT"),
            [(each.hash, number(each.missed.blocks), number(each.missed.requests), each.missed.why,
              ", ".join(f"{names[target]} {' '.join(tiers).upper()}" for target, tiers in each.lies_at.items())
              or "on no daemon")
             for each in report.missing], right=(1, 2),
        )


def _time(ns: int | None) -> str:
    return "–" if ns is None else duration(ns)


def _fill(resident: int, capacity: int | None) -> str:
    """The share of a tier that is full, or its blocks where the capacity is unknown."""
    return share(resident, capacity) if capacity else number(resident)


def _cells(row: DaemonRow) -> tuple[str, ...]:
    summary = row.summary
    rate = "–" if row.hit_rate is None else f"{100 * row.hit_rate:.1f} %"
    if summary is None:
        return row.name, GONE, rate, "–", "–", "–", "–", "–", row.error
    fill = ["" if tier not in summary.tiers else _fill(*summary.tiers[tier]) for tier in ("g1", "g2", "g3")]
    worst = summary.problems[0] if summary.problems else None
    error = f"silent for {duration(round(row.silent_s * 1e9))}: {row.error}" if row.error else ""
    why = error or ("" if worst is None else "  ".join(filter(None, (worst.who, worst.what, worst.because))))
    return row.name, row.stands, rate, *fill, number(sum(summary.slots.values())), number(summary.holds), why
