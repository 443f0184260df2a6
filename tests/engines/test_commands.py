"""The commands on captures and on a publisher in another process, as a user types them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.cli.streams import import_capture
from kvbm_console.core.errors import UsageError
from kvbm_console.engines.kv_events.capture import CaptureFrame, pack_frame
from kvbm_console.recording.reader import Recording
from kvbm_console.recording.verify import verify
from tests.engines.payloads import batch, cleared, removed, stored
from tests.engines.test_captures import KEPT, NAMES
from tests.engines.test_stream import facts_of
from tests.engines.test_zmq_source import Engine

PROGRAM = [sys.executable, "-c", "from kvbm_console.cli.main import main; main()"]


def write_capture(path: Path, *payloads: bytes, first: int = 0) -> Path:
    """A capture with one frame a second."""
    frames = [CaptureFrame(1_000.0 + at, b"kv", first + at, payload) for at, payload in enumerate(payloads)]
    path.write_bytes(b"".join(map(pack_frame, frames)))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_becomes_a_recording_that_verifies(tmp_path: Path, name: str) -> None:
    found = import_capture(KEPT / f"{name}.bin", tmp_path / "out")
    assert (found.unknown_events, found.malformed_events, found.bad_payloads, found.lost_batches) == (0, 0, 0, 0)
    report = verify(tmp_path / "out")
    assert (report.ok, report.gaps, report.not_rerun) == (True, 0, 0)
    assert report.events == found.events > 0


def test_a_capture_with_every_fault_becomes_a_recording_that_verifies(tmp_path: Path) -> None:
    path = write_capture(
        tmp_path / "frames.bin", batch(stored(1, 2), stored(2, medium="TAPE")), b"garbage", batch({"type": "New"}),
        batch(stored(3), removed(3), stored(3)),
        batch(["BlockStored", [bytes(32)], None, [], 0, None, "CPU"], dp_rank=1),
        batch(cleared()), batch(stored(7)), first=4,
    )
    with path.open("ab") as file:
        file.write(pack_frame(CaptureFrame(2_000.0, b"kv", 0, batch(stored(9)))))
        file.write(pack_frame(CaptureFrame(float("nan"), b"kv", 9, batch(stored(10)))))
    found = import_capture(path, tmp_path / "out")
    assert (found.publishers, found.frames, found.unknown_events, found.bad_payloads) == (2, 9, 1, 1)
    assert (found.restarts, found.resident_blocks) == (1, {"GPU": 2, "TAPE": 0, "CPU": 1})
    report = verify(tmp_path / "out")
    assert report.ok, report.first_difference
    recording = Recording.open(tmp_path / "out")
    state = recording.state_at(recording.last_seq)
    assert facts_of(state)[(0, 0, "GPU")] == {9: 1, 10: 1}
    assert state.at_ns == 1_000 * 10**9
    assert set(state.lost_sources) == {1, 2}


def test_an_import_refuses_what_is_no_capture_and_a_full_directory(tmp_path: Path) -> None:
    path = tmp_path / "frames.bin"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="holds no frame"):
        import_capture(path, tmp_path / "out")
    path.write_bytes(os.urandom(64))
    with pytest.raises(UsageError, match="no capture of KV events"):
        import_capture(path, tmp_path / "out")
    write_capture(path, batch(stored(1)))
    with pytest.raises(UsageError, match="is not empty"):
        import_capture(path, tmp_path)


def test_import_prints_its_document(tmp_path: Path) -> None:
    path = write_capture(tmp_path / "frames.bin", batch(stored(1)))
    result = CliRunner().invoke(
        cli, ["rec", "import", "kv-events", str(path), "--out", str(tmp_path / "out"), "--format", "json"],
        standalone_mode=False,
    )
    assert json.loads(result.stdout)["resident_blocks"] == {"GPU": 1}


def test_doctor_and_why_say_what_a_stream_cannot_tell(tmp_path: Path) -> None:
    import_capture(write_capture(tmp_path / "frames.bin", batch(stored(1)), b"garbage"), tmp_path / "out")
    doctor = run("doctor", str(tmp_path / "out"))
    assert (doctor.returncode, "1 gap in its reports" in doctor.stdout) == (1, True), doctor
    why = run("why", "someone", str(tmp_path / "out"))
    assert (why.returncode, "names blocks and no requests" in why.stderr) == (3, True), why


# --- with a publisher ---


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.end()


def address(engine: Engine) -> str:
    return f"zmq://127.0.0.1:{engine.port}?replay={engine.replay_port}&topic=kv"


def run(*words: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_capture_then_import_then_verify(engine: Engine, tmp_path: Path) -> None:
    engine.publish([stored(1, 2)], [stored(1, medium="CPU")], [removed(2)])
    made = run("rec", "capture", address(engine), "--out", str(tmp_path / "c"), "--batches", "3")
    assert made.returncode == 0, made.stderr
    assert "3 frames" in made.stdout
    assert "CPU 1, GPU 1 resident" in made.stdout
    again = run("rec", "import", "kv-events", str(tmp_path / "c"), "--out", str(tmp_path / "r"))
    assert again.returncode == 0, again.stderr
    assert verify(tmp_path / "r").ok


def test_attach_without_a_terminal_prints_lines(engine: Engine) -> None:
    engine.publish([stored(1, 2, 3)])
    found = run("attach", address(engine), "--seconds", "2")
    assert found.returncode == 0, found.stderr
    assert "blocks: GPU 3  evicted 0" in found.stdout


def test_attach_to_nothing_is_one_sentence() -> None:
    found = run("attach", "http://127.0.0.1:1")
    assert (found.returncode, found.stderr.count("\n")) == (3, 1)
    assert "does not answer" in found.stderr


def test_serve_waits_for_an_engine_that_is_not_up_yet(engine: Engine, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    process = subprocess.Popen(
        [*PROGRAM, "serve", "--listen", f"unix:{tmp_path}/d.sock", "--engine", f"http://127.0.0.1:{port}"],
        stderr=subprocess.PIPE, text=True,
    )
    try:
        assert process.stderr is not None
        assert "asking again" in process.stderr.readline()
        sources = json.dumps({"0": {"endpoint": f"tcp://127.0.0.1:{engine.port}"}}).encode()

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(sources)

        server = HTTPServer(("127.0.0.1", port), Answers)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert "serving on" in process.stderr.readline()
        server.shutdown()
        server.server_close()
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``serve`` and waits until it can be connected to."""
    made: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PROGRAM, "serve", "--listen", f"unix:{tmp_path}/d.sock", *words], stderr=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        made.append(process)
        assert process.stderr is not None
        assert "serving on" in process.stderr.readline()
        return process

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process: "subprocess.Popen[str]") -> str:
    """SIGTERM, and a clean end; its summary."""
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    return out


