"""Which features of which releases of vLLM the tap shows right: makes the table of ``docs/matrix.md``.

``python -m tests.vllm.matrix [RELEASE ...] [--feature NAME ...]`` in the environment of ``make test-vllm``, or
``make matrix``. Each release is installed into ``.releases/`` once. A process imports a release and makes a process for
each cell, so a cell that crashes ends alone. Results stand in ``.releases/matrix.json``; a cell that is there is not
run again, unless it is named or ``--again`` is given.

    cell            the process prints                             the table shows
    hybrid 0.26.0   {"steps": 246, "equal": 246, ...}              246
    arc 0.12.0      {"refused": "ValueError: ..."}                 fails, the reason below
    resets 0.26.0   {"steps": 142, "doubted": 142, ...}            ?
    drafts 0.31.0   {"steps": 104, "equal": 75, "reasons": [...]}  **75 of 104**, with the first reason below

Law of this file: a number in the table was printed by a cell that has compared every one of these steps.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.vllm.releases import RELEASES, ROOT, path_of

DOCUMENT: Final = ROOT / "docs" / "matrix.md"
INSTALLED: Final = "0.33.0"
VLLM: Final = (
    "0.11.2", "0.12.0", "0.14.1", "0.16.0", "0.18.1", "0.20.2", "0.22.0", "0.24.0", "0.26.0", "0.28.0", "0.30.0",
    "0.32.0", INSTALLED,
)
BESIDE: Final = {"gguf": ("gguf",), "lmcache": ("lmcache==0.5.6", "aiofile", "caio")}
"""Packages that some releases or features need, by the directory of their own."""
CELL_S: Final = 120
"""Seconds after which a cell counts as hanging."""


# --- the process of a release ---


def cell(name: str, way: str) -> dict[str, Any]:
    """Run a feature with the imported release. Returns steps, equal steps and reasons, or why there are none."""
    from tests.vllm import features

    feature = features.FEATURES[name]
    with tempfile.TemporaryDirectory() as place:
        try:
            outcome = features.run_feature(feature, Path(place), way)
        except features.NoSuchFeature as error:
            return {"missing": str(error)}
        except Exception as error:
            return _failed(name, error)
    found = {"steps": outcome.steps, "equal": outcome.equal, "reasons": list(outcome.reasons)[:5]}
    unproved = {} if outcome.doubted else {"unproved": list(outcome.unproved)}
    return {**found, **unproved, "doubted": outcome.doubted}


def _failed(name: str, error: Exception) -> dict[str, Any]:
    """Whose failure it is: the release's own if it fails without a tap, too."""
    from tests.vllm import features

    text = f"{type(error).__name__} in {_where(error)}: {str(error).strip() or 'no message'}"[:300]
    with tempfile.TemporaryDirectory() as place:
        try:
            features.without_tap(features.FEATURES[name], Path(place))
        except features.NoSuchFeature as missing:
            return {"missing": str(missing)}
        except Exception as alone:
            kind = "refused" if _is_theirs(alone) else "error"
            return {kind: f"{type(alone).__name__} in {_where(alone)}: {str(alone).strip() or 'no message'}"[:300]}
    return {"error": text}


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).stem}.{last.name}"


def _is_theirs(error: BaseException) -> bool:
    """True if the release or one of its packages has raised the error, and not this repository."""
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return last.is_relative_to(RELEASES) or "site-packages" in last.parts


def _find_cpu() -> None:
    """A release before 0.11 finds no platform on a machine without a GPU, unless it was built for CPUs."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import UnspecifiedPlatform

    if isinstance(platforms.current_platform, UnspecifiedPlatform):
        platforms._current_platform = CpuPlatform()  # type: ignore[attr-defined]


def _serve(names: list[str]) -> None:
    """Run these cells, each in a process of its own, and print a line of JSON for each."""
    import logging

    out = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    logging.disable(logging.CRITICAL)
    try:
        import vllm

        _find_cpu()
        from tests.vllm import features  # noqa: F401  imported once, before the cells
        print(json.dumps({"release": vllm.__version__}), file=out, flush=True)
    except Exception as error:
        print(json.dumps({"broken": f"{type(error).__name__}: {error}"[:300]}), file=out, flush=True)
        return
    for name in names:
        child = os.fork()
        if child == 0:
            found = cell(*name.split("@"))
            print(json.dumps({"cell": name, **found}), file=out, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"cell": name, "error": f"the process ended with {status}"}), file=out, flush=True)


# --- the process that the user starts ---


def results_of(release: str, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(feature, result) of each of these cells of a release, as they end."""
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(RELEASES / "cache" / release)}
    paths = [path_of(name, *packages) for name, packages in BESIDE.items()]
    if release != INSTALLED:
        paths.insert(0, path_of(release))
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*paths, ROOT)))
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.matrix", "--serve", *names], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    left = dict.fromkeys(names)
    for line in child.stdout:
        found = json.loads(line)
        if "broken" in found:
            yield from ((name, {"refused": found["broken"]}) for name in left)
            left = {}
        if "cell" in found:
            name = found.pop("cell")
            del left[name]
            yield name, found
    code = child.wait()
    yield from ((name, {"error": f"the process of the release ended with {code}"}) for name in left)


