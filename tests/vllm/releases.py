"""Explores releases of vLLM that had published bugs, and writes the table of ``explore``'s reference.

``python -m tests.vllm.releases [RELEASE ...]`` in the environment of ``make test-vllm``. Each release, or those that
are named, is installed without its requirements into ``.releases/`` once, and stands in front of the installed one.
A release takes 20 to 180 MB without its libraries for GPUs.

Law of this file: a row is printed only for a signature that this run has found.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
RELEASES: Final = ROOT / ".releases"
OFFLOADING: Final = '{"kv_connector": "OffloadingConnector"}'
ANSWERS: Final = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"offload_prompt_only": false}}'
SIMPLE: Final = '{"kv_connector": "SimpleCPUOffloadConnector"}'
THREADS: Final = (
    ("0.22.0", "hits", "loaded request that is not scheduled", "#45388", OFFLOADING),
    ("0.22.0", "reset", "no leak: OffloadingConnectorScheduler._req_status", "#48102", OFFLOADING),
    ("0.26.0", "abort", "AssertionError in scheduler._build_store_jobs", "#49118", OFFLOADING),
    ("0.26.0", "press", "device events", "#54325", SIMPLE),
    ("0.29.0", "hits", "loaded request that is not scheduled", "#57841", OFFLOADING),
    ("0.29.0", "chat", "incomplete block", "#54193", ANSWERS),
    ("0.22.0", "reset", "torn store", "", OFFLOADING),
    ("0.23.0", "reset", "torn store", "", OFFLOADING),
    ("0.29.0", "reset", "AssertionError in scheduler.build_connector_meta", "", OFFLOADING),
)
"""Release, profile, part of the signature, the thread of vllm-project/vllm that describes it, and the connector."""
CHUNKS: Final = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": 64}}'
NIXL: Final = '{"kv_connector": "NixlConnector"}'
NEWEST: Final = (
    ("reset", SIMPLE), ("failures", OFFLOADING), ("hybrid", NIXL), ("hybrid", CHUNKS),
)
"""Profiles and connectors with findings in the installed release, for which no thread was found."""
SEEDS: Final = "0:300"
LIBRARY_MAX: Final = 2**20
"""Bytes above which a shared library is for GPUs, which nothing here has."""


def path_of(release: str, *packages: str) -> Path:
    """Where a release of vLLM lies, or these packages; installed when it is not there yet, without libraries for GPUs.
    """
    path = RELEASES / release
    if not path.is_dir():
        RELEASES.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=RELEASES) as place:
            made = Path(place) / "made"
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
                            made, *(packages or (f"vllm=={release}",))], check=True)
            for library in made.rglob("*.so*"):
                if library.stat().st_size > LIBRARY_MAX:
                    library.unlink()
            made.rename(path)
    return path


def explored(release: str, profile: str, connector: str = OFFLOADING) -> list[dict[str, object]]:
    """The findings of a release under a profile; the installed release for the empty one."""
    environment = dict(os.environ)
    if release:
        environment["PYTHONPATH"] = str(path_of(release))
    done = subprocess.run(
        [Path(sys.executable).with_name("kvbm-console"), "explore", "vllm", "--seeds", SEEDS, "--profile", profile,
         "--connector", connector, "--workers", "1", "--format", "json"],
        env=environment, stdout=subprocess.PIPE, check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"explore ended with {done.returncode} on {release}")
    found: list[dict[str, object]] = json.loads(done.stdout)["findings"]
    return found


def main() -> None:
    """Print the table."""
    print("| release | thread | verdict | CPU s | runs of 300 | actions after shrinking |")
    print("|---|---|---|---|---|---|")
    known: dict[tuple[str, str, str], list[dict[str, object]]] = {}
    for release, profile, part, thread, connector in THREADS:
        if sys.argv[1:] and release not in sys.argv[1:]:
            continue
        if (release, profile, connector) not in known:
            known[release, profile, connector] = explored(release, profile, connector)
        for finding in known[release, profile, connector]:
            if part in str(finding["signature"]):
                _row(f"vLLM {release}", thread, finding)
                break
        else:
            raise SystemExit(f"{part!r} was not found in {release} with profile {profile}")
    for profile, connector in NEWEST if not sys.argv[1:] or "newest" in sys.argv[1:] else ():
        for finding in explored("", profile, connector):
            _row(f"newest, {json.loads(connector)['kv_connector']}, `{profile}`", "", finding)


def _row(release: str, thread: str, finding: dict[str, object]) -> None:
    scenario = finding["scenario"]
    assert isinstance(scenario, dict)
    link = f"[{thread}](https://github.com/vllm-project/vllm/issues/{thread[1:]})" if thread else "not known"
    verdict = f"`{finding['signature']}: {finding['sentence']}`"
    print(f"| {release} | {link} | {verdict} | {finding['cpu_s']:.1f} | {finding['times']} | "
          f"{len(scenario['actions'])} |", flush=True)


if __name__ == "__main__":
    main()
