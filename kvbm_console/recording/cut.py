"""Cutting: a stretch of a recording as a recording of its own, with the keyframe that it needs in front.

A cut begins and ends between two stimuli. Its first keyframe is complete when the leader can be rerun up to there from
an earlier one; then decisions replay too. Otherwise it has facts only, and no stimuli before its next complete
keyframe.

An expression or a request chooses the shortest stretch with all events that match. All events between them stay,
because a recording with holes does not fold.

Law of this file: the facts in front of the cut are the fold of the source, never the rerun leader's word alone.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvbm_console.core.errors import KvbmConsoleError, NotFound, RecordingError, UsageError
from kvbm_console.core.events import Event, InvariantViolated
from kvbm_console.core.expression import compile_event_filter
from kvbm_console.core.leader import Leader
from kvbm_console.core.snapshots import digest, sparse_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.decode import FOLD_ERRORS, decode_events, decode_keyframe, decode_stimuli
from kvbm_console.recording.format import About, Frame, Gap, Keyframe
from kvbm_console.recording.output import (
    Made,
    end_frame,
    event_frame,
    keyframe_frame,
    require_new,
    stimulus_frame,
    write_recording,
)
from kvbm_console.recording.reader import Recording

Matches = Callable[[Event, CacheState | None], bool]


def cut(recording: Recording, first: int, last: int, target: Path) -> Made:
    """Write events ``first`` to ``last`` to ``target``, rounded outwards to whole stimuli.

    Raises ``UsageError`` for bounds outside of the recording, ``RecordingError`` when it begins in a gap.
    """
    require_new(target)
    if not recording.first_seq <= first <= last <= recording.last_seq:
        raise UsageError(
            f"{recording.path} has events {recording.first_seq} to {recording.last_seq}, not {first} to {last}"
        )
    begin = _begin_of_stimulus(recording, first)
    state = recording.state_at(begin.seq - 1)
    memory = _memory_before(recording, begin, state)
    about = msgspec.structs.replace(
        recording.segments[0].about, segment=1, first_seq=begin.seq,
        labels={**recording.segments[0].about.labels, "cut_from": recording.path.name},
    )
    keyframe = Keyframe(begin.seq, memory is not None, sparse_facts(state), memory or b"")
    first_ns = min(state.at_ns, begin.at_ns)
    return write_recording(target, about, _frames(recording, about, keyframe, begin, last, first_ns))


def stretch(recording: Recording, first: int, last: int, matches: Matches) -> tuple[int, int]:
    """The first and the last event between these two that ``matches``. Raises ``UsageError`` when there is none."""
    bounds: tuple[int, int] | None = None
    state: CacheState | None = None
    for events in recording.events(first):
        at = events[0].seq
        if state is not None and state.seq != at:
            state = None  # a gap: the facts are known again from the next keyframe on
        if state is None and (at == first or recording.keyframe_before(at) == at):
            state = recording.state_at(at - 1)
        for event in events:
            if event.seq > last:
                break
            if matches(event, state):
                bounds = bounds[0] if bounds else event.seq, event.seq
            if state is not None:
                state.apply(event)
        if events[-1].seq >= last:
            break
    if bounds is None:
        raise NotFound(f"no event of {recording.path} between {first} and {last} is of that kind")
    return bounds


def matcher(expression: str | None, request: str | None) -> Matches | None:
    """The condition of ``--where`` and ``--request`` together, None when neither is given. Raises ``UsageError``."""
    parts = [] if expression is None else [f"({expression})"]
    if request is not None:
        quoted = request.replace("\\", "\\\\").replace('"', '\\"')
        parts.append(f'request ~ "{quoted}"')
    return compile_event_filter(" and ".join(parts)) if parts else None


# --- the edges -------------------------------------------------------------------------------------------------------


def _begin_of_stimulus(recording: Recording, seq: int) -> Event:
    """The first event of the stimulus that caused event ``seq``; a batch never begins inside a stimulus."""
    for frame in recording.frames(seq):
        if frame.channel != fmt.EVENTS or frame.end_seq <= seq:
            continue
        events = decode_events(frame, recording.path)
        if events[0].seq > seq:
            break
        index = seq - events[0].seq
        while index and events[index - 1].cause == events[index].cause:
            index -= 1
        return events[index]
    raise RecordingError(f"event {seq} of {recording.path} lies in a gap")


def _memory_before(recording: Recording, begin: Event, state: CacheState) -> bytes | None:
    """The leader's memory before this event; None when a rerun does not reach the facts that the events give."""
    keyframe = recording.keyframe(begin.seq, complete=True)
    if keyframe is None or any(gap.count and keyframe.seq <= gap.first < begin.seq for gap in recording.gaps):
        return None
    try:
        leader = Leader.restore(recording.config, keyframe.facts, keyframe.memory)
        undone = _undone(recording, keyframe.seq, begin.seq)
        for stimulus in _stimuli(recording, keyframe.seq, begin.seq):
            if stimulus.n >= begin.cause:
                break
            if stimulus.n in undone:
                leader.state.apply(undone[stimulus.n])
            else:
                leader.handle(stimulus)
    except (*FOLD_ERRORS, KvbmConsoleError, msgspec.MsgspecError):
        return None  # written by a leader that decided otherwise
    return leader.export() if leader.digest() == digest(state) else None


