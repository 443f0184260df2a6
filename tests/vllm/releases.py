"""Explores releases of vLLM that had published bugs, and writes the table of ``explore``'s reference.

``python -m tests.vllm.releases [RELEASE ...]`` in the environment of ``make test-vllm``. Each release, or those that
are named, is installed without its requirements into ``.releases/`` once, and stands in front of the installed one.
A release takes 20 to 180 MB without its libraries for GPUs.

Law of this file: a row is printed only for a signature that this run has found. A published bug that is missing, or
that shrinks to more than ``ACTIONS_MAX`` actions, ends the program with 1.
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
LMCACHE: Final = '{"kv_connector": "LMCacheMPConnector"}'
VLLM, LMC = "vllm-project/vllm", "LMCache/LMCache"
THREADS: Final = (
    ("0.22.0", "hits", "loaded request that is not scheduled", f"{VLLM}#45388", OFFLOADING),
    ("0.22.0", "reset", "no leak: OffloadingConnectorScheduler._req_status", f"{VLLM}#48102", OFFLOADING),
    ("0.26.0", "abort", "AssertionError in scheduler._build_store_jobs", f"{VLLM}#49118", OFFLOADING),
    ("0.26.0", "press", "device events", f"{VLLM}#54325", SIMPLE),
    ("0.29.0", "hits", "loaded request that is not scheduled", f"{VLLM}#57841", OFFLOADING),
    ("0.29.0", "chat", "incomplete block", f"{VLLM}#54193", ANSWERS),
    ("lmcache-0.5.5", "hits", "torn store", f"{LMC}#4822", LMCACHE),
    ("lmcache-0.5.6", "abort", "host references", f"{VLLM}#44100", LMCACHE),
    ("lmcache-0.5.6", "abort", "_update_from_kv_xfer_finished", f"{VLLM}#46240", LMCACHE),
    ("lmcache-0.5.6", "failures", "_update_from_kv_xfer_finished", f"{VLLM}#57938", LMCACHE),
    ("0.22.0", "reset", "torn store", "", OFFLOADING),
    ("0.23.0", "reset", "torn store", "", OFFLOADING),
    ("0.29.0", "reset", "AssertionError in scheduler.build_connector_meta", "", OFFLOADING),
)
"""Release, profile, part of the signature, the thread that describes it, and the connector. A release of LMCache stands
beside the installed vLLM."""
CHUNKS: Final = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": 64}}'
NIXL: Final = '{"kv_connector": "NixlConnector"}'
NEWEST: Final = (
    ("reset", SIMPLE), ("reset", OFFLOADING), ("failures", OFFLOADING), ("hybrid", NIXL), ("hybrid", CHUNKS),
)
"""Profiles and connectors with findings in the installed release, for which no thread was found."""
SEEDS: Final = "0:300"
ACTIONS_MAX: Final = 12
"""The most actions of a published bug after shrinking."""
LIBRARY_MAX: Final = 2**20
"""Bytes above which a shared library of vLLM is for GPUs, which nothing here has."""


def path_of(release: str, *packages: str) -> Path:
    """The place of a release of vLLM, or of these packages. It is installed there once, without libraries for GPUs.
    """
    path = RELEASES / release
    if not path.is_dir():
        RELEASES.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=RELEASES) as place:
            made = Path(place) / "made"
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
                            made, *(packages or (f"vllm=={release}",))], check=True)
            for library in (made / "vllm").rglob("*.so*"):
                if library.stat().st_size > LIBRARY_MAX:
                    library.unlink()
            made.rename(path)
    return path


def beside(release: str) -> dict[str, str]:
    """The environment of a process that imports this release; the installed one for an empty name."""
    if not release:
        return dict(os.environ)
    name, _, number = release.rpartition("-")
    wanted = (f"{name}=={number}", "aiofile", "caio") if name else (f"vllm=={number}", "gguf")
    # vLLM keeps its model infos in one file, which releases beside each other overwrite in turn.
    return {**os.environ, "PYTHONPATH": str(path_of(release, *wanted)),
            "VLLM_CACHE_ROOT": str(RELEASES / "cache" / release)}


def explored(release: str, profile: str, connector: str = OFFLOADING) -> list[dict[str, object]]:
    """The findings of a release under a profile; the installed release for the empty one."""
    done = subprocess.run(
        [Path(sys.executable).with_name("kvbm-console"), "explore", "vllm", "--seeds", SEEDS, "--profile", profile,
         "--connector", connector, "--workers", "1", "--format", "json"],
        env=beside(release), stdout=subprocess.PIPE, check=False,
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
    large = []
    for release, profile, part, thread, connector in THREADS:
        if sys.argv[1:] and release not in sys.argv[1:]:
            continue
        if (release, profile, connector) not in known:
            known[release, profile, connector] = explored(release, profile, connector)
        for finding in known[release, profile, connector]:
            if part in str(finding["signature"]):
                name = release.replace("lmcache-", "LMCache ") if "-" in release else f"vLLM {release}"
                if _row(name, thread, finding) > ACTIONS_MAX and thread:
                    large.append(thread)
                break
        else:
            raise SystemExit(f"{part!r} was not found in {release} with profile {profile}")
    for profile, connector in NEWEST if not sys.argv[1:] or "newest" in sys.argv[1:] else ():
        for finding in explored("", profile, connector):
            _row(f"newest, {json.loads(connector)['kv_connector']}, `{profile}`", "", finding)
    if large:
        raise SystemExit(f"more than {ACTIONS_MAX} actions after shrinking: {', '.join(large)}")


def _row(release: str, thread: str, finding: dict[str, object]) -> int:
    """Print a row. Returns the actions of the finding."""
    scenario = finding["scenario"]
    assert isinstance(scenario, dict)
    link = f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})" if thread else "not known"
    verdict = f"`{finding['signature']}: {finding['sentence']}`"
    actions = len(scenario["actions"])
    print(f"| {release} | {link} | {verdict} | {finding['cpu_s']:.1f} | {finding['times']} | {actions} |", flush=True)
    return actions


if __name__ == "__main__":
    main()
