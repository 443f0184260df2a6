"""The lines of a Dynamo leader recording, typed and bounded.

A line is ``{"timestamp": ms since the start, "event": {"<Action>": [input, output]}}``. The format has no version and
no wall clock, and contains only calls that succeeded. Unknown actions and fields are skipped and counted.

Law of this file: a line counts only after it was decoded into a type. An error names the line's number.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.recording.format import POOL_BLOCKS_MAX

LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""A line holds the tokens of a prompt, or of all prompts of an iteration."""
TORN: Final = "torn last line"
"""In place of the action of a line without its end."""
INFER_REQUESTS: Final = 500
"""New requests that are examined to find the block size."""
BLOCK_SIZES: Final = (8, 16, 32, 64, 128, 256, 512)
TOKENS_MAX: Final = 2**31 - 1
"""The largest position or length."""

Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=POOL_BLOCKS_MAX)]
"""The pool grows to hold an id, so an id has the limit of a pool in a recording."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class RequestAbout(msgspec.Struct):
    """The request of a call."""

    request_id: str
    lora_name: str | None = None
    salt_hash: int | None = None


class CreateSlot(msgspec.Struct):
    """A request with its prompt."""

    request: RequestAbout
    tokens: list[Token]


class GetNumNewMatchedTokens(msgspec.Struct):
    """A lookup."""

    request_id: str
    request_num_tokens: Tokens
    num_computed_tokens: Tokens


class Matched(msgspec.Struct):
    """The answer of a lookup."""

    num_new_matched_tokens: Tokens
    has_matched: bool = False


class UpdateStateAfterAlloc(msgspec.Struct):
    """Device blocks were allocated."""

    request_id: str
    block_ids: list[BlockId]
    num_external_tokens: Tokens


class NewRequest(msgspec.Struct):
    """A request that is scheduled for the first time."""

    request_id: str
    block_ids: list[BlockId]
    num_computed_tokens: Tokens
    prompt_token_ids: list[Token] = []


class CachedRequest(msgspec.Struct):
    """A request that was scheduled before."""

    request_id: str
    num_computed_tokens: Tokens
    resumed_from_preemption: bool = False
    new_token_ids: list[Token] = []
    new_block_ids: list[BlockId] = []


class SchedulerOutput(msgspec.Struct):
    """The requests of an iteration."""

    new_requests: list[NewRequest] = []
    cached_requests: list[CachedRequest] = []
    num_scheduled_tokens: dict[str, Tokens] = {}


class BuildConnectorMeta(msgspec.Struct):
    """An iteration was formed."""

    scheduler_output: SchedulerOutput


class FinishCall(msgspec.Struct):
    """The engine has ended a request."""

    request_id: str
    block_ids: list[BlockId] = []


class Finished(msgspec.Struct):
    """Dynamo's answer to the end of a request: true if the blocks stay allocated."""

    is_finished: bool


class ResetCache(msgspec.Struct):
    """The engine forgot its cache."""


Call = (
    CreateSlot | GetNumNewMatchedTokens | UpdateStateAfterAlloc | BuildConnectorMeta | FinishCall | ResetCache
)
"""The calls that our leader gets again."""
Answer = Matched | Finished | None


class DynamoLine(msgspec.Struct, frozen=True):
    """A line of the recording. ``call`` is None for an unknown action, or an action that a leader does not need."""

    number: int
    at_ns: int
    action: str
    call: Call | None
    answer: Answer


class _Raw(msgspec.Struct):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=2**43)]
    """Milliseconds; the bound is 278 years, so that nanoseconds fit."""
    event: dict[str, msgspec.Raw]


_raw: Final = msgspec.json.Decoder(_Raw)
_decoders: Final[dict[str, Any]] = {
    "CreateSlot": msgspec.json.Decoder(tuple[CreateSlot, Any]),
    "GetNumNewMatchedTokens": msgspec.json.Decoder(tuple[GetNumNewMatchedTokens, Matched]),
    "UpdateStateAfterAlloc": msgspec.json.Decoder(tuple[UpdateStateAfterAlloc, Any]),
    "BuildConnectorMeta": msgspec.json.Decoder(tuple[BuildConnectorMeta, Any]),
    "RequestFinished": msgspec.json.Decoder(tuple[FinishCall, Finished]),
    "ResetCache": msgspec.json.Decoder(tuple[ResetCache, Any]),
}
"""Action to the decoder of [input, output]; an unused output may have any type."""


def read_lines(path: Path) -> Iterator[DynamoLine]:
    """The calls of a recording. A last line without its end is named ``TORN`` and has no call.

    Raises ``UsageError``, also for a recording without a whole line.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    with file:
        number = whole = 0
        while text := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(text) > LINE_BYTES_MAX:
                raise UsageError(f"{path} line {number}: a line has at most {LINE_BYTES_MAX} bytes")
            if not text.strip():
                continue
            try:
                line = _line(number, text)
                whole += 1
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                if whole and not text.endswith(b"\n"):  # the writer was stopped within this line
                    line = DynamoLine(number, 0, TORN, None, None)
                else:
                    raise UsageError(f"{path} line {number} is not a call of a Dynamo leader: {error}") from None
            yield line
        if not whole:
            raise UsageError(f"{path} must have calls of a Dynamo leader, got no line")


def _line(number: int, text: bytes) -> DynamoLine:
    raw = _raw.decode(text)
    if len(raw.event) != 1:
        raise ValueError("it needs exactly one event")
    ((action, body),) = raw.event.items()
    decoder = _decoders.get(action)
    if decoder is None:
        return DynamoLine(number, raw.timestamp * 1_000_000, action[:80], None, None)
    call, answer = decoder.decode(body)
    return DynamoLine(
        number, raw.timestamp * 1_000_000, action, call, answer if isinstance(answer, Matched | Finished) else None
    )


def infer_block_tokens(path: Path) -> int | None:
    """The block size that explains the numbers of blocks of new requests; None if no size or several sizes do.

    If several sizes fit and 16 is among them, the result is 16, because the prompts are too short to decide.
    """
    possible = set(BLOCK_SIZES)
    seen = 0
    for line in read_lines(path):
        if not isinstance(line.call, BuildConnectorMeta):
            continue
        output = line.call.scheduler_output
        for request in output.new_requests:
            tokens = request.num_computed_tokens + output.num_scheduled_tokens.get(request.request_id, 0)
            if tokens and request.block_ids:
                possible &= {size for size in possible if -(-tokens // size) == len(request.block_ids)}
                seen += 1
        if seen >= INFER_REQUESTS or not possible:
            break
    if len(possible) == 1:
        return possible.pop()
    return 16 if 16 in possible else None
