"""``kvbm-console status``: the state of a daemon now, printed once.

Law of this file: the JSON is the daemon's own document, passed on as it is (its keys are listed
in JSON.md); the text has the console's overview in front, and then the same values.
"""

import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from kvbm_console.cli.output import duration, number, print_json, print_lines, share, table
from kvbm_console.cli.params import compiled, filter_option, format_option, resolve_target, target_argument
from kvbm_console.core.errors import UsageError
from kvbm_console.core.printable import safe
from kvbm_console.stream.publishers import measure_texts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from kvbm_console.client import Client
    from kvbm_console.core.events import Event
    from kvbm_console.stream.feed import FeedItem
    from tui.model.mirror import Mirror

@click.command()
@target_argument
@format_option("text", "json")
@filter_option("Only slots for which this holds, as 'state = onboarding and age > 10 ms'.")
@click.option("--health", is_flag=True, help="Ask the health service alone, for probes; exit 1 unless it is serving.")
@click.pass_context
def status(
    ctx: click.Context, positional: str | None, target: str | None, form: str, expression: str, health: bool
) -> None:
    """Warnings, cache, tiers, flows, slots, transfers, breakpoints and holds, once."""
    from kvbm_console.cli.ask import fetch_status

    if expression:
        from kvbm_console.core.expression import compile_slot_filter

        compiled("--filter", compile_slot_filter, expression)
    address = resolve_target(positional, target)
    if health:
        if expression or form == "json":
            raise UsageError("--health prints one word: --filter and --format json have no meaning with it")
        from kvbm_console.cli.ask import ask

        serving = ask(address, lambda client: client.healthy())
        click.echo("serving" if serving else "not serving")
        ctx.exit(0 if serving else 1)
    document = fetch_status(address, expression)
    if form == "json":
        print_json(document)
        return

    print_lines(printable([*overview(address), "", *render(document).split("\n")]))


def render(document: dict[str, Any]) -> str:
    """The status document for people, in sections with aligned columns; the hits are those since the run began."""
    sections = [_stream(document), _tiers(document["tiers"]), _slots(document["slots"])]
    if not document["slots"] and document["publishers"]:
        sections[2] = ["slots are unknown: an event stream names no request"]
    if document["prefetch"]["fetched_blocks"]:
        sections.append([_prefetch(document["prefetch"])])
    if document["transfers"]:
        sections.append(_transfers(document["transfers"]))
    if document["breakpoints"]:
        sections.append(breakpoint_lines(document["breakpoints"]))
    if document["frozen"]:
        sections.append([f"frozen by {document['frozen']['by']}"])
    if document["holds"]:
        sections.append(hold_lines(document["holds"]))
    return "\n\n".join("\n".join(section) for section in sections)


def _stream(document: dict[str, Any]) -> list[str]:
    stream, recorder = document["stream"], document["recorder"]
    named = f"{stream['name']}  " if stream.get("name") else ""
    lines = [f"stream    {named}event {number(stream['head_seq'])}  epoch {stream['epoch']}  subscribers "
             f"{stream['subscribers']}  incarnation {stream['incarnation']}"]
    if recorder is None:
        lines.append("recorder  off")
    else:
        lines.append(f"recorder  {recorder['state']}  written up to event {number(recorder['written_seq'])}  "
                     f"synced up to {number(recorder['synced_seq'])}")
    return [*lines, *map(_engine, document["engines"]), *map(_publisher, document["publishers"])]


def _publisher(row: dict[str, Any]) -> str:
    """A publisher's row: its connection, its losses, and the engine's own numbers."""
    state = "ended" if row["ended"] else "connected" if row["connected"] else "not connected"
    lost = f"  {number(row['lost_batches'])} batches lost" if row["lost_batches"] else ""
    told = "  ".join(text for _, text in measure_texts(row["measures"])) or row["metrics_error"] or (
        "no number yet" if row["metrics"] else "no metrics address: http://HOST:PORT or metrics=PORT gives one")
    return f"engine    {row['name']}  {state}{lost}  {told}"


