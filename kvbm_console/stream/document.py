"""The status document: what is true of a leader now, as plain JSON values. A documented, stable contract.

Ids are strings, absent values null, states and routes their labels, times nanoseconds on the engine's clock. It has
exactly these keys, and new ones are only added:

``slots``        list of {slot, request, state, since_ns, age_ns, computed_tokens, prompt_tokens, outstanding, hold}
``tiers``        object by ``g1`` to ``g4`` of {capacity_blocks, resident_blocks, referenced_blocks, writing_blocks,
                 hits, lookups, uncertain, evicted_blocks, thrash_blocks, thrash_rate, asked_again_blocks,
                 asked_again_p50_ns, asked_again_p90_ns}; hits and lookups count prompt blocks, capacity is null if the
                 engine does not tell, uncertain says that reports of an engine were lost, so that the counts may be
                 wrong; thrash_blocks came back within the window after the tier had evicted them, thrash_rate is
                 thrash_blocks / evicted_blocks (null without any), asked_again_blocks were asked for by an admission
                 after the tier had evicted them, half of them at most asked_again_p50_ns later
``thrash``       {window_ns, evicted_blocks, thrash_blocks, thrash_rate}: over all tiers; the window is null if unknown
``prefetch``     {fetched_blocks, used_blocks, precision, limits, limited}: blocks copied from disk to host ahead of a
                 look-up, and those that one found there; precision is their quotient (null without any); limited says
                 that only probes are fetched because too few were used, limits how often that began
``transfers``    list of {operation, candidate, route, blocks, status}: candidates that are not terminal
``breakpoints``  list of {id, owner, description, enabled, site, request, from_state, to_state, tier, route, action,
                 one_shot, hits, max_hold_ns, name, status, condition, ignore_count, hit_condition, log, suspend,
                 depends_on, on_timeout, expires_ns, persist, message}; message says why it was disabled by itself
``holds``        list of {id, slot, request, site, point, owner, breakpoints, pending, since_ns, deadline_ns, suspend,
                 on_timeout, age_ns}; the longest time of a hold runs on the wall, so deadline_ns is right at speed 1
``ended_holds``  list of {id, request, site, point, at_ns, held_ns, why, by, text, times}: the last 64 holds that ended
                 or were refused, the newest last; text says why in words. Of a refused hold id and point are null, why
                 is "refused", and times counts those that were refused in a row
``frozen``       {by, since_ns, max_hold_ns}, null when nothing is frozen
``stream``       {name, head_seq, epoch, incarnation, subscribers}; name is what ``serve --name`` says, else the
                 workload's or the engines' own
``engines``      list of {source, name, calls, dropped, errors, call_ns, steps, step_ns}: what a tap has cost its
                 engine; with ``sanitize`` also checked_blocks, mismatched_blocks, unknown_blocks and check_ns
``publishers``   list of {source, name, connected, batches, gaps, lost_batches, restarts, last_batch_ns}: event streams
                 that are followed; last_batch_ns is null before the first batch
``parts``        list of {part, healthy, ended, restarted, why}: tasks and threads of the daemon; how often each ended
                 without being asked to and was restarted, and why it ended last
``warnings``     list of sentences: parts that are not healthy, or were restarted in the last five minutes
``recorder``     {state, written_seq, synced_seq, path, bytes}, null when nothing is recorded

Law of this file: it reads facts and changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvbm_console.core.expression import compile_slot_filter
from kvbm_console.core.holds import BreakpointFacts, HoldFacts, stands_at
from kvbm_console.core.ids import Condition, Route, Tier, Word, age_within
from kvbm_console.core.slots import CandidateFacts, SlotFacts
from kvbm_console.core.state import CacheState
from kvbm_console.stream.ended import EndedHold

Document = dict[str, Any]


def status_document(
    state: CacheState, *, at_ns: int, incarnation: str, subscribers: int, recorder: Document | None,
    name: str = "", slot_filter: str = "", engines: Sequence[Document] = (), publishers: Sequence[Document] = (),
    ended_holds: Iterable[EndedHold] = (), thrash_window_ns: int | None = None, parts: Sequence[Document] = (),
    warnings: Sequence[str] = (),
) -> Document:
    """The document of facts as of ``at_ns``, the engine's clock now.

    With ``slot_filter`` only the slots for which that expression holds; raises ``ExpressionError`` for a wrong one.
    """
    shown: Callable[[CacheState, SlotFacts], bool] = lambda state, slot: True  # noqa: E731
    if slot_filter:
        shown = compile_slot_filter(slot_filter, now=lambda: at_ns)
    return {
        "slots": [slot_row(state, slot, at_ns) for slot in state.slots.values() if shown(state, slot)],
        "tiers": {tier.label: tier_row(state, tier) for tier in Tier},
        "thrash": {
            "window_ns": thrash_window_ns, "evicted_blocks": sum(state.totals.evicted_blocks),
            "thrash_blocks": sum(state.totals.returned_blocks), "thrash_rate": state.totals.thrash(),
        },
        "prefetch": {
            "fetched_blocks": state.totals.moved_blocks.get(Route.G3_G2.label, 0),
            "used_blocks": state.totals.prefetch_used_blocks, "precision": state.totals.prefetch_precision(),
            "limits": state.totals.prefetch_limits, "limited": state.totals.prefetch_limited,
        },
        "transfers": [_transfer(candidate) for candidate in state.candidates.values()],
        "breakpoints": [_breakpoint(known) for known in state.breakpoints.values()],
        "holds": [_hold(state, hold, at_ns) for hold in state.holds.values()],
        "ended_holds": [_ended_hold(ended) for ended in ended_holds],
        "frozen": None if state.frozen is None else {
            "by": state.frozen.by, "since_ns": state.frozen.since_ns, "max_hold_ns": state.frozen.max_hold_ns,
        },
        "stream": {
            "name": name, "head_seq": state.seq - 1, "epoch": state.epoch, "incarnation": incarnation,
            "subscribers": subscribers,
        },
        "recorder": recorder,
        "engines": list(engines),
        "publishers": list(publishers),
        "parts": list(parts),
        "warnings": list(warnings),
    }


def slot_row(state: CacheState, slot: SlotFacts, at_ns: int) -> Document:
    """One slot of the document."""
    return {
        "slot": str(slot.slot),
        "request": slot.request,
        "state": slot.state.label,
        "since_ns": slot.since_ns,
        "age_ns": max(at_ns, state.at_ns) - slot.since_ns,
        "computed_tokens": slot.computed_tokens(state.iteration),
        "prompt_tokens": slot.prompt_tokens,
        "outstanding": len(slot.outstanding),
        "hold": _id(slot.hold),
    }


def tier_row(state: CacheState, tier: Tier) -> Document:
    """One tier of the document: the sum over the pools of all engines."""
    pools = state.living([pool for pool in state.pools if pool.info.tier is tier])
    capacities = [pool.info.capacity_blocks for pool in pools]
    known = [capacity for capacity in capacities if capacity is not None]
    return {
        "capacity_blocks": sum(known) if len(known) == len(capacities) else None,
        "resident_blocks": sum(pool.resident_blocks for pool in pools),
        "referenced_blocks": sum(pool.counts[Condition.REFERENCED] for pool in pools),
        "writing_blocks": sum(pool.counts[Condition.WRITING] for pool in pools),
        "hits": state.totals.hit_blocks[tier - 1],
        "lookups": state.totals.prompt_blocks,
        "uncertain": any(pool.info.source in state.lost_sources for pool in pools),
        "evicted_blocks": state.totals.evicted_blocks[tier - 1],
        "thrash_blocks": state.totals.returned_blocks[tier - 1],
        "thrash_rate": state.totals.thrash(tier),
        "asked_again_blocks": sum(state.totals.asked_again[tier - 1]),
        "asked_again_p50_ns": age_within(state.totals.asked_again[tier - 1], 0.5),
        "asked_again_p90_ns": age_within(state.totals.asked_again[tier - 1], 0.9),
    }


def _transfer(candidate: CandidateFacts) -> Document:
    return {
        "operation": _id(candidate.operation),
        "candidate": str(candidate.candidate),
        "route": candidate.route.label,
        "blocks": len(candidate.hashes),
        "status": candidate.status.label,
    }


def _breakpoint(known: BreakpointFacts) -> Document:
    spec = known.spec
    return {
        "id": str(spec.id),
        "owner": known.owner,
        "description": spec.describe(),
        "enabled": known.enabled,
        "site": spec.site.label,
        "request": spec.request,
        "from_state": _label(spec.from_state),
        "to_state": _label(spec.to_state),
        "tier": _label(spec.tier),
        "route": _label(spec.route),
        "action": spec.action.label,
        "one_shot": spec.one_shot,
        "hits": known.hits,
        "max_hold_ns": spec.max_hold_ns,
        "name": spec.name,
        "status": _label(spec.status),
        "condition": spec.condition,
        "ignore_count": spec.ignore_count,
        "hit_condition": spec.hit_condition,
        "log": spec.log,
        "suspend": spec.suspend.label,
        "depends_on": _id(spec.depends_on or None),
        "on_timeout": spec.on_timeout.label,
        "expires_ns": spec.expires_ns,
        "persist": spec.persist,
        "message": known.message,
    }


def _hold(state: CacheState, hold: HoldFacts, at_ns: int) -> Document:
    slot = state.slots[hold.slot]
    return {
        "id": str(hold.hold),
        "slot": str(hold.slot),
        "request": slot.request,
        "site": hold.site.label,
        "point": stands_at(hold, slot.state, len(slot.outstanding)).label,
        "owner": hold.owner,
        "breakpoints": [str(number) for number in hold.breakpoints],
        "pending": not hold.parked,
        "since_ns": hold.since_ns,
        "deadline_ns": hold.since_ns + hold.max_hold_ns,
        "suspend": hold.suspend.label,
        "on_timeout": hold.on_timeout.label,
        "age_ns": max(at_ns, state.at_ns) - hold.since_ns,
    }


def _ended_hold(ended: EndedHold) -> Document:
    return {
        "id": _id(ended.hold),
        "request": ended.request,
        "site": ended.site.label,
        "point": _label(ended.point),
        "at_ns": ended.at_ns,
        "held_ns": ended.held_ns,
        "why": "refused" if ended.why is None else ended.why.label,
        "by": ended.by,
        "text": ended.text,
        "times": ended.times,
    }


def _id(number: int | None) -> str | None:
    return None if number is None else str(number)


def _label(word: Word | None) -> str | None:
    return None if word is None else word.label
