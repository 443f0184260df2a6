"""A publisher in a process of its own, as engines have it: PUB, and a ROUTER that repeats what its buffer holds.

It obeys lines of JSON on stdin and answers each with a line on stdout. With ``topic_in_replay`` it answers in the
framing of newer engines, else in that of older ones. ``fault`` breaks each replay after the first: ``end`` leaves
the end marker out, ``hole`` the second message, and ``bytes`` changes the first message.

Law of this file: it shares no code with the program; it writes the wire by hand.
"""

import json
import sys
import threading
from collections import deque

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def serve(settings: dict) -> None:
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.set_hwm(settings.get("hwm", 1_000))
    pub.setsockopt(zmq.LINGER, 0)
    if settings.get("connect"):
        pub.connect(settings["connect"])
        port = 0
    else:
        port = bind(pub, settings.get("port"))
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    replay_port = bind(router, settings.get("replay_port"))
    inbox = context.socket(zmq.PULL)
    inbox.bind("inproc://commands")
    threading.Thread(target=read_commands, args=(context,), daemon=True).start()
    topic = settings.get("topic", "kv").encode()
    buffer: deque = deque(maxlen=settings.get("buffer", 10_000))
    seq = settings.get("first_seq", 0)
    replays = 0
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(router, zmq.POLLIN)
    say({"port": port, "replay_port": replay_port})
    while True:
        ready = dict(poller.poll())
        if router in ready:
            client, _, start = router.recv_multipart()
            head = [topic] if settings.get("topic_in_replay") else []
            replays += 1
            fault = settings.get("fault") if replays > 1 else None
            asked = [(number, payload) for number, payload in buffer if number >= int.from_bytes(start, "big")]
            for at, (number, payload) in enumerate(asked):
                if fault == "bytes" and at == 0:
                    payload += b"\xc0"
                if fault != "hole" or at != 1:
                    router.send_multipart([client, b"", *head, number.to_bytes(8, "big"), payload])
            if fault != "end":
                router.send_multipart([client, b"", *head, END, b""])
        if inbox in ready:
            command = json.loads(inbox.recv())
            if command["do"] == "end":
                return
            for events in command["batches"] * command.get("times", 1):
                payload = bytes.fromhex(events) if isinstance(events, str) else msgspec.msgpack.encode([1.0, events, 0])
                if command["do"] == "publish":
                    pub.send_multipart([topic, seq.to_bytes(8, "big"), payload])
                buffer.append((seq, payload))
                seq += 1
            say({"next": seq})


def bind(socket: zmq.Socket, port: int | None) -> int:
    if port is None:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


def read_commands(context: zmq.Context) -> None:
    out = context.socket(zmq.PUSH)
    out.connect("inproc://commands")
    for line in sys.stdin:
        out.send(line.encode())
    out.send(b'{"do": "end"}')


def say(what: dict) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