def _engine(row: dict[str, Any]) -> str:
    """A tap's row: its cost to the engine by call and as a share of steps, its losses and its audits."""
    call = f"{row['call_ns'] / row['calls'] / 1_000:.1f}" if row["calls"] else "–"
    part = f"{100 * row['call_ns'] / row['step_ns']:.2f}" if row["step_ns"] else "–"
    audits = ""
    if row.get("audited_places") is not None:
        audits = f"  {number(row['audited_places'])} places audited, {number(row['differing_places'])} differed"
    steps = f"{number(row['steps'])} steps  {call} µs a call, {part} % of a step"
    losses = f"{number(row['dropped'])} dropped  {number(row['errors'])} errors"
    return f"tap       {safe(row['name'])}  {steps}  {losses}{audits}"


def _tiers(tiers: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        (name.upper(), number(tier["capacity_blocks"]), number(tier["resident_blocks"]),
         number(tier["referenced_blocks"]), number(tier["writing_blocks"]), number(tier["hits"]),
         number(tier["lookups"]), "–" if tier["hits"] is None else share(tier["hits"], tier["lookups"]),
         number(tier["evicted_blocks"]),
         "–" if tier["thrash_blocks"] is None
         else share(tier["thrash_blocks"], tier["evicted_blocks"]) if tier["evicted_blocks"] else "")
        for name, tier in tiers.items()
        if tier["capacity_blocks"] != 0 or tier["hits"] or tier["resident_blocks"]
    ]
    headings = ("TIER", "CAPACITY", "RESIDENT", "REFERENCED", "WRITING", "HITS", "LOOKUPS", "HIT RATE", "EVICTED",
                "THRASH")
    return table(headings, rows, right=range(1, 10))


def _prefetch(row: dict[str, Any]) -> str:
    now = "limited to probes" if row["limited"] else "not limited"
    used = share(row["used_blocks"], row["fetched_blocks"])
    return (f"prefetch  {number(row['fetched_blocks'])} blocks fetched  {used} used  {now}, "
            f"{number(row['limits'])} times so far")


def _slots(slots: list[dict[str, Any]]) -> list[str]:
    if not slots:
        return ["no live slots"]
    rows = [
        (slot["slot"], slot["request"], slot["state"], duration(slot["age_ns"]), number(slot["computed_tokens"]),
         number(slot["prompt_tokens"]), str(slot["outstanding"]), slot["hold"] or "")
        for slot in slots
    ]
    headings = ("SLOT", "REQUEST", "STATE", "FOR", "COMPUTED", "PROMPT", "COPIES", "HOLD")
    return table(headings, rows, right=(0, 3, 4, 5, 6))


def _transfers(transfers: list[dict[str, Any]]) -> list[str]:
    rows = [
        (entry["operation"] or "–", entry["candidate"], entry["route"], number(entry["blocks"]), entry["status"])
        for entry in transfers
    ]
    return table(("OPERATION", "CANDIDATE", "ROUTE", "BLOCKS", "STATUS"), rows, right=(0, 1, 3))


def breakpoint_lines(breakpoints: list[dict[str, Any]]) -> list[str]:
    """The table of breakpoints."""
    rows = [
        (entry["id"], "armed" if entry["enabled"] else "muted", entry["site"], entry["request"],
         entry["from_state"] or "any", entry["to_state"] or "any", entry["action"], number(entry["hits"]),
         entry["owner"], "; ".join(filter(None, _when(entry))))
        for entry in breakpoints
    ]
    headings = ("BREAKPOINT", "", "SITE", "REQUEST", "FROM", "TO", "ACTION", "HITS", "OWNER", "WHEN")
    return table(headings, rows, right=(0, 7))


def _when(entry: dict[str, Any]) -> Iterator[str]:
    """The remaining fields of the breakpoint that differ from the default."""
    yield entry["message"]
    yield entry["name"]
    yield entry["condition"]
    for word, field in (("tier", "tier"), ("route", "route"), ("status", "status"), ("hits", "hit_condition"),
                        ("ignore", "ignore_count"), ("after", "depends_on")):
        if entry[field]:
            yield f"{word} {entry[field]}"
    if entry["one_shot"]:
        yield "once"
    if entry["suspend"] != "slot":
        yield f"suspends {entry['suspend']}"


