"""LMCache's own event log and gRPC server, followed by the commands. Run where LMCache is installed."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("needs lmcache: pip install --no-deps lmcache", allow_module_level=True)

from tests.vllm.serving import ROOT, free_ports

PROGRAM = str(Path(sys.executable).with_name("kvbm-console"))
CHUNK = 16
pytestmark = pytest.mark.timeout(300)


class Server:
    """The process; ``put`` publishes to its event bus."""

    def __init__(self, port: int, log: int = 1_000) -> None:
        self.port = port
        self.child = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/vllm/lmcache_server.py"), json.dumps({"port": port, "log": log})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        self._wait("ready")

    def _wait(self, word: str) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.strip() == word:
                return
        raise AssertionError("the server has ended")

    def put(self, *events: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(events) + "\n")
        self.child.stdin.flush()
        self._wait("ok")

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server(free_ports(1)[0])
    yield one
    one.end()


def chain(name: str, count: int) -> list[str]:
    """The hashes of a prompt's chunks."""
    return [hashlib.sha256(f"{name} {at}".encode()).hexdigest() for at in range(count)]


def stored(hashes: list[str]) -> Any:
    tokens = [[int(key[:4], 16) + at for at in range(CHUNK)] for key in hashes]
    return "stored", hashes, [None, *hashes[:-1]], tokens


def run(*words: str) -> Any:
    done = subprocess.run([PROGRAM, *words, "--format", "json"], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_its_log_is_captured_and_judged(server: Server, tmp_path: Path) -> None:
    prompts = [chain(name, 5) for name in "abc"]
    server.put(*(stored(prompt) for prompt in prompts), ("evicted", prompts[0][3:], [], []))
    address = f"lmcache://127.0.0.1:{server.port}?model=m"
    (found,) = run("rec", "capture", address, "--out", str(tmp_path / "capture"), "--seconds", "5")
    assert (found["resident_blocks"], found["unreadable"]) == ({"CPU": 13}, 0)
    (report,) = run("conform", address, "--seconds", "5")
    broken = {each["rule"] for each in report["verdicts"] if each["verdict"] == "fail"}
    assert (broken, report["stored_blocks"], report["removed_blocks"]) == (set(), 15, 2)


def test_a_log_that_has_lost_its_beginning_leaves_doubt(tmp_path: Path) -> None:
    one = Server(free_ports(1)[0], log=4)
    try:
        one.put(stored(chain("a", 9)))
        made, address = tmp_path / "made", f"lmcache://127.0.0.1:{one.port}?model=m"
        run("rec", "capture", address, "--out", str(tmp_path / "lost"), "--seconds", "5")
        run("rec", "import", "kv-events", str(tmp_path / "lost"), "--out", str(made))
        doctor = subprocess.run([PROGRAM, "doctor", made], capture_output=True, text=True, timeout=120)
        assert "gap in its reports" in doctor.stdout
    finally:
        one.end()
