"""Roles and remote use: sockets, tokens, TLS; an observer can do nothing but look (F26, F27).

Law of this file: every method and every verb is tried, by the contract's own list.
"""

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvbm_console.client import Access, Client
from kvbm_console.client.questions import translated
from kvbm_console.core.config import BreakpointSpec
from kvbm_console.core.errors import ConnectionLost, Refused, UsageError
from kvbm_console.core.ids import SlotState
from kvbm_console.metrics.http import CONNECTIONS_MAX
from kvbm_console.stream.verbs import SetBreakpoint
from kvbm_console.wire.protocol import ROLE_OF, method_path
from kvbm_console.wire.v1 import console_pb2 as pb
from server.access import read_token
from server.daemon import Daemon
from server.options import Endpoint
from tests.cli.programs import run
from tests.metrics.test_exposition import page
from tests.server.daemons import Process, certificate_in, options_for, process, running, socket_directory

TOKEN = "0123456789abcdef0123456789abcdef"
MAIN = "from kvbm_console.cli.main import main; main()"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A token, readable by its owner alone."""
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(TOKEN + "\n")
    return path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """That of the daemons."""
    return certificate_in(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def tcp_daemon(**options: Any) -> AsyncIterator[Daemon]:
    async with running(options_for(None, "127.0.0.1:0", **options)) as daemon:
        yield daemon


async def controls(client: Client) -> bool:
    """Whether this client may set a breakpoint."""
    try:
        async with client.control("me") as session:
            return (await session.ask(SetBreakpoint(BreakpointSpec(to_state=SlotState.DECODING)))).verified
    except Refused:
        return False


# --- F27: by enumeration ---


async def refusals(address: str) -> dict[str, grpc.StatusCode]:
    """The status of every method for a plain caller."""
    found: dict[str, grpc.StatusCode] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        for name, method in pb.DESCRIPTOR.services_by_name["Console"].methods_by_name.items():
            kind = "stream" if method.client_streaming else "unary"
            answers = "stream" if method.server_streaming else "unary"
            call = getattr(channel, f"{kind}_{answers}")(method_path(name))
            try:
                if kind == "stream":
                    found[name] = await code_of(channel, name, b"")
                    continue
                if answers == "stream":
                    async for _ in call(b""):
                        break
                else:
                    await call(b"")
                found[name] = grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                found[name] = error.code()
    return found


@pytest.mark.asyncio
@pytest.mark.fault
async def test_f27_an_observer_is_refused_every_controlling_method() -> None:
    async with tcp_daemon() as daemon:
        found = await refusals(daemon.address)
    assert set(found) == set(ROLE_OF), "every method of the contract was tried"
    for name, role in ROLE_OF.items():
        assert role in (pb.ROLE_OBSERVE, pb.ROLE_CONTROL), f"{name} declares no role"
        assert (found[name] is grpc.StatusCode.PERMISSION_DENIED) is (role == pb.ROLE_CONTROL), name
    controlling = {name for name, role in ROLE_OF.items() if role == pb.ROLE_CONTROL}
    assert {"Control", "Feed"} <= controlling


async def code_of(channel: grpc.aio.Channel, method: str, message: bytes) -> grpc.StatusCode:
    """How the daemon ends a stream of a method that says this alone.

    A message that is written while the refusal arrives makes grpcio put an internal error of its own in place of the
    daemon's code; then the stream is asked for again. The daemon's internal errors say that its log says why.
    """
    while True:
        stream = channel.stream_stream(method_path(method))()
        with contextlib.suppress(grpc.aio.AioRpcError):  # the refusal may be there before the message
            await stream.write(message)
            await stream.done_writing()
            while await stream.read() is not grpc.aio.EOF:
                pass
        code: grpc.StatusCode = await stream.code()
        if code is not grpc.StatusCode.INTERNAL or "the daemon's log" in await stream.details():
            return code


@pytest.mark.asyncio
@pytest.mark.fault
async def test_f27_an_observer_is_refused_every_verb_of_a_session() -> None:
    verbs = [field.name for field in pb.ControlRequest.DESCRIPTOR.oneofs_by_name["verb"].fields]
    assert {"reset", "drain", "freeze", "set"} <= set(verbs)
    async with tcp_daemon() as daemon:
        before = daemon.service.state.seq
        async with grpc.aio.insecure_channel(daemon.address) as channel:
            for verb in verbs:
                request = pb.ControlRequest(id=1)
                getattr(request, verb).SetInParent()
                code = await code_of(channel, "Control", request.SerializeToString())
                assert code is grpc.StatusCode.PERMISSION_DENIED, verb
        async with Client(daemon.address) as client:
            with pytest.raises(Refused, match="needs the role control"):
                await client.control("me", lease=False).open()
        assert daemon.service.state.seq == before, "nothing became true"


@pytest.mark.asyncio
@pytest.mark.fault
async def test_f27_read_only_makes_everybody_an_observer(token_file: Path) -> None:
    with socket_directory() as place:
        async with running(options_for(None, f"unix:{place}/d.sock", read_only=True)) as daemon:
            found = await refusals(daemon.address)
            async with Client(daemon.address) as client:
                assert not (await client.hello()).control
                assert not await controls(client)
                assert await client.status()
    denied = {name for name, code in found.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert denied == {name for name, role in ROLE_OF.items() if role == pb.ROLE_CONTROL}
    async with (
        tcp_daemon(read_only=True, token_file=token_file) as daemon,
        Client(daemon.address, access=Access(token=TOKEN)) as client,
    ):
        assert not await controls(client)


# --- tokens ---


@pytest.mark.asyncio
async def test_a_token_grants_control_over_tcp_and_a_wrong_one_nothing(token_file: Path) -> None:
    async with tcp_daemon(token_file=token_file) as daemon:
        async with Client(daemon.address) as plain, Client(daemon.address, access=Access(token=TOKEN)) as known:
            assert (await plain.hello()).control is False
            assert (await known.hello()).control is True
            assert await controls(known)
            assert not await controls(plain)
            assert len((await plain.status())["breakpoints"]) == 1, "an observer sees what there is"
            async with known.subscribe() as stream:
                assert await anext(stream)
        async with Client(daemon.address, access=Access(token=TOKEN[:-1] + "!")) as wrong:
            with pytest.raises(Refused, match="the token is not that of this daemon"):
                await wrong.hello()
    async with tcp_daemon() as daemon, Client(daemon.address, access=Access(token=TOKEN)) as known:
        with pytest.raises(Refused, match="the token is not that"):
            await known.hello()


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (TOKEN, 0o644, "must be readable by its owner alone (chmod 600), its mode is 644"), ("short", 0o600, "got 5"),
        ("x" * 513, 0o600, "got 513"), ("two words of sixteen bytes", 0o600, "without blanks"), ("", 0o600, "got 0"),
        ("é" * 20, 0o600, "printable ASCII"), ("x" * 5_000, 0o600, "at most 2048 bytes"),
    ],
)
def test_a_token_file_is_checked(tmp_path: Path, text: str, mode: int, says: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(UsageError) as caught:
        read_token(path)
    assert says in str(caught.value)
    assert text not in str(caught.value) or not text, "what is secret is not printed"


def test_a_token_is_never_sent_in_the_clear_to_another_machine() -> None:
    with pytest.raises(UsageError, match="over TLS only"):
        Client("10.0.0.1:7000", access=Access(token=TOKEN))


# --- TLS ---


@pytest.mark.asyncio
async def test_tls_with_a_token(certificate: tuple[Path, Path], token_file: Path) -> None:
    cert, key = certificate
    async with tcp_daemon(tls_cert=cert, tls_key=key, token_file=token_file) as daemon:
        async with Client(daemon.address, access=Access.load(cert, token_file)) as client:
            assert (await client.hello()).control
            assert await controls(client)
        async with Client(daemon.address, access=Access.load(cert, None)) as client:
            assert not (await client.hello()).control


@pytest.mark.asyncio
async def test_who_listens_but_not_to_us_is_not_called_nobody(
    certificate: tuple[Path, Path], tmp_path: Path, token_file: Path
) -> None:
    (cert, key), (another, _) = certificate, certificate_in(tmp_path)

    async def said(target: str, ca: Path | None) -> str:
        async with Client(target, access=Access.load(ca, None)) as client:
            with pytest.raises(ConnectionLost) as caught:
                await client.hello()
        return str(caught.value)

    async with tcp_daemon(tls_cert=cert, tls_key=key, token_file=token_file) as daemon:
        assert await said(daemon.address, None) == f"{daemon.address} hangs up; a daemon with TLS needs --tls-ca"
        assert await said(daemon.address, another) == (
            f"{daemon.address} shows no certificate that --tls-ca vouches for")
    assert await said(daemon.address, cert) == f"no daemon listens on {daemon.address}"
    assert await said(daemon.address, None) == f"no daemon listens on {daemon.address}"
    async with tcp_daemon() as daemon:
        assert await said(daemon.address, cert) == f"{daemon.address} does not speak TLS, so --tls-ca is not for it"
    strange = tmp_path / "strange"
    strange.mkdir()
    cert, key = certificate_in(strange, "DNS:elsewhere.example")
    async with tcp_daemon(tls_cert=cert, tls_key=key, token_file=token_file) as daemon:
        assert await said(daemon.address, cert) == f"{daemon.address} shows a certificate for other hosts"
    reasons = {"certificate has expired": "has expired", "certificate is not yet valid": "is not valid yet"}
    for reason, told in reasons.items():
        late = translated("far:1", grpc.StatusCode.UNAVAILABLE, (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.1:1: Tls handshake failed "
            f"(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines: CERTIFICATE_VERIFY_FAILED: {reason}"))
        assert str(late) == f"far:1 shows a certificate that {told}"
    unknown = translated("far:1", grpc.StatusCode.UNAVAILABLE, "errors resolving far:1: Domain name not found")
    assert str(unknown) == "far:1 names a host that is not found"


def test_files_that_are_no_pem_are_refused(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    with pytest.raises(UsageError, match=r"tls-cert .* must be in PEM form"):
        Daemon(options_for(None, "127.0.0.1:0", tls_cert=wrong, tls_key=key))
    with pytest.raises(UsageError, match=r"tls-key .* must be in PEM form"):
        Daemon(options_for(None, "127.0.0.1:0", tls_cert=cert, tls_key=wrong))
    with pytest.raises(UsageError, match="tls-cert must be given together with tls-key"):
        options_for(None, "127.0.0.1:0", tls_cert=cert)
    with pytest.raises(UsageError, match=r"--tls-ca .* must be in PEM form"):
        Access.load(wrong, None)


# --- F26: beyond this machine ---


@pytest.mark.fault
def test_f26_beyond_the_loopback_only_with_tls_and_a_token(
    tmp_path: Path, certificate: tuple[Path, Path], token_file: Path
) -> None:
    cert, key = certificate
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    for flags in ((), tls, ("--token-file", str(token_file))):
        done = run(tmp_path, "serve", "--listen", "0.0.0.0:0", *flags)
        assert done.returncode == 2
        assert "without TLS and a token other machines are not served" in done.stderr
        assert done.stdout == ""
    endpoint = Endpoint("0.0.0.0:0", remote=True)
    endpoint.close()


@pytest.mark.fault
def test_f26_metrics_beyond_the_loopback_only_with_tls_and_a_token(
    tmp_path: Path, certificate: tuple[Path, Path], token_file: Path
) -> None:
    cert, key = certificate
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    for host, flags in (("0.0.0.0", ()), ("[::]", tls), ("example.org", ("--token-file", str(token_file)))):
        done = run(tmp_path, "serve", "--listen", f"unix:{tmp_path}/s", "--metrics", f"{host}:0", *flags)
        assert done.returncode == 2
        assert "metrics must be a loopback address" in done.stderr
        assert "without TLS and a token other machines are not served" in done.stderr
        assert not (tmp_path / "s").exists()


@pytest.mark.asyncio
async def test_metrics_for_other_machines_are_encrypted_and_need_the_token(
    certificate: tuple[Path, Path], token_file: Path
) -> None:
    cert, key = certificate
    flags = {"tls_cert": cert, "tls_key": key, "token_file": token_file}
    async with tcp_daemon(metrics="0.0.0.0:0", **flags) as daemon:
        assert daemon.metrics is not None
        port = daemon.metrics.port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * CONNECTIONS_MAX)]
        context = ssl.create_default_context(cafile=str(cert))

        async def scrape(*headers: str) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write("\r\n".join(("GET /metrics HTTP/1.1", *headers, "", "")).encode())
            answer = await reader.read()
            writer.close()
            return answer

        assert (await scrape()).startswith(b"HTTP/1.1 401 Unauthorized")
        assert (await scrape("Authorization: Bearer wrong")).startswith(b"HTTP/1.1 401 Unauthorized")
        answer = await scrape(f"authorization: Bearer {TOKEN}")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"kvbm_" in answer
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"kvbm_" not in await reader.read(), "nothing is said in the clear"
        for _, each in [*silent, (reader, writer)]:
            each.close()
    async with tcp_daemon(metrics="127.0.0.1:0", **flags) as daemon:
        assert daemon.metrics is not None
        status, _ = await page(daemon.metrics.port)
        assert status == b"HTTP/1.1 200 OK", "on the loopback they are plain"


@pytest.mark.asyncio
async def test_the_shell_controls_a_daemon_over_tls(
    tmp_path: Path, certificate: tuple[Path, Path], token_file: Path
) -> None:
    cert, key = certificate
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(token_file))
    with process("-c", MAIN, "serve", "--listen", f"0.0.0.0:{port}", *flags) as child:
        assert child.child.stderr is not None
        assert "serving on" in await asyncio.to_thread(child.child.stderr.readline)
        target = ("--target", f"127.0.0.1:{port}", "--tls-ca", str(cert))
        said = await asyncio.to_thread(
            run, tmp_path, "break", "set", "--to", "decoding", *target, "--token-file", str(token_file))
        assert (said.returncode, said.stdout) == (0, "breakpoint 1: transition.did * → decoding\n")
        denied = await asyncio.to_thread(run, tmp_path, "break", "set", "--to", "decoding", *target)
        assert denied.returncode == 3
        assert "Control needs the role control; this endpoint grants observe" in denied.stderr
        seen = await asyncio.to_thread(run, tmp_path, "break", "list", *target)
        assert "decoding" in seen.stdout


# --- disarm by signal and by environment, breakpoints that are kept ---


def serve(place: Path, *flags: str) -> Process:
    return Process("-c", MAIN, "serve", "--listen", f"unix:{place}/d.sock", *flags)


async def ready(child: Process) -> None:
    assert child.child.stderr is not None
    assert "serving on" in await asyncio.to_thread(child.child.stderr.readline)


@pytest.mark.asyncio
async def test_a_signal_disarms_and_breakpoints_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    with socket_directory() as place:
        for round_ in range(2):
            child = serve(place, "--breakpoints", str(file), "--workload", "multiturn", "--speed", "2")
            try:
                await ready(child)
                async with Client(f"unix:{place}/d.sock") as client:
                    if round_ == 0:
                        async with client.control("shell", lease=False) as session:
                            for persist in (True, False):
                                await session.ask(SetBreakpoint(BreakpointSpec(
                                    to_state=SlotState.PREFILLING, persist=persist, name=f"persist {persist}",
                                    condition="live > 1")))
                        async with client.subscribe() as stream:
                            async for _ in stream:
                                if (await client.status())["holds"]:
                                    break
                            child.send(signal.SIGUSR1)
                            async for _ in stream:
                                status = await client.status()
                                if not any(entry["enabled"] for entry in status["breakpoints"]):
                                    break
                        assert status["holds"] == []
                    else:
                        (entry,) = (await client.status())["breakpoints"]
                        assert (entry["name"], entry["condition"]) == ("persist True", "live > 1")
                        assert entry["owner"] == "daemon"
                        assert entry["enabled"] is False, "as it was when it was written last"
            finally:
                child.send(signal.SIGTERM)
                child.child.wait(20)
                child.end()


def test_the_environment_disarms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_CONSOLE_DISARM", "1")
    with socket_directory() as place:
        daemon = Daemon(options_for(None, f"unix:{place}/d.sock"))
        try:
            session = daemon.service.sessions.open("me", lease=False)
            for verb in (
                lambda: daemon.service.sessions.set(session, BreakpointSpec()),
                lambda: daemon.service.sessions.freeze(session, 10**9),
                lambda: daemon.service.sessions.run_for(session, 10**9, 10**9),
            ):
                with pytest.raises(Refused, match="KVBM_CONSOLE_DISARM is set"):
                    verb()
        finally:
            daemon.endpoint.close()


def test_a_file_of_breakpoints_that_is_wrong_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    for text, says in (
        ("{", "not a file of breakpoints"),
        ('{"breakpoints": [{"to_state": "nowhere"}]}', "breakpoint 1: to_state must be"),
        ('{"breakpoints": [{"condition": "tokns > 1"}]}', "breakpoint 1: condition, column 1"),
        ('{"breakpoints": [{"colour": "red"}]}', "colour is no key of a breakpoint"), ('{"points": []}', "only key"),
        ('{"breakpoints": [{"id": 1, "depends_on": 2}, {"id": 2, "depends_on": 1}]}', "depends on itself"),
    ):
        file.write_text(text)
        done = run(tmp_path, "serve", "--breakpoints", str(file), "--listen", f"unix:{tmp_path}/d.sock")
        assert done.returncode == 2
        assert says in done.stderr
        assert str(file) in done.stderr
