"""The image and the pod of ``deploy/``, built and run by podman. Run by ``make images``.

The engine in the pod is vLLM's real API server with a made-up device (``standin``). The pod's mechanism can be seen
without vLLM's own image and without a GPU.

Law of this file: nothing waits for time. A container is ready when it says so, and an event is read from ``tail``.
"""

import json
import os
import signal
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any, Final

import pytest
import yaml

from kvbm_console import __version__
from tests.deploy.pod import NAME, STAND_IN_IMAGE, pod
from tests.server.daemons import certificate_in

ROOT: Final = Path(__file__).resolve().parents[2]
BASE: Final = "docker.io/library/python:3.12-slim-bookworm"
IMAGE: Final = f"kvbm-console:{__version__}"
ENGINES: Final = ROOT / ".venv-vllm" / "bin" / "python"
USER: Final = "10001"
CONSOLE, ENGINE = f"{NAME}-console", f"{NAME}-vllm"
PORTS: Final = {"http": 18_000, "metrics": 19_464}
TOKEN: Final = "a-token-of-the-test-with-32-characters"
PROMPT: Final = " ".join(f"w{number}" for number in range(2, 60))
"""58 tokens of the engine's vocabulary: three whole blocks."""
ANSWER_S: Final = 300
"""Far beyond what an answer takes."""

pytestmark = [
    pytest.mark.timeout(1_200),
    pytest.mark.skipif("KVBM_IMAGES" not in os.environ or which("podman") is None, reason="make images runs these"),
]


def podman(*arguments: str) -> str:
    """The output of a command of podman that succeeds."""
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