def status_until(socket_path: str, true: Callable[[Any], bool]) -> Any:
    """The first status document of which something is true."""
    for _ in range(60):
        document = json.loads(run("status", "--target", socket_path, "--format", "json").stdout)
        if true(document):
            return document
    raise AssertionError(document)


def test_serve_follows_records_and_marks_doubt(
    engine: Engine, daemon: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    engine.publish([stored(1, 2)], [stored(1, medium="CPU")])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = daemon(
        "--engine", address(engine).replace("zmq://", "zmq:"), "--record", str(tmp_path / "r"),
        "--metrics", f"127.0.0.1:{port}",
    )
    target = f"unix:{tmp_path}/d.sock"
    known = status_until(target, lambda found: found["tiers"]["g2"]["resident_blocks"] == 1)
    assert known["tiers"]["g1"]["resident_blocks"] == 2
    assert not known["tiers"]["g1"]["uncertain"]
    engine.publish("ff")
    doubtful = status_until(target, lambda found: found["tiers"]["g1"]["uncertain"])
    assert doubtful["tiers"]["g2"]["uncertain"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'kvbm_stream_bad_payloads_total{source="1"' in text
    summary = end(process)
    assert "requests    unknown: an event stream names none" in summary
    assert not {"hits", "slots", "candidates"} & {line.split()[0] for line in summary.splitlines()}
    assert verify(tmp_path / "r").ok


def test_shards_follow_each_publisher_once(
    engines: Callable[..., Engine], daemon: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Daemons with the same addresses divide the publishers, and a fleet shows all of them."""
    published = [engines() for _ in range(3)]
    for blocks, one in enumerate(published, start=1):
        one.publish([stored(*range(10 * blocks, 11 * blocks))])
    addresses = [word for one in published for word in ("--engine", address(one))]
    targets = [f"unix:{tmp_path}/{part}.sock" for part in (1, 2)]
    for part, target in enumerate(targets, start=1):
        daemon("--listen", target, "--shard", f"{part}/2", *addresses)
    for target, blocks in zip(targets, (1 + 3, 2), strict=True):
        found = status_until(target, lambda found, blocks=blocks: found["tiers"]["g1"]["resident_blocks"] == blocks)
        assert len(found["publishers"]) == (blocks + 1) // 2
    fleet = json.loads(run("fleet", *targets, "--format", "json").stdout)
    assert {row["target"] for row in fleet["daemons"]} == set(targets)


def test_serve_refuses_a_shard_that_there_is_not() -> None:
    one = ("--engine", "zmq:127.0.0.1:1?ranks=2")
    for words, said in (
        ((*one, "--shard", "3/2"), "K/N"), ((*one, "--shard", "0/2"), "K/N"), ((*one, "--shard", "2"), "K/N"),
        ((*one, "--shard", "1/3"), "at most 2 parts"), (("--shard", "1/2"), "--shard needs --engine"),
    ):
        found = run("serve", *words)
        assert found.returncode == 2
        assert said in found.stderr.strip().splitlines()[-1]


def test_without_the_extra_captures_are_read_and_streams_are_refused_in_one_sentence(tmp_path: Path) -> None:
    program = "import sys; sys.modules['zmq'] = None; from kvbm_console.cli.main import main; main()"
    path = write_capture(tmp_path / "frames.bin", batch(stored(1)))
    for words, status, said in (
        (["rec", "import", "kv-events", str(path), "--out", str(tmp_path / "out")], 0, ""),
        (["serve", "--engine", "zmq:127.0.0.1:1", "--listen", f"unix:{tmp_path}/d.sock"], 2, "kvbm-console[engines]"),
        (["rec", "capture", "zmq:127.0.0.1:1", "--out", str(tmp_path / "c")], 2, "kvbm-console[engines]"),
    ):
        found = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=30, check=False
        )
        assert (found.returncode, len(found.stderr.splitlines()) <= 1) == (status, True), found
        assert said in found.stderr


def test_serve_refuses_a_bad_engine_address() -> None:
    for words in (["--engine", "zmq:h"], ["--engine", "zmq:h:1", "--workload", "multiturn"]):
        found = run("serve", *words)
        assert found.returncode == 2
        assert len(found.stderr.strip().splitlines()) <= 1
