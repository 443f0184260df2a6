"""The program as people install it: distributions, image, manifests, chart and unit say what is true.

Law of this file: a tool that is not there is a visible skip, and the arguments of the manifests start a real daemon.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from kvbm_console import __version__
from tests.cli.programs import DEADLINE_S, PROGRAM, environment, run
from tests.server.daemons import socket_directory

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
CHART: Final = DEPLOY / "helm" / "kvbm-console"
MANIFESTS: Final = DEPLOY / "kubernetes" / "vllm-with-console.yaml"
EXPOSURE_MAX: Final = 2.0
"""systemd's score of what a unit may do, from 0 (nothing) to 10."""


def documents() -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8")) if one]


def told(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_wheel_and_sdist_are_fit_for_an_index(tmp_path: Path) -> None:
    told(sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path))
    assert {path.suffix for path in tmp_path.iterdir()} == {".whl", ".gz"}
    said = told(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, tmp_path.iterdir()))
    assert said.count("PASSED") == 2


def test_chart_and_manifests_name_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
    assert {one["image"] for one in containers() if one["name"] != "vllm"} == {f"kvbm-console:{__version__}"}


# --- the image ---


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_runs_as_nobody_and_copies_what_exists() -> None:
    made = instructions()
    assert [words for word, words in made if word == "USER"] == ["10001:10001"]
    assert made.index(("USER", "10001:10001")) > max(at for at, (word, _) in enumerate(made) if word == "RUN")
    assert all(re.search(r":\d+\.\d+-slim-\w+( AS \w+)?$", words) for word, words in made if word == "FROM")
    assert not [words for word, words in made if word == "ADD" or "curl" in words or ":latest" in words]
    for word, words in made:
        if word == "COPY" and "--from" not in words:
            for source in words.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in (ROOT / ".containerignore").read_text().splitlines(), source
    check = next(words for word, words in made if word == "HEALTHCHECK")
    assert check.endswith('CMD ["kvbm-console", "status", "--health"]')


# --- Kubernetes ---


def test_every_manifest_is_valid_by_the_schemas() -> None:
    kinds = [one["kind"] for one in documents()]
    assert sorted(kinds) == ["Deployment", "NetworkPolicy", "Service", "ServiceMonitor"]
    for one in documents():
        if one["kind"] != "ServiceMonitor":  # a resource of Prometheus' operator
            kubernetes_validate.validate(one, "1.33", strict=True)


def containers() -> Iterator[dict[str, Any]]:
    pod = next(one for one in documents() if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    yield from (*pod["initContainers"], *pod["containers"])


def test_our_containers_may_write_only_to_their_volumes() -> None:
    for one in containers():
        allowed = one["securityContext"]
        assert allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"] == {"drop": ["ALL"]}
        assert one["name"] == "vllm" or allowed["readOnlyRootFilesystem"] is True
    by_name = {one["name"]: one for one in containers()}
    socket = {mount["mountPath"] for mount in by_name["vllm"]["volumeMounts"]}
    assert {"/tap", "/run/kvbm"} <= socket
    taps = {one["name"]: one["value"] for one in by_name["vllm"]["env"]}
    assert f"--listen={taps['KVBM_TAP']}" in by_name["console"]["args"]
    assert taps["PYTHONPATH"] == by_name["tap"]["command"][-1] == "/tap"


def rendered(**values: Any) -> str:
    """The manifests that Helm makes of the chart with these values: the program, or the same code as a library."""
    helm = which("helm")
    if helm is not None:
        told(helm, "lint", str(CHART))
        sets = [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
        return told(helm, "template", "demo", str(CHART), *sets)
    library = pytest.importorskip("helm_python", reason="needs helm or helm-python-sdk; make images has it")
    assert [found for found in library.lint(str(CHART))["messages"] if found["severity"] > 1] == []
    made = library.Config().render(library.Chart.load(str(CHART)), values, name="demo", is_install=True)
    sources = re.findall(r"^# Source: (\S+)", MANIFESTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, text in made.items() if text.strip()} <= set(sources)
    return "".join(f"---\n# Source: {name}\n{made[name].strip()}\n" for name in sources if made[name].strip())


def test_the_manifests_are_those_of_the_chart() -> None:
    assert rendered(metrics={"enabled": True}) == MANIFESTS.read_text(encoding="utf-8")
    least = list(yaml.safe_load_all(rendered()))
    assert sorted(one["kind"] for one in least if one) == ["Deployment", "NetworkPolicy", "Service"]


def test_the_chart_renders_an_engine_without_a_gpu() -> None:
    made = [one for one in yaml.safe_load_all(rendered(vllm={"resources": None})) if one]
    for one in made:
        kubernetes_validate.validate(one, "1.33", strict=True)
    assert "nvidia.com/gpu" not in json.dumps(made)


def daemon_arguments(source: str) -> list[str]:
    """The arguments of the daemon in the manifests or the unit."""
    if source == "manifests":
        arguments: list[str] = next(one for one in containers() if one["name"] == "console")["args"]
        return [word for word in arguments if not re.match(r"--(metrics|tls|token)", word)]
    text = (DEPLOY / "kvbm-console.service").read_text(encoding="utf-8")
    return [word for word in re.search(r"ExecStart=\S+ (.*)", text)[1].split()  # type: ignore[index]
            if word not in ("--metrics", "127.0.0.1:9464")]


@pytest.mark.parametrize("source", ["manifests", "unit"])
def test_the_arguments_start_a_daemon_that_a_probe_finds_healthy(source: str, tmp_path: Path) -> None:
    with socket_directory() as place:
        arguments = [
            re.sub(r"unix:\S+", f"unix:{place}/kvbm.sock", re.sub(r"/(recordings|var/lib/kvbm-console)/run",
                                                                  str(tmp_path / "run"), word))
            for word in daemon_arguments(source)
        ]
        target = f"unix:{place}/kvbm.sock"
        assert run(place, "status", "--health", "--target", target).returncode == 3
        daemon = subprocess.Popen([PROGRAM, *arguments], stderr=subprocess.PIPE, text=True, env=environment(place))
        try:
            assert daemon.stderr is not None
            assert "serving on" in daemon.stderr.readline()
            done = run(place, "status", "--health", "--target", target)
            assert (done.returncode, done.stdout) == (0, "serving\n")
        finally:
            daemon.terminate()
            daemon.communicate(timeout=20)
        assert list((tmp_path / "run").glob("*.mcap"))


# --- systemd ---


def test_the_unit_is_valid_and_may_do_little() -> None:
    analyze = which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    unit = DEPLOY / "kvbm-console.service"
    done = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert complaints == []
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)",
                      told(analyze, "security", "--offline=true", "--no-pager", str(unit)))
    assert score is not None
    assert float(score[1]) < EXPOSURE_MAX
