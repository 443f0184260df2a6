"""A server-streaming method of another project's gRPC server, request and answers as bytes.

Law of this file: nothing is decoded here, so no schema of another project is compiled into ours.
"""

from collections.abc import AsyncIterator
from typing import Final

import grpc

from kvbm_console.core.errors import ConnectionLost, NotFound

MESSAGE_BYTES_MAX: Final = 16 * 2**20
"""An answer of LMCache has at most 1,024 events, with the tokens of a chunk each."""
KEEPALIVE_MS: Final = 30_000
"""An idle stream asks its server so often whether the connection still stands."""


async def byte_stream(address: str, method: str, request: bytes) -> AsyncIterator[bytes]:
    """The answers of ``method`` (``/package.Service/Method``) at HOST:PORT, until the server ends the stream.

    Raises ``NotFound`` if the server has no such method or refuses the request, else ``ConnectionLost``.
    """
    options = (
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.enable_http_proxy", 0),
    )
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        try:
            async for answer in channel.unary_stream(method, None, None)(request):
                yield answer
        except grpc.aio.AioRpcError as error:
            said = " ".join((error.details() or error.code().name).split())[:200]
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
                raise NotFound(f"{address} has no events for us: {said}") from None
            raise ConnectionLost(f"{address} does not answer: {said}") from None