def hold_lines(holds: list[dict[str, Any]]) -> list[str]:
    """The table of holds."""
    rows = [
        (entry["id"], entry["slot"], entry["request"], entry["site"], entry["point"],
         "pending" if entry["pending"] else "stands still", duration(entry["age_ns"]), entry["suspend"],
         ",".join(entry["breakpoints"]), entry["owner"])
        for entry in holds
    ]
    headings = ("HOLD", "SLOT", "REQUEST", "SITE", "WAITS AT", "", "FOR", "SUSPENDS", "BREAKPOINTS", "OWNER")
    return table(headings, rows, right=(0, 1, 6))


def ended_lines(ended: list[dict[str, Any]]) -> list[str]:
    """The table of holds that ended or were refused, the newest last."""
    rows = [
        (entry["id"] or "–", entry["request"], entry["site"], "" if entry["id"] is None else duration(entry["held_ns"]),
         entry["text"] + (f" ({number(entry['times'])} in a row)" if entry["times"] > 1 else ""))
        for entry in ended
    ]
    return table(("HOLD", "REQUEST", "SITE", "FOR", "ENDED BECAUSE"), rows, right=(0, 3))

# --- the overview as text ---


WIDTH: Final = 100
ROWS: Final = 44
"""Height of the overview, above the need of its sections: the newest events fill the last rows."""


PAST: Final = 32_768
"""Events of the past that charts and lives show: a minute of a busy engine, for a tenth of a second of work. Warnings
come from all that the daemon remembers."""


class _Told:
    """A feed that has said everything."""

    async def items(self) -> "AsyncIterator[FeedItem]":
        """Nothing."""
        return
        yield


def overview(target: str) -> list[str]:
    """The rows of the overview of a daemon, as of now."""
    from kvbm_console.cli.ask import ask

    return drawn(ask(target, fold))


async def fold(client: "Client") -> "Mirror":
    """The daemon's current facts, with the warnings of all events that it remembers, behind the last of its past."""
    from kvbm_console.analysis.lints import LintFold, stream_lints
    from kvbm_console.client.past import collect
    from kvbm_console.core.state import CacheState
    from kvbm_console.stream.feed import Connected, EventsArrived, PastSeen, SnapshotTaken
    from tui.model.history import take_past
    from tui.model.mirror import Mirror

    items, hello, beat = await collect(client)
    watch, state, events = LintFold(stream_lints()), CacheState(), deque["Event"](maxlen=PAST)
    for item in items:
        if isinstance(item, SnapshotTaken):
            state = item.state
            watch.resumed(state)
        elif isinstance(item, EventsArrived):
            events += item.events
            for event in item.events:
                watch.apply(state, event)
    mirror = Mirror()
    mirror.take(Connected(
        target=hello.target, incarnation=hello.incarnation, run=hello.run, control=False,
        block_bytes=hello.block_bytes,
    ), 0)
    for _ in take_past(mirror, PastSeen(list(events), state), 0):
        pass
    mirror.take(SnapshotTaken(state), 0)
    mirror.take(beat, 0)
    mirror.watch_with(watch)
    return mirror


def drawn(mirror: "Mirror") -> list[str]:
    """The overview of a mirror, as plain rows; in ASCII where the output cannot take more."""
    from tui.desk import Desk
    from tui.draw.glyphs import ASCII, UNICODE
    from tui.model.lints import SHOW_AFTER_NS
    from tui.source import TargetSession
    from tui.views import all_views

    unicode = _takes_unicode()
    session = TargetSession(_Told())
    session.mirror = mirror
    mirror.clock.live = False
    desk = Desk(mirror, session, lambda: 0, all_views(), glyphs=UNICODE if unicode else ASCII, read_only=True)
    desk.draw(WIDTH, ROWS)
    for after_ns in (0, SHOW_AFTER_NS):  # the second time shows findings that the screen delays by two seconds
        desk.lints.check(mirror, after_ns)
    desk.warnings = desk.lints.warnings(SHOW_AFTER_NS)
    return printable(line.text.rstrip() for line in desk.view.body(desk, WIDTH, ROWS))


def printable(lines: "Iterable[str]") -> list[str]:
    """These lines, in ASCII where stdout cannot take more."""
    from tui.draw.glyphs import TRANSLATE

    return list(lines) if _takes_unicode() else [line.translate(TRANSLATE) for line in lines]


def _takes_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