def main() -> None:
    """Run the cells that are asked for and not yet known, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="releases of vLLM; all of the list by default")
    parser.add_argument("--feature", action="append", default=[], metavar="NAME", help="only this feature")
    parser.add_argument("--way", action="append", default=[], choices=("scheduler", "connector"),
                        help="only the tap at this place")
    parser.add_argument("--again", action="store_true", help="run cells again whose result is known")
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options.serve)
        return
    from tests.vllm.features import FEATURES, WAYS

    for name in options.feature:
        if name not in FEATURES:
            raise SystemExit(f"--feature {name}: there is no such feature; there are {', '.join(FEATURES)}")
    kept = RELEASES / "matrix.json"
    known: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for release in options.releases or VLLM:
        cells = known.setdefault(release, {})
        names = [f"{name}@{way}" for way in options.way or WAYS for name in options.feature or FEATURES]
        names = [name for name in names if options.again or name not in cells]
        for name, found in results_of(release, names):
            cells[name] = found
            kept.write_text(json.dumps(known, indent=1))
            print(f"{release:8} {name:24} {text_of(found)}", flush=True)
    _, title, sglang = DOCUMENT.read_text().partition(SGLANG_TITLE)
    DOCUMENT.write_text(document(known) + title + sglang)


def text_of(found: dict[str, Any]) -> str:
    """A result in one line."""
    for kind in ("missing", "refused", "error"):
        if kind in found:
            return f"{kind}: {found[kind]}"
    line = f"{found['equal']} of {found['steps']} steps equal"
    if found["doubted"]:
        line += ", every count with a question mark"
    if found.get("unproved"):
        line += f"; never happened: {', '.join(found['unproved'])}"
    return "; ".join([line, *found["reasons"][:1]])


# --- the document ---

HEAD: Final = """# The tap in releases of vLLM

Made by `make matrix` (`python -m tests.vllm.matrix`). Each cell runs vLLM's own scheduler of that release under a
feature. After every step slots, states, positions, blocks of each slot and group, holders, hashes, evictions with their
culprit and lower tiers are compared with the engine's own state.

| cell | means |
|---|---|
| a number | so many steps were compared, and all were equal |
| `?` | every count of this engine carries the question mark, so nothing wrong is shown as certain |
| – | the release lacks the feature |
| own | the release fails here without a tap, too |
| **a of b** | a of b steps were equal |
| empty | was not run |
"""
TITLES: Final = {
    "scheduler": "The tap at the scheduler (`KVBM_TAP`)",
    "connector": "The tap at the connector (`kv_connector_module_path`)",
}
SGLANG_TITLE: Final = "\n## SGLang: event streams, and what the tap needs\n"
"""Begins the section that ``sglang_releases`` writes."""


def document(known: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The document: a table for each place of the tap, and the reasons below it."""
    from tests.vllm.features import FEATURES, WAYS

    parts = [HEAD]
    for way in WAYS:
        notes: dict[str, list[str]] = {}
        releases = [release for release in VLLM if any(f"{name}@{way}" in known.get(release, ()) for name in FEATURES)]
        parts.append(f"\n## {TITLES[way]}\n\n| feature | {' | '.join(releases)} |\n|---|{'---|' * len(releases)}\n")
        for name, feature in FEATURES.items():
            cells = []
            for release in releases:
                found = known[release].get(f"{name}@{way}")
                cells.append("" if found is None else short_of(found))
                note = "" if found is None else note_of(found)
                if note:
                    notes.setdefault(note, []).append(f"{name} {release}")
            parts.append(f"| {feature.title} (`{name}`) | {' | '.join(cells)} |\n")
        parts.append("\n" if notes else "")
        parts += [f"- {note}: {', '.join(where)}\n" for note, where in notes.items()]
    return "".join(parts)


def short_of(found: dict[str, Any]) -> str:
    """A result in a cell of the table."""
    if "missing" in found:
        return "–"
    if "refused" in found:
        return "own"
    if "error" in found:
        return "**error**"
    if found["doubted"] == found["steps"]:
        return "`?`"
    if found["equal"] == found["steps"]:
        return str(found["steps"])
    return f"**{found['equal']} of {found['steps']}**"


def note_of(found: dict[str, Any]) -> str:
    """The reason of a result, for the lines below the table; empty for a result without one."""
    for kind, words in (("missing", "–, "), ("refused", "own, "), ("error", "error, ")):
        if kind in found:
            return words + _code(found[kind])
    if found["doubted"]:
        return ""
    if found["reasons"]:
        return f"differs, {_code(found['reasons'][0])}"
    if found["unproved"]:
        return f"has not happened here: {', '.join(found['unproved'])}"
    return ""


def _code(text: str) -> str:
    text = re.sub(r" \(/[^)]*\)", "", text)  # a path of the machine
    return "`" + " ".join(text.split()).replace("`", "'")[:160] + "`"


if __name__ == "__main__":
    main()
