"""``kvbm-console tail``: follow the events on stdout.

Law of this file: it prints one line for each event, in the order of ``seq``. Losses are reported on stderr and never
hidden.
"""

from collections.abc import AsyncIterator, Callable

import click

from kvbm_console.cli.output import print_json, warn
from kvbm_console.cli.params import compiled, filter_option, format_option, resolve_target, target_argument
from kvbm_console.core.describe import describe, request_of, slot_of
from kvbm_console.core.errors import UsageError
from kvbm_console.core.events import Event
from kvbm_console.core.ids import NUMBER_MAX
from kvbm_console.core.printable import safe
from kvbm_console.core.state import CacheState
from kvbm_console.stream.document import event_document
from kvbm_console.stream.feed import Disconnected, EventsArrived, FeedItem, GapSeen, SnapshotTaken, why_lost


@click.command()
@target_argument
@format_option("text", "jsonl")
@click.option("--since", type=click.IntRange(0, NUMBER_MAX), metavar="SEQ",
              help="Begin with this event, if the daemon still has it.  [default: the next event]")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after this many events.")
@filter_option("Only events for which this holds, as 'kind = SlotMoved and to = preempted'.")
def tail(
    positional: str | None, target: str | None, form: str, since: int | None, count: int | None, expression: str
) -> None:
    """Follow the events of a daemon on stdout, an event a line."""
    from kvbm_console.cli.ask import fetch_status, follow, run

    wanted = None
    if expression:
        from kvbm_console.core.expression import compile_event_filter

        wanted = compiled("--filter", compile_event_filter, expression)
    address = resolve_target(positional, target)
    stream = fetch_status(address)["stream"]
    first = stream["head_seq"] + 1
    if since is not None:
        if since > first:
            raise UsageError(f"--since must be at most {first}, the number of the next event, got {since}")
        first = since
    # A mirror gives slots their names, in text and for a filter; it needs a snapshot, and the daemon's may be older
    # than --since.
    mirrored = (form == "text" or wanted is not None) and since is None
    printer = Printer(form, count, first, wanted)
    run(printer.consume(follow(address, None if mirrored else first - 1, stream["incarnation"])))


class Printer:
    """Prints the items of a feed until ``count`` events are out or the daemon ends."""

    def __init__(
        self, form: str, count: int | None, first: int, matches: Callable[[Event, CacheState | None], bool] | None
    ) -> None:
        self.form = form
        self.first = first
        """Events before ``first`` are folded and not printed."""
        self.left = count
        self.matches = matches
        """The filter; None prints all."""
        self.state: CacheState | None = None
        """A mirror that gives slots their names in text; None when the feed began behind a snapshot."""

    async def consume(self, items: AsyncIterator[FeedItem]) -> None:
        """Print until the end."""
        async for item in items:
            match item:
                case SnapshotTaken():
                    self.state = item.state
                case EventsArrived():
                    if self._print(item.events):
                        return
                case GapSeen():
                    from kvbm_console.analysis.lints.lint import plural

                    warn(f"lost {plural(item.count, 'event')}, {item.first} to {item.last}: {why_lost(item.reason)}")
                case Disconnected() if item.retry_in_s is None:
                    warn(item.reason)
                    return
                case _:
                    pass

    def _print(self, events: list[Event]) -> bool:
        """Print these events; True when ``count`` events are out."""
        for event in events:
            wanted = event.seq >= self.first and (self.matches is None or self.matches(event, self.state))
            if wanted:
                self._line(event)
            if self.state is not None:
                self.state.apply(event)
            if wanted and self.left is not None:
                self.left -= 1
                if self.left == 0:
                    return True
        return False

    def _line(self, event: Event) -> None:
        if self.form == "jsonl":
            print_json(event_document(event))
        else:
            click.echo(safe(text_line(event, self.state)))


def text_line(event: Event, state: CacheState | None) -> str:
    """``seq  seconds  kind  request  what happened``."""
    who, what = _about(event, state), describe(event, state)
    return f"{event.seq:>9}  {event.at_ns / 1e9:>12.6f}s  {type(event).__name__:<20}  {who:<18}  {what}"


def _about(event: Event, state: CacheState | None) -> str:
    """The request that an event is about, else its slot, else nothing."""
    request, slot = request_of(event, state), slot_of(event, state)
    return request if request is not None else "" if slot is None else f"slot {slot}"
