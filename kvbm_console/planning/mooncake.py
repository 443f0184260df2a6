"""Export of a recording as a Mooncake trace: one JSON line for each request, one id for each 512 tokens.

An id stands for the block and all in front of it, so it is the hash of the last recorded block in it. Ids count from 0
in the order of their first use. ``output_hash_ids`` are the blocks that become full while the answer is generated. The
published traces do not have them, and without them no turn of a chat finds the answer before it.

Law of this file: read back in blocks of 512 tokens, the trace has the requests of the recording, and two blocks have
the same hash exactly if they had it in the recording.
"""

from typing import IO

import msgspec

from kvbm_console.core.errors import UsageError
from kvbm_console.planning.recorded import RecordedLoad
from kvbm_console.simulator.hashing import TRACE_BLOCK_TOKENS
from kvbm_console.simulator.workloads import Request


def write_mooncake(load: RecordedLoad, file: IO[bytes]) -> int:
    """Write the requests by their arrival; returns their number. Raises ``UsageError`` for blocks that do not divide
    512 tokens."""
    size = load.block_tokens
    if TRACE_BLOCK_TOKENS % size:
        raise UsageError(f"--to mooncake needs blocks that divide {TRACE_BLOCK_TOKENS} tokens, got {size}")
    ids: dict[object, int] = {}
    for request in sorted(load.requests, key=lambda request: request.arrival_ns):
        file.write(msgspec.json.encode(_line(request, TRACE_BLOCK_TOKENS // size, ids)) + b"\n")
    return len(load.requests)


def _line(request: Request, parts: int, ids: dict[object, int]) -> dict[str, object]:
    def number(key: object) -> int:
        return ids.setdefault(key, len(ids))

    prompt = request.prompt_tokens
    full = prompt // TRACE_BLOCK_TOKENS
    ends = (request.hashes + request.output_hashes)[parts - 1 :: parts]
    hash_ids = [number(key) for key in ends[:full]]
    if prompt % TRACE_BLOCK_TOKENS:
        hash_ids.append(number(("tail", request.hashes[-1:], prompt)))
    more = {"priority": request.priority, "n": 1 + len(request.clone_hashes)}
    output_ids = [number(key) for key in ends[full:]]
    return {
        "timestamp": request.arrival_ns / 1e6, "input_length": prompt, "output_length": request.output_tokens,
        "hash_ids": hash_ids, **({"output_hash_ids": output_ids} if output_ids else {}),
        **{name: value for name, value in more.items() if value > (name == "n")},
    }
