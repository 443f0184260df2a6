"""``python -m tests.benchmarks.publishers 256``: daemons follow so many publishers, and lose nothing.

Each publisher has a ZeroMQ socket of its own and sends 106 batches a second, the rate of ai-dynamo/dynamo#14167. All of
them live in one process, which shares no code with the daemons. A batch is a step of an engine whose cache is full: it
stores four blocks and removes four others. The daemons are the command, each with its ``--shard``.

At the end the batches that daemons took, and those that they state as lost, are compared with those that were sent.
The rest is unexplained. The blocks that are left are compared with those that the publishers left, too. The exit status
is 1 if any batch is lost or unexplained, or a block is wrong. Options: ``--rate``, ``--seconds``, ``--shards``.

The reference receives the same batches again in a process that decodes them with ``msgspec`` and does nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

PROGRAM: Final = [sys.executable, "-P", "-c", "from kvbm_console.cli.main import main; main()"]
FIRST_PORT: Final = 12_000
RANKS: Final = 64
"""Publishers of one address."""
STEPS: Final = 256
"""Different steps; each removes what was stored half of them earlier."""
BLOCKS: Final = 4
"""A step of 64 requests fills a block of 16 tokens for four of them."""
TOKENS: Final = 16
RESIDENT: Final = STEPS // 2 * BLOCKS
TICK_S: Final = 0.002
SETTLE_S: Final = 1.0
"""A subscription follows the handshake."""
WAIT_S: Final = 300.0
REFERENCE_S: Final = 30.0
"""The longest time of the reference, whose figure is that of a batch."""
FULL: Final = 2_048
"""Publishers of the report."""


# --- the publishers' process ---


def _hashes(step: int) -> list[int]:
    return [1 + BLOCKS * step + at for at in range(BLOCKS)]


def _stored(step: int) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": _hashes(step), "parent_block_hash": None,
        "token_ids": list(range(TOKENS * BLOCKS)), "block_size": TOKENS, "lora_id": None, "medium": "GPU",
    }


def _payloads() -> tuple[bytes, list[bytes]]:
    """The first message, which fills the cache, and the steps."""
    begin = [_stored(step) for step in range(STEPS // 2, STEPS)]
    steps = []
    for step in range(STEPS):
        gone = [{"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"}
                for key in _hashes((step + STEPS // 2) % STEPS)]
        steps.append(msgspec.msgpack.encode([1.0, [*gone, _stored(step)], 0]))
    return msgspec.msgpack.encode([1.0, begin, 0]), steps


def publish(count: int, rate: float, seconds: float) -> None:
    """Bind, wait for a line, publish, and print how many messages were sent by how late a pace."""
    context = zmq.Context(io_threads=1)
    context.max_sockets = count + 16
    sockets = []
    for at in range(count):
        socket = context.socket(zmq.PUB)
        socket.set_hwm(100_000)  # as vLLM's
        socket.bind(f"tcp://127.0.0.1:{FIRST_PORT + at}")
        sockets.append(socket)
    print("ready", flush=True)
    begin, steps = _payloads()
    sys.stdin.readline()
    for socket in sockets:
        socket.send_multipart([b"kv", bytes(8), begin])
    began, sent, late_s, total = time.monotonic(), 0, 0.0, round(count * rate * seconds)
    while sent < total:
        due = min(total, int((time.monotonic() - began) * count * rate))
        late_s = max(late_s, (due - sent) / (count * rate))
        for number in range(sent, due):
            round_, at = divmod(number, count)
            sockets[at].send_multipart([b"kv", (round_ + 1).to_bytes(8, "big"), steps[round_ % STEPS]])
        sent = due
        time.sleep(TICK_S)
    print(json.dumps({"sent": total + count, "late_s": late_s, "took_s": time.monotonic() - began}), flush=True)
    sys.stdin.readline()
    context.destroy(linger=0)


# --- the reference ---


def decode(count: int, total: int) -> None:
    """Connect to all publishers, print a line, decode ``total`` messages, and print the seconds of processor."""
    context = zmq.Context(io_threads=1)
    context.max_sockets = count + 16
    socket = context.socket(zmq.SUB)
    socket.set_hwm(0)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.subscribe(b"")
    for at in range(count):
        socket.connect(f"tcp://127.0.0.1:{FIRST_PORT + at}")
    for _ in range(count):
        recv_monitor_message(monitor)
    socket.disable_monitor()
    print("ready", flush=True)
    began_s, take = time.process_time(), msgspec.msgpack.Decoder().decode
    for _ in range(total):
        frame = socket.recv(copy=False)
        while frame.more:  # as the daemon does it: half the time of ``recv_multipart``
            frame = socket.recv(copy=False)
        take(frame.bytes)
    print(time.process_time() - began_s, flush=True)
    context.destroy(linger=0)


def reference(count: int, rate: float, seconds: float, daemons_us: float) -> None:
    """Measure what sending, and receiving and decoding alone take, and print it beside ``daemons_us`` a batch."""
    total = round(count * rate * seconds) + count
    publisher = _publisher(count, rate, seconds)
    reader = subprocess.Popen([sys.executable, "-m", __spec__.name, str(count), "--decode", str(total)],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert publisher.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        time.sleep(SETTLE_S)
        before = _busy_s(publisher)
        publisher.stdin.write("\n")
        publisher.stdin.flush()
        read_us = 1e6 * float(reader.stdout.readline()) / total
        sent_us = 1e6 * (_busy_s(publisher) - before) / total
    finally:
        for process in (reader, publisher):
            process.kill()
            process.wait()
    cores = FULL * rate / 1e6
    print(f"reference: sending takes {sent_us:.1f} us of processor a batch, receiving and decoding alone "
          f"{read_us:.1f}; {FULL:,} publishers at {rate:g} a second need {cores * sent_us:.1f} and "
          f"{cores * read_us:.1f} such cores for that; the daemons take {daemons_us / read_us:.1f} times as much as "
          "decoding alone", flush=True)


# --- the daemons ---


def _status(target: str) -> dict[str, Any]:
    found = subprocess.run(
        [*PROGRAM, "status", "--target", target, "--format", "json"], capture_output=True, text=True, check=False
    )
    return json.loads(found.stdout) if found.stdout else {}


def _until(target: str, condition: Any) -> dict[str, Any]:
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        found = _status(target)
        if found and condition(found):
            return found
        time.sleep(0.5)
    return _status(target)


def _most_mb(process: "subprocess.Popen[Any]") -> float:
    """The most memory of a process so far."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1e3


