"""Judgement: which event decided that a prompt block missed.

The questions come in the order of the leader's own look-up. They ask for the boundary, a copy under way, a rule, then
the history of the content.

Law of this file: a reason outside of the evidence is unknown, and the leader's memory is quoted as memory, never as an
event.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kvbm_console.analysis.explain.contexts import Twins
from kvbm_console.analysis.explain.course import Looked, Stood
from kvbm_console.analysis.explain.ledger import GONE, STORED, BlockLedger, Entry
from kvbm_console.analysis.explain.model import Missed, MissedRun
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import EvictRule, MissReason, SkipReason, Tier

FILTERS: Final = frozenset(
    reason.label for reason in (SkipReason.BELOW_FREQUENCY, SkipReason.OPERATOR)
)
"""Skip reasons that are a rule's decision; the others are circumstances."""
TRIES: Final = frozenset({"planned", "filtered", "skipped", "promoted", "ended"})
"""Entries of candidates that would have copied a block down."""
POLICY_RULES: Final = frozenset({EvictRule.RECENCY.label, EvictRule.FREQUENCY.label})
"""Rules that are a policy's choice."""
NAMES_SHOWN: Final = 3
ALSO_MAX: Final = 8
"""Earlier events told beside the deciding one."""


class Judge:
    """Explains missed blocks of one request.

    ``lower`` are the tiers below G1 that can keep a copy. ``remembered`` is the leader's memory of absent blocks at the
    snapshots of the evidence, as (seq, hash to ``MissReason``).
    """

    def __init__(
        self, ledger: BlockLedger, hashes: Sequence[int], prompt_tokens: int, block_tokens: int, lower: Sequence[Tier],
        config: LeaderConfig | None, remembered: Sequence[tuple[int, Mapping[int, int]]], twins: Twins,
    ) -> None:
        self.ledger = ledger
        self.hashes = hashes
        self.prompt_tokens = prompt_tokens
        self.block_tokens = block_tokens
        self.lower = lower
        self.config = config
        self.remembered = remembered
        self.twins = twins

    def missed(self, block: int, first_miss: int, looked: Looked | None, before_seq: int) -> MissedRun:
        """Why prompt block ``block`` missed in a look-up that came to ``first_miss`` blocks."""
        stood = Stood()
        if looked is not None:
            before_seq = looked.event.seq
            at = block - looked.event.local_blocks
            stood = looked.stood[at] if 0 <= at < len(looked.stood) else stood
        limit = (self.prompt_tokens - 1) // self.block_tokens
        if block >= limit and first_miss >= limit:
            return self._run(
                block, Missed.BOUNDARY, "the whole prompt was found; one token must be left to compute, so the last "
                "block is given back", seq=looked.event.seq if looked is not None else None,
                event="LookupAnswered" if looked is not None else None,
            )
        if stood.ready and block > first_miss:
            return self._run(
                block, Missed.BEHIND_A_MISS,
                f"it was in {_tiers(stood.ready)}, but block {first_miss} in front of it missed", seq=before_seq,
                event="LookupAnswered", tier=stood.ready[0].name,
            )
        asked_again = looked is not None and looked.event.why is MissReason.WRITING and looked.event.first_miss == block
        if stood.writing and (asked_again or not stood.ready):
            return self._in_flight(block, stood)
        if stood.ready and looked is not None:
            return self._rule(block, stood, looked)
        return self._history(block, before_seq)

    def _run(
        self, block: int, reason: Missed, text: str, *, seq: int | None = None, at_ns: int | None = None,
        event: str | None = None, tier: str | None = None, rule: str | None = None, filter_: str | None = None,
        for_request: str | None = None, operation: int | None = None, candidate: int | None = None,
        remembered: str | None = None, also: tuple[str, ...] = (),
    ) -> MissedRun:
        return MissedRun(
            first=block, last=block, blocks=1, tokens=self.block_tokens, reason=reason, text=text, seq=seq,
            last_seq=seq, at_ns=at_ns, event=event, tier=tier, rule=rule, filter=filter_, for_request=for_request,
            operation=None if operation is None else str(operation),
            candidate=None if candidate is None else str(candidate), remembered=remembered, also=also,
        )

    def _in_flight(self, block: int, stood: Stood) -> MissedRun:
        entry = self._last(block, {"writing"})
        who = self.ledger.name(stood.for_slot)
        copy = "a copy" if stood.operation is None else f"operation {stood.operation}"
        return self._run(
            block, Missed.IN_FLIGHT,
            f"{copy} was still writing it to {_tiers(stood.writing)}" + (f" for {who}" if who else ""),
            seq=None if entry is None else entry.seq, at_ns=None if entry is None else entry.at_ns,
            event="BlocksReserved", tier=stood.writing[0].name, for_request=who, operation=stood.operation,
        )

    def _rule(self, block: int, stood: Stood, looked: Looked) -> MissedRun:
        """It stood there and was not taken: the match was shortened, or the look-up had passed its tier."""
        event = looked.event
        matched = [Tier(at + 2) for at, count in enumerate(event.matched) if count]
        deepest = matched[-1] if matched else Tier.G1
        name = stood.ready[0].name
        behind = next((group for group in looked.groups if group[2] <= block), None)
        if behind is not None and stood.ready[0] is Tier.G1:
            number, window, had = behind
            layers = f"group {number} of the layers" + (f", which sees {window:,} tokens," if window else "")
            return self._run(
                block, Missed.FILTERED, f"it was in {name}, but {layers} had " + (
                    f"what a prefix of {had:,} blocks needs and no more" if had else "no block that a prefix needs"
                ), seq=event.seq, at_ns=event.at_ns, event="LookupAnswered", tier=name, filter_="layer_groups",
            )
        if looked.watched:
            return self._run(
                block, Missed.FILTERED, f"it was in {name}, but the engine did not count it as this request's prefix",
                seq=event.seq, at_ns=event.at_ns, event="LookupAnswered", tier=name, filter_="engine_prefix",
            )
        below = [tier for tier in stood.ready if tier >= deepest and tier is not Tier.G1]
        if below and self.config is not None:
            tier = below[0]
            room = int(self.config.staging_share * looked.capacity.get(tier, 0))
            taken = looked.staged_blocks.get(tier, 0)
            return self._run(
                block, Missed.FILTERED,
                f"it was in {tier.name}, but staging may hold {room} places there and others held {taken}",
                seq=event.seq, at_ns=event.at_ns, event="LookupAnswered", tier=tier.name, filter_="staging_share",
            )
        if deepest is Tier.G1:
            return self._run(
                block, Missed.FILTERED, "it was in G1, but the engine did not count it as this request's prefix",
                seq=event.seq, at_ns=event.at_ns, event="LookupAnswered", tier=name, filter_="engine_prefix",
            )
        return self._run(
            block, Missed.FILTERED,
            f"it was in {name}, but the look-up had gone on to {deepest.name} and never goes back up",
            seq=event.seq, at_ns=event.at_ns, event="LookupAnswered", tier=name, filter_="tier_order",
        )

    # --- the history of its content ----------------------------------------------------------------------------------

    def _entries(self, block: int, before_seq: int) -> list[Entry]:
        return [entry for entry in self.ledger.entries.get(self.hashes[block], ()) if entry.seq < before_seq]

    def _last(self, block: int, what: set[str]) -> Entry | None:
        entries = self.ledger.entries.get(self.hashes[block], ())
        return next((entry for entry in reversed(entries) if entry.what in what), None)

    def _history(self, block: int, before_seq: int) -> MissedRun:
        entries = self._entries(block, before_seq)
        end = next((at for at in range(len(entries) - 1, -1, -1) if entries[at].what in GONE | {"gap"}), None)
        if end is None:
            return self._never(block, before_seq)
        last = entries[end]
        life = entries[: end + 1]
        begin = next((at for at in range(len(life) - 2, -1, -1) if _absent(life[at])), -1)
        also = tuple(_told(entry, self.ledger) for entry in life[begin + 1 : -1][-ALSO_MAX:])
        life = life[begin + 1 :]
        if last.what == "gap":
            return self._lost(block, entries[:end], last, before_seq)
        if last.what == "reset":
            return self._run(
                block, Missed.RESET, f"a {last.why} reset cleared it", seq=last.seq, at_ns=last.at_ns,
                event=last.kind, also=also,
            )
        if last.what == "unkept":
            who = self.ledger.name(last.slot)
            return self._run(
                block, Missed.NOT_KEPT,
                "the engine caches only some blocks of an attention window, and this one was full" + (
                    f" for {who}" if who else ""
                ) + " and not kept", seq=last.seq, at_ns=last.at_ns, event=last.kind, tier=_name(last.tier), also=also,
            )
        if last.what == "dropped":
            stop = last.why or "it was cancelled"
            return self._run(
                block, Missed.COPY_FAILED,
                f"the copy to {_name(last.tier)} did not arrive" + ("" if last.operation is None else
                f" (operation {last.operation})") + f": {stop}", seq=last.seq, at_ns=last.at_ns, event=last.kind,
                tier=_name(last.tier), operation=last.operation, candidate=last.candidate, also=also,
            )
        return self._evicted(block, last, life, also)

    def _evicted(self, block: int, last: Entry, life: list[Entry], also: tuple[str, ...]) -> MissedRun:
        who = self.ledger.name(last.slot)
        for_whom = f" for {who}" if who else ""
        if last.operation is not None:
            names = [self.ledger.name(slot) or "" for slot in last.copies_of]
            who = names[0] if len(names) == 1 else None
            for_whom = f" to make room for operation {last.operation}" + _blocks_of(names)
        rule = "the engine's stream said so" if last.what == "unseen" else self._rule_of(last)
        saved = any(tier is not Tier.G1 for entry in life[:-1] if entry.what in STORED for tier in entry.left)
        text = f"evicted from {_name(last.tier)}{for_whom} ({rule})"
        reason, filter_, candidate, operation = Missed.EVICTED, None, last.candidate, last.operation
        if last.tier is Tier.G1 and self.lower and not saved and last.what == "evicted":
            tries = [entry for entry in reversed(life) if entry.candidate is not None and entry.what in TRIES]
            ruled_out = [entry for entry in tries if entry.why in FILTERS]
            tried = next(iter([*ruled_out, *tries]), None)
            reason, filter_, candidate, operation, why = _copy_down(tried, self.config)
            text += f" before a copy of it stood below: {why}"
            if last.room is not None and last.room[1]:
                text += f"; dropped although {last.room[0].name} had {last.room[1]:,} places to give"
        return self._run(
            block, reason, text, seq=last.seq, at_ns=last.at_ns, event=last.kind, tier=_name(last.tier),
            rule=last.why, filter_=filter_, for_request=who, candidate=candidate, operation=operation, also=also,
        )

    def _rule_of(self, eviction: Entry) -> str:
        """Which decision chose the block: the engine's own reuse, or the policy of a lower tier."""
        if eviction.why in POLICY_RULES and self.config is not None:
            return f"{self.config.eviction.policy}, by {eviction.why}"
        return f"rule {eviction.why}"

    def _memory(self, block: int, before_seq: int) -> int | None:
        """The leader's memory of this absent block, at the last snapshot in front of the look-up."""
        memory: Mapping[int, int] = {}
        for seq, kept in self.remembered:
            if seq <= before_seq:
                memory = kept
        return memory.get(self.hashes[block])

    def _never(self, block: int, before_seq: int) -> MissedRun:
        known_from = self.ledger.known_from
        twin = self.twins.of(self.hashes[block], before_seq)
        if twin is not None:
            mine = self.twins.context[self.hashes[block]]
            return self._run(
                block, Missed.OTHER_CONTEXT,
                f"its tokens were in {twin.tier.name} {_under(twin.context)} since event {twin.from_seq:,}, but not "
                f"{_under(mine)}", seq=twin.from_seq, event="BlocksSeen", tier=twin.tier.name,
            )
        if known_from == 0:
            return self._run(block, Missed.NEVER_STORED, "it had never been computed before")
        memory = self._memory(block, before_seq)
        if memory is not None:
            word = MissReason(memory).label
            return self._run(
                block, Missed.LOST_TO_A_GAP,
                f"{word} before event {known_from:,}, says the leader's memory; the event itself is not here",
                remembered=word,
            )
        return self._run(
            block, Missed.LOST_TO_A_GAP,
            f"not stored from event {known_from:,} on; whether it ever was before that cannot be known",
        )

    def _lost(self, block: int, before: list[Entry], gap: Entry, before_seq: int) -> MissedRun:
        was = before[-1] if before else None
        if was is not None and was.left:
            text = f"it was in {_tiers(was.left)} at event {was.seq:,} and gone behind the gap: {gap.why}"
        else:
            text = f"cannot be known: {gap.why}"
            if was is not None and was.what in GONE:
                text += f"; before that, {_told(was, self.ledger)}"
        memory = self._memory(block, before_seq)
        word = None if memory is None else MissReason(memory).label
        return self._run(
            block, Missed.LOST_TO_A_GAP, text + (f"; the leader remembers {word}" if word else ""), seq=gap.seq,
            remembered=word,
        )