def printed(container: str, text: str, times: int = 1) -> None:
    """Until the container has printed so many lines with this text, restarts included."""
    follow = subprocess.Popen(
        ["podman", "logs", "--follow", container], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines, found = [], 0
    try:
        assert follow.stdout is not None
        for line in follow.stdout:
            lines.append(line)
            found += text in line
            if found == times:
                return None
    finally:
        follow.kill()
        follow.communicate()
    if found:  # podman ends the log while a killed container is about to start again
        podman("wait", "--condition", "running", container)
        return printed(container, text, times)
    raise AssertionError(f"{container} did not print {text!r}:\n{''.join(lines)}")


@pytest.fixture(scope="module")
def image() -> str:
    """The image, built by the command of docs/deploying.md."""
    there, pulled = (["podman", *command, BASE] for command in (("image", "exists"), ("pull", "--quiet")))
    if subprocess.run(there, check=False).returncode and subprocess.run(pulled, check=False).returncode:
        python = which("python3.12")
        assert python, "no registry of images is reached, and no python3.12 is there to make a base image from"
        subprocess.run([ROOT / "tests" / "deploy" / "base.sh", python], check=True)
    podman("build", "--format", "docker", "-f", "deploy/Containerfile", "-t", IMAGE, ".")
    return IMAGE


def test_the_image_has_the_program_and_its_demo(image: str) -> None:
    assert podman("run", "--rm", image, "--version").startswith(f"kvbm-console {__version__}, ")
    assert "hits " in podman("run", "--rm", "--read-only", image, "demo", "--seconds", "2")
    assert podman("run", "--rm", "--entrypoint", "id", image, "-u").strip() == USER


def test_a_read_only_container_serves_is_healthy_and_leaves_a_whole_recording(image: str) -> None:
    """The command at the top of the Containerfile."""
    name, volume = f"{NAME}-serve", f"{NAME}-serve-recordings"
    podman("run", "--detach", "--name", name, "--read-only", "--tmpfs", "/run/kvbm:U", "-v", f"{volume}:/recordings",
           image, "serve", "--listen", "unix:/run/kvbm/kvbm.sock", "--record", "/recordings/run")
    try:
        printed(name, "serving on")
        assert podman("exec", name, "kvbm-console", "status", "--health") == "serving\n"
        podman("healthcheck", "run", name)
        podman("stop", "--time", "60", name)
        said = podman("run", "--rm", "-v", f"{volume}:/recordings", image, "rec", "verify", "/recordings/run")
        assert "equal" in said, said
    finally:
        podman("rm", "--force", "--time", "0", name)
        podman("volume", "rm", "--force", volume)


# --- the pod ---


@pytest.fixture(scope="module")
def running(image: str) -> Iterator[Path]:
    """The pod of the manifests, whose engine has started; the certificate of its metrics."""
    if not ENGINES.exists():
        pytest.skip("the pod needs the environment of make test-vllm")
    with tempfile.TemporaryDirectory() as place:
        context, secret, file = (Path(place, name) for name in ("context", "secret", "pod.yaml"))
        context.mkdir()
        secret.mkdir(mode=0o755)
        Path(place).chmod(0o755)
        mounts = stand_in(context)
        certificate = make_secret(secret)
        file.write_text(yaml.safe_dump(pod(mounts, str(secret), PORTS)), encoding="utf-8")
        before = volumes()
        try:
            podman("play", "kube", str(file))
            printed(ENGINE, "Application startup complete")
            yield certificate
        finally:
            podman("pod", "rm", "--force", "--time", "0", NAME)
            for volume in volumes() - before:  # also those without a name, which containers of the pod leave behind
                subprocess.run(["podman", "volume", "rm", volume], check=False)
            podman("rmi", "--force", STAND_IN_IMAGE)


def volumes() -> set[str]:
    return set(podman("volume", "ls", "--quiet").split())


def stand_in(context: Path) -> dict[str, str]:
    """Build the engine's image; the directories that its containers mount."""
    made = subprocess.run(
        [ENGINES, "-W", "ignore", "-m", "tests.deploy.standin", context], stdout=subprocess.PIPE, text=True, check=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    podman("build", "--tag", STAND_IN_IMAGE, str(context))
    return json.loads(made.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def make_secret(place: Path) -> Path:
    """The files of the secret, readable by the pod's group as a volume of Kubernetes is."""
    certificate, key = certificate_in(place)
    certificate.rename(place / "tls.crt")
    key.rename(place / "tls.key")
    (place / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    for file in place.iterdir():
        os.chown(file, -1, int(USER))
        file.chmod(0o440)
    return place / "tls.crt"


def complete(name: str) -> dict[str, Any]:
    """One completion, as any program would ask for it."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{PORTS['http']}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": name},
    )
    with urllib.request.urlopen(asked, timeout=ANSWER_S) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def console(*arguments: str) -> str:
    return podman("exec", CONSOLE, "kvbm-console", *arguments)


def seen(kind: str) -> None:
    """Until this daemon has an event of this kind."""
    console("tail", "--format", "jsonl", "--since", "0", "--filter", f"kind = {kind}", "--count", "1")


def host_process(container: str) -> int:
    return int(podman("inspect", container, "--format", "{{.State.Pid}}"))


def test_both_containers_run_with_the_hardening_of_the_manifests(running: Path) -> None:
    for container in (ENGINE, CONSOLE):
        lines = Path(f"/proc/{host_process(container)}/status").read_text(encoding="utf-8").splitlines()
        found = {name: words.split() for name, _, words in (line.partition(":") for line in lines)}
        assert (found["Uid"], found["Gid"]) == ([USER] * 4, [USER] * 4)
        assert (found["NoNewPrivs"], found["Seccomp"], int(found["CapBnd"][0], 16)) == (["1"], ["2"], 0)
    assert podman("inspect", CONSOLE, "--format", "{{.HostConfig.ReadonlyRootfs}}") == "true\n"


def test_a_request_over_http_is_seen_by_the_daemon_beside_the_engine(running: Path) -> None:
    """The init container brought the tap, vLLM's plugins found it on PYTHONPATH, and it reached the shared socket."""
    answered = complete("seen")
    assert len(answered["choices"][0]["text"].split()) == 4
    seen("SlotClosed")
    told = json.loads(console("status", "--format", "json"))
    (engine,) = told["engines"]
    assert (engine["name"], engine["errors"], engine["dropped"]) == ("vLLM rank 0", 0, 0)
    assert told["tiers"]["g1"]["lookups"] == 3
    assert told["recorder"]["state"] == "recording"
    assert "cmpl-seen-0-" in console("why", "cmpl-seen-0")


def test_metrics_leave_the_pod_over_tls_to_who_has_the_token(running: Path) -> None:
    url = f"https://127.0.0.1:{PORTS['metrics']}/metrics"
    trust = ssl.create_default_context(cafile=str(running))
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(asked, timeout=60, context=trust) as answer:
        assert b"kvbm_tier_capacity_blocks" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=60, context=trust)


def test_the_engine_answers_while_the_console_is_killed_and_comes_back(running: Path) -> None:
    os.kill(host_process(CONSOLE), signal.SIGKILL)
    complete("meanwhile")
    printed(CONSOLE, "serving on", times=2)
    seen("PoolKnown")  # the engine's tap has found the daemon again
    complete("afterwards")
    seen("SlotClosed")
    assert podman("inspect", ENGINE, "--format", "{{.RestartCount}}") == "0\n"


def test_the_recordings_in_the_volume_are_whole(running: Path, image: str) -> None:
    podman("stop", "--time", "60", CONSOLE)
    volume = f"{NAME}-recordings:/recordings"
    assert podman("run", "--rm", "-v", volume, image, "rec", "verify", "/recordings/run").count("equal") == 2