def _undone(recording: Recording, first: int, end: int) -> dict[int, Event]:
    """Stimuli that broke an invariant in the recorded run, with the event published instead of their events."""
    return {
        event.cause: event for events in recording.events(first) if events[0].seq < end
        for event in events if isinstance(event, InvariantViolated)
    } if first < end else {}


def _stimuli(recording: Recording, keyframe_seq: int, end: int) -> Iterator[Stimulus]:
    """The stimuli behind the keyframe at ``keyframe_seq`` and in front of event ``end``."""
    behind = False
    # Several entries may begin at one number, and the keyframe is the first of them.
    for frame in recording.frames(keyframe_seq - 1):
        if frame.channel == fmt.KEYFRAMES and frame.first_seq == keyframe_seq:
            behind = True
        elif frame.channel == fmt.STIMULI and behind:
            yield from decode_stimuli(frame, recording.path)
        elif frame.channel == fmt.EVENTS and frame.first_seq >= end:
            return


# --- the stretch -----------------------------------------------------------------------------------------------------


def _frames(
    recording: Recording, about: About, keyframe: Keyframe, begin: Event, last: int, first_ns: int
) -> Iterator[Frame]:
    """The frames of the cut, in order."""
    yield keyframe_frame(about, keyframe, first_ns)
    rerunnable = keyframe.complete
    next_seq, end_ns = begin.seq, first_ns
    last_cause = _cause(recording, last)
    # Begin an event earlier, because the stimuli of the first event may stand at the end of the entry before.
    for frame in recording.frames(begin.seq - 1):
        if frame.first_seq > last:
            break
        if frame.channel == fmt.STIMULI:
            stimuli = [
                stimulus for stimulus in decode_stimuli(frame, recording.path)
                if stimulus.n >= begin.cause and (last_cause is None or stimulus.n <= last_cause)
            ]
            if stimuli and rerunnable:
                yield stimulus_frame(about, stimuli, max(frame.first_seq, next_seq))
        elif frame.channel == fmt.EVENTS:
            events = [event for event in decode_events(frame, recording.path) if event.seq >= begin.seq]
            events = [event for event in events if event.seq <= last or event.cause == last_cause]
            if events:
                yield frame if len(events) == frame.count else event_frame(about, events)
                next_seq, end_ns = events[-1].seq + 1, events[-1].at_ns
        elif frame.channel == fmt.KEYFRAMES and frame.first_seq > begin.seq:
            rerunnable |= decode_keyframe(frame, recording.path).complete
            yield frame
        elif frame.channel == fmt.MARKS and frame.first_seq > begin.seq:
            mark = fmt.decode_mark(frame.data)
            if isinstance(mark, Gap):
                rerunnable = False
                if mark.last > last:
                    mark = Gap(mark.first, last, mark.reason)
                    data = fmt.encode_item(mark)
                    frame = msgspec.structs.replace(frame, count=mark.count, data=data)
                next_seq = max(next_seq, mark.last + 1)
            if not isinstance(mark, fmt.SegmentEnd):
                yield frame
    yield end_frame(about, next_seq - 1, end_ns)


def _cause(recording: Recording, seq: int) -> int | None:
    """The stimulus that caused this event, None when it lies in a gap."""
    try:
        return _begin_of_stimulus(recording, seq).cause
    except RecordingError:
        return None