def _under(context: str) -> str:
    return f"with {context}" if context else "without LoRA, salt and image"


def _blocks_of(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f", a copy of blocks of {', '.join(names[:NAMES_SHOWN])}{more}"


def _absent(entry: Entry) -> bool:
    """True if the content could be read nowhere after this entry and was lost by it."""
    return entry.what in GONE | {"gap"} and not entry.left


def _copy_down(
    tried: Entry | None, config: LeaderConfig | None,
) -> tuple[Missed, str | None, int | None, int | None, str]:
    """(reason, filter, candidate, operation, in words) of why a block never got a copy below."""
    if tried is None:
        text = "no copy of it was planned"
        if config is not None and (config.offload_threshold or config.offload_prompt_only):
            only = ", offload_prompt_only" if config.offload_prompt_only else ""
            text += f" (offload_law {config.offload_law}, offload_threshold {config.offload_threshold:g}{only})"
        return Missed.NOT_OFFLOADED, None, None, None, text
    which = f"candidate {tried.candidate}"
    if tried.why in FILTERS:
        text = f"{which} was left out by {tried.why} (event {tried.seq:,})"
        return Missed.FILTERED, tried.why, tried.candidate, None, text
    words = {
        "skipped": f"{which} was skipped, {tried.why} (event {tried.seq:,})",
        "filtered": f"{which} was evaluated without it, {tried.why} (event {tried.seq:,})",
        "ended": f"{which} {tried.why} (event {tried.seq:,})",
        "promoted": f"{which} was on its way as {tried.why} (event {tried.seq:,})",
        "planned": f"{which} was not evaluated yet (event {tried.seq:,})",
    }
    return Missed.NOT_OFFLOADED, None, tried.candidate, tried.operation, words[tried.what]


def _told(entry: Entry, ledger: BlockLedger) -> str:
    """An entry in a few words, for the list of other events."""
    tier = _name(entry.tier)
    who = ledger.name(entry.slot)
    words = {
        "filled": f"computed by {who}", "ready": f"copied to {tier} by operation {entry.operation}",
        "writing": f"being copied to {tier} by operation {entry.operation}",
        "evicted": f"evicted from {tier}" + (f" for {who}" if who else ""),
        "dropped": f"its copy to {tier} did not arrive", "unkept": f"full on {tier} and not kept",
        "known": f"in {_tiers(entry.left)} where the evidence begins", "seen": f"reported in {tier}",
        "unseen": f"reported gone from {tier}", "reset": "cleared by a reset", "gap": entry.why,
        "planned": f"candidate {entry.candidate} planned on {entry.why}",
        "filtered": f"candidate {entry.candidate} evaluated without it, {entry.why}",
        "skipped": f"candidate {entry.candidate} skipped, {entry.why}",
        "promoted": f"candidate {entry.candidate} promoted as {entry.why}",
        "ended": f"candidate {entry.candidate} {entry.why}",
    }
    return f"{words[entry.what]} (event {entry.seq:,})"


def _name(tier: Tier | None) -> str:
    return "?" if tier is None else tier.name


def _tiers(tiers: Sequence[Tier]) -> str:
    return " and ".join(tier.name for tier in tiers)
