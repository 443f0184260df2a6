"""Decodes the bytes of a frame to events, stimuli and facts, with a single type of error.

Law of this file: any error of a decoder on hostile bytes leaves here as ``CorruptRecording`` with a sentence.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvbm_console.core.errors import CorruptRecording, FoldError, InternalError
from kvbm_console.core.events import Event, PoolKnown
from kvbm_console.core.snapshots import decode_facts
from kvbm_console.core.state import CacheState
from kvbm_console.core.stimuli import Stimulus
from kvbm_console.recording import format as fmt
from kvbm_console.recording.format import Frame, Keyframe, KeyframePart, Unpacker
from kvbm_console.wire.batches import MalformedBatch, NewerSchema, unpack_events, unpack_stimuli

FOLD_ERRORS: Final = (FoldError, InternalError, LookupError, ValueError, TypeError, AttributeError, OverflowError)
"""Errors that folding the events of a hostile or foreign file has been seen to raise."""


def parts_of(frames: Iterable[Frame]) -> Iterator[bytes]:
    """The parts of packed keyframes among these frames, in order."""
    marks = (fmt.decode_mark(frame.data) for frame in frames if frame.channel == fmt.MARKS)
    return (mark.data for mark in marks if isinstance(mark, KeyframePart))


def unpacked_frames(frames: Iterable[Frame], path: Path) -> Iterator[Frame]:
    """The same frames with each packed keyframe as one frame. Raises ``CorruptRecording``.

    A keyframe whose parts stand in front of the first frame is left out.
    """
    unpacker, first = Unpacker(), True
    for frame in frames:
        part = next(parts_of([frame]), None)
        if part is not None:
            unpacker.add(part)
            continue
        keyframe = decode_keyframe(frame, path) if frame.channel == fmt.KEYFRAMES else None
        if keyframe is None or not keyframe.parts:
            yield frame
        elif unpacker.parts or not first:
            yield msgspec.structs.replace(frame, data=b"", keyframe=unpack(keyframe, unpacker, path))
        first = False
        if unpacker.parts:
            unpacker = Unpacker()


def decode_keyframe(frame: Frame, path: Path) -> Keyframe:
    """The keyframe of a frame; one that is packed and was not unpacked has ``parts``. Raises ``CorruptRecording``."""
    if frame.keyframe is not None:
        return frame.keyframe
    try:
        return fmt.decode_keyframe(frame.data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptRecording(f"{path.name}: a keyframe cannot be read: {error}") from None


def unpack(keyframe: Keyframe, unpacker: Unpacker, path: Path) -> Keyframe:
    """A packed keyframe unpacked. Raises ``CorruptRecording``."""
    try:
        return unpacker.keyframe(keyframe)
    except msgspec.DecodeError as error:
        raise CorruptRecording(f"{path.name}: the keyframe at event {keyframe.seq} cannot be read: {error}") from None


def decode_events(frame: Frame, path: Path) -> list[Event]:
    """The events of a frame. Raises ``CorruptRecording``."""
    try:
        events = unpack_events(frame.data)
    except MalformedBatch as error:
        raise CorruptRecording(f"{path} is corrupt behind event {frame.first_seq - 1}: {error}") from None
    if events[0].seq != frame.first_seq or len(events) != frame.count:
        raise CorruptRecording(f"{path} is corrupt: event {frame.first_seq} is not where its frame says")
    for event in events:
        if type(event) is PoolKnown and (event.capacity_blocks or 0) > fmt.POOL_BLOCKS_MAX:
            raise CorruptRecording(
                f"{path}: event {event.seq} does not fit the facts: a pool of {event.capacity_blocks} blocks is above "
                f"{fmt.POOL_BLOCKS_MAX}"
            )
    return events


def decode_stimuli(frame: Frame, path: Path) -> list[Stimulus]:
    """The stimuli of a frame. Raises ``CorruptRecording``, and ``NewerSchema`` for kinds that we do not know."""
    try:
        return unpack_stimuli(frame.data)
    except NewerSchema:
        raise
    except MalformedBatch as error:
        raise CorruptRecording(f"{path} is corrupt: stimuli before event {frame.first_seq}: {error}") from None


def decode_state(keyframe: Keyframe, path: Path) -> CacheState:
    """The facts of a keyframe. Raises ``CorruptRecording``."""
    try:
        state = decode_facts(keyframe.facts)
    except FOLD_ERRORS as error:
        raise CorruptRecording(f"{path}: the keyframe at event {keyframe.seq} cannot be read: {error}") from None
    if state.seq != keyframe.seq:
        raise CorruptRecording(f"{path}: the keyframe at event {keyframe.seq} holds the facts at event {state.seq}")
    return state


def fold(state: CacheState, events: list[Event], path: Path) -> None:
    """Apply events. Raises ``CorruptRecording`` when they do not fit, and refuses pools of hostile size."""
    apply = state.apply
    try:
        for event in events:
            if type(event) is PoolKnown:
                check_size(state, event)
            apply(event)
    except FOLD_ERRORS as error:
        raise CorruptRecording(f"{path}: event {state.seq} does not fit the facts: {error}") from None


def check_size(state: CacheState, event: PoolKnown) -> None:
    """Raise ``FoldError`` where the pools of a file would take more memory than one event may ask for."""
    total = event.first_place + (event.capacity_blocks or 0) + sum(map(len, state.pools))
    if total > fmt.POOLS_BLOCKS_MAX:
        raise FoldError(f"pools of {total} blocks together are above {fmt.POOLS_BLOCKS_MAX}")
