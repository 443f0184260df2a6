"""New calls take turns: the library hands over as many as the lane allows, and calls that run are not touched."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from server.arrivals import Paced, start_paced
from server.questions import CALL_NS, SHARE, Lane


class Echo(grpc.GenericRpcHandler):
    """Answers every call with its bytes, and tells each that has come."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[bytes] = asyncio.Queue()

    def service(self, handler_call_details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            self.came.put_nowait(request)
            return request

        async def talk(requests: Any, context: Any) -> None:
            while (data := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                await context.write(data)

        if handler_call_details.method == "/talk":
            return grpc.stream_stream_rpc_method_handler(talk)  # type: ignore[arg-type]
        return grpc.unary_unary_rpc_method_handler(answer)  # type: ignore[arg-type]


class World:
    """A server whose lane has savings for ``calls`` and a clock that stands."""

    def __init__(self, calls: int) -> None:
        self.now_ns = 0
        self.lane = Lane(lambda: self.now_ns, savings_ns=calls * CALL_NS)
        self.echo = Echo()

    async def __aenter__(self) -> "World":
        self.server = grpc.aio.server(handlers=[self.echo])
        port = self.server.add_insecure_port("127.0.0.1:0")
        await start_paced(self.server, self.lane)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        self.now_ns += CALL_NS * SHARE  # the end of the server takes a turn, too
        await self.server.stop(0)


@pytest.mark.asyncio
async def test_no_more_calls_begin_than_the_lane_has_savings_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with World(3) as world:
        ask = world.channel.unary_unary("/ask")
        calls = [asyncio.ensure_future(asking(ask, b"%d" % number)) for number in range(8)]
        came = {await world.echo.came.get() for _ in range(3)}
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert {task.result() for task in done} == came
        assert world.echo.came.empty()
        while waiting:
            world.now_ns += CALL_NS * SHARE  # for one more
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert {task.result() for task in done} == {b"%d" % number for number in range(8)}
    assert not caplog.records, "the installed RPC library begins its calls in another way"


async def asking(ask: Any, data: bytes) -> bytes:
    answer: bytes = await ask(data)
    return answer


@pytest.mark.asyncio
async def test_a_call_that_runs_waits_for_no_turn() -> None:
    async with World(1) as world:
        call = world.channel.stream_stream("/talk")()
        for number in range(20):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        waits = asyncio.ensure_future(asking(world.channel.unary_unary("/ask"), b"later"))
        await call.write(b"beside")
        assert await call.read() == b"beside"
        assert not waits.done()
        world.now_ns += CALL_NS * SHARE
        assert await waits == b"later"
        call.cancel()


@pytest.mark.asyncio
async def test_a_paced_coroutine_is_cancelled_and_fails_as_it_would_without_turns() -> None:
    turns: list[str] = []

    async def turn() -> None:
        turns.append("turn")
        await asyncio.sleep(0)

    def paced(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.ensure_future(Paced(coroutine, turn))

    async def works() -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "done"

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("as it is")

    async def tidies() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            turns.append("tidied")

    assert await paced(works()) == "done"
    assert turns == ["turn", "turn"]
    with pytest.raises(ValueError, match="as it is"):
        await paced(fails())
    waiting = paced(tidies())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert turns[-1] == "tidied"