def _busy_s(process: "subprocess.Popen[Any]") -> float:
    """Seconds of processor so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _publisher(count: int, rate: float, seconds: float) -> "subprocess.Popen[str]":
    """The publishers' process, bound and waiting for a line."""
    publisher = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, str(count), "--publish", "--rate", str(rate), "--seconds", str(seconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert publisher.stdout is not None
    assert publisher.stdout.readline() == "ready\n"
    return publisher


def measure(count: int, rate: float, seconds: float, shards: int, place: Path) -> tuple[bool, float]:
    """Publish, follow, print; True if every batch and block is accounted for, and microseconds of processor a batch."""
    publisher = _publisher(count, rate, seconds)
    assert publisher.stdin is not None
    assert publisher.stdout is not None
    addresses = [
        f"zmq:127.0.0.1:{FIRST_PORT + first}?ranks={min(RANKS, count - first)}" for first in range(0, count, RANKS)
    ]
    targets = [f"unix:{place}/{shard}.sock" for shard in range(1, shards + 1)]
    daemons = [
        subprocess.Popen([
            *PROGRAM, "serve", "--listen", target, "--shard", f"{shard}/{shards}",
            *(word for address in addresses for word in ("--engine", address)),
        ], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for shard, target in enumerate(targets, 1)
    ]
    try:
        for target in targets:
            found = _until(target, lambda found: all(row["connected"] for row in found["publishers"]))
            assert found, f"no daemon answers on {target}"
        time.sleep(SETTLE_S)
        before = [_busy_s(daemon) for daemon in daemons]
        publisher.stdin.write("\n")
        publisher.stdin.flush()
        began = time.monotonic()
        told = json.loads(publisher.stdout.readline())
        kept = _compare(targets, told, count)
        took_s = time.monotonic() - began
        busy = [_busy_s(daemon) - earlier for daemon, earlier in zip(daemons, before, strict=True)]
        for shard, (daemon, busy_s) in enumerate(zip(daemons, busy, strict=True), 1):
            batches = told["sent"] / shards
            each_us = 1e6 * busy_s / batches
            print(f"shard {shard}/{shards}: {batches / took_s:,.0f} batches a second, {busy_s / took_s:.0%} of a core, "
                  f"{_most_mb(daemon):,.0f} MB, "
                  f"{each_us:.1f} us of processor a batch; {FULL:,} publishers at {rate:g} a second need "
                  f"{FULL * rate * each_us / 1e6:.1f} such cores", flush=True)
        return kept, 1e6 * sum(busy) / told["sent"]
    finally:
        for process in (*daemons, publisher):
            process.kill()
            process.wait()


def _compare(targets: list[str], told: dict[str, Any], count: int) -> bool:
    """Print the batches that were sent, taken and stated as lost, and the blocks that are left."""
    ended, taken, lost, gaps, blocks = time.monotonic(), 0, 0, 0, 0
    for at, target in enumerate(targets):
        mine = len(range(at, count, len(targets)))
        due = sum(1 + (told["sent"] - count + count - 1 - number) // count for number in range(at, count, len(targets)))
        found = _until(target, lambda found, due=due: sum(
            row["batches"] + row["lost_batches"] for row in found["publishers"]) >= due)
        assert len(found["publishers"]) == mine
        taken += sum(row["batches"] for row in found["publishers"])
        lost += sum(row["lost_batches"] for row in found["publishers"])
        gaps += sum(row["gaps"] + row["restarts"] for row in found["publishers"])
        blocks += found["tiers"]["g1"]["resident_blocks"]
    print(f"{count:,} publishers, {told['sent'] / told['took_s']:,.0f} batches a second for {told['took_s']:.0f} s "
          f"(at most {told['late_s']:.2f} s late): {told['sent']:,} sent, {taken:,} taken, {lost:,} stated as lost in "
          f"{gaps:,} gaps, {told['sent'] - taken - lost:,} unexplained; {blocks:,} blocks of {count * RESIDENT:,}; all "
          f"there {time.monotonic() - ended:.1f} s after the last was sent", flush=True)
    return not lost and not gaps and told["sent"] == taken and blocks == count * RESIDENT


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("publishers", type=int)
    parser.add_argument("--rate", type=float, default=106.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--decode", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.publish:
        publish(asked.publishers, asked.rate, asked.seconds)
        return
    if asked.decode:
        decode(asked.publishers, asked.decode)
        return
    with tempfile.TemporaryDirectory(prefix="kvbm-") as scratch:
        kept, each_us = measure(asked.publishers, asked.rate, asked.seconds, asked.shards, Path(scratch))
    reference(asked.publishers, asked.rate, min(asked.seconds, REFERENCE_S), each_us)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
