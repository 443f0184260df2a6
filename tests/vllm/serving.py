"""Engines as real processes, for tests that speak HTTP to them: a model that is only a configuration and a word list.

Law of this file: nothing is downloaded, and who waits waits for a line that the process prints.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.vllm.engine import MODEL
from tests.vllm.executor import WORDS

POLL_S = 0.02
ROOT = Path(__file__).resolve().parents[2]
CONFIG = {**MODEL, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 1}


def make_model(directory: Path) -> Path:
    """A model without weights whose words are its tokens: ``w7`` is the token 7."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    words = {"<unk>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>",
         "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}"}
    ))
    return directory


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened at a moment ago, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class Engine:
    """A process whose output is kept, and waited for."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.lines: list[str] = []
        self._more = threading.Condition()
        self.child = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()
        with self._more:
            self.lines.append("")
            self._more.notify_all()

    def printed(self, text: str) -> None:
        """Until it has printed this; its whole output if it ends before."""
        with self._more:
            at = 0
            while True:
                for line in self.lines[at:]:
                    assert line, "the engine has ended:\n" + "".join(self.lines)
                    if text in line:
                        return
                at = len(self.lines)
                self._more.wait()

    def end(self) -> None:
        """In order if it can, and all that it started."""
        if self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self._reader.join()
        assert self.child.stdout is not None
        self.child.stdout.close()


@contextmanager
def engine(*arguments: str, ready: str, **environment: str) -> Iterator[Engine]:
    """A process that has said that it is ready, and ends with the block."""
    started = Engine(*arguments, **environment)
    try:
        started.printed(ready)
        yield started
    finally:
        started.end()


def ask(request: Any, timeout_s: float) -> Any:
    """A server's answer, once it listens: vLLM says that its start is complete just before."""
    while True:
        try:
            return urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(POLL_S)


def get(url: str) -> str:
    """What a server answers."""
    with ask(url, 60) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def complete(url: str, name: str, prompt: list[int], output: int) -> dict[str, Any]:
    """One completion, as any program would ask for it."""
    body = {"model": "m", "prompt": " ".join(f"w{one}" for one in prompt), "max_tokens": output, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "X-Request-Id": name}
    )
    try:
        with ask(asked, 120) as answer:
            return json.load(answer)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None


def words(text: str) -> list[int]:
    """The tokens of a text."""
    return [int(word.removeprefix("w")) for word in text.split()]
