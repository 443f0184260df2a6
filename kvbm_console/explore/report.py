"""The files of a finding: a scenario, a pytest file that needs only vLLM, a text for an upstream issue.

Law of this file: the reproduction is the source that found the verdict, and no part of it is written twice.
"""

import ast
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvbm_console.explore.scenario import Abort, Action, Arrive, CacheReset, Scenario
from kvbm_console.explore.search import ExploreFinding, SearchReport

PARTS: Final = ("scenario.py", "shadow.py", "connectors.py", "connector_faults.py", "nixl.py", "lmcache.py",
                "mooncake.py", "example.py", "vllm.py")
"""The modules of a reproduction, in the order of their imports."""


def slug(signature: str) -> str:
    """A directory's name from a signature.

    >>> slug("progress: deadlock of waiting+waiting_for_remote_kvs, holding blocks")
    'progress-deadlock-of-waiting-waiting-for-remote-kvs-holding-blocks'
    """
    kept = "".join(letter if letter.isalnum() else " " for letter in signature.lower())
    return "-".join(kept.split())[:80]


def write(
    out: Path, report: SearchReport, finding: ExploreFinding, connector: dict[str, Any], faults: tuple[str, ...],
    engine: str = "vllm",
) -> Path:
    """Write the directory of a finding, with its scenario, reproduction and issue text. Returns its path."""
    directory = out / slug(finding.signature)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "scenario.json").write_text(finding.scenario.to_json() + "\n", encoding="utf-8")
    (directory / "test_reproduction.py").write_text(
        reproduction(finding.scenario, connector, faults, report.release, finding.signature, report.adapters)
        if engine == "vllm" else
        leader_reproduction(finding.scenario, connector, faults, report.release, finding.signature), encoding="utf-8")
    (directory / "issue.md").write_text(
        issue(report, finding, connector if engine == "vllm" else None), encoding="utf-8")
    return directory


def reproduction(
    scenario: Scenario, connector: dict[str, Any], faults: tuple[str, ...], release: str, signature: str,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """A pytest file that fails as long as the bug exists. The file needs vLLM and no part of this program.

    ``adapters`` has class and source of those that the search was given."""
    bodies = []
    imports: set[str] = set()
    parts = resources.files("kvbm_console.explore")
    for source in (*(parts.joinpath(name).read_text(encoding="utf-8") for name in PARTS),
                   *dict.fromkeys(adapters.values())):
        module_imports, body = _parts(source)
        imports |= module_imports
        bodies.append(body)
    head = (f'"""Found by kvbm-console explore with {release}: {signature}.\n\n'
            'Run it with pytest where vLLM is installed.\n"""')
    return "\n\n".join([
        head, "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))), *bodies,
        f"CONNECTOR = {connector!r}\nSCENARIO = Scenario.from_json({json.dumps(scenario.to_json())})\n"
        f"FAULTS: tuple[str, ...] = {faults!r}",
        "def test_reproduction():\n"
        f"    run = Machine(Release({', '.join(adapters)}), CONNECTOR, SCENARIO, FAULTS).play()\n"
        "    assert run.verdict is None, run.verdict.sentence\n",
    ])


def leader_reproduction(
    scenario: Scenario, connector: dict[str, Any], faults: tuple[str, ...], release: str, signature: str
) -> str:
    """A pytest file that fails as long as the bug of our leader exists."""
    return "\n".join([
        f'"""Found by kvbm-console explore in {release}: {signature}."""', "",
        "from kvbm_console.explore.leader import LeaderMachine, LeaderRelease",
        "from kvbm_console.explore.scenario import Scenario", "",
        f"SCENARIO = Scenario.from_json({json.dumps(scenario.to_json())})", "", "",
        "def test_reproduction():",
        f"    run = LeaderMachine(LeaderRelease(), {connector!r}, SCENARIO, {faults!r}).play()",
        "    assert run.verdict is None, run.verdict.sentence", "",
    ])


def _parts(source: str) -> tuple[set[str], str]:
    """The imports of a module without those of this program, and the module's body without docstring and imports."""
    tree = ast.parse(source)
    lines = source.splitlines()
    imports: set[str] = set()
    skip: set[int] = set()
    for at, node in enumerate(tree.body):
        docstring = at == 0 and isinstance(node, ast.Expr)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or docstring:
            skip |= set(range(node.lineno - 1, (node.end_lineno or node.lineno)))
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("kvbm_console")
        ):
            imports.add(ast.unparse(node))
    body = "\n".join(line for at, line in enumerate(lines) if at not in skip)
    return imports, body.strip("\n") + "\n"


def story(action: Action) -> str:
    """An action in words."""
    if isinstance(action, Arrive):
        parts = " + ".join([
            *([f"prompt and answer of {action.after}"] if action.after else []),
            *(f"{count} tokens of prefix {family}" for family, count in action.prompt),
        ])
        return f"step {action.step}: {action.name} arrives with {parts}, and decodes {action.output}"
    if isinstance(action, Abort):
        return f"step {action.step}: {action.name} is aborted"
    assert isinstance(action, CacheReset)
    running = "with running requests preempted" if action.running else "as far as no request runs"
    return f"step {action.step}: the prefix cache is reset {running}" + (
        ", and the connector's cache" if action.connector else "")


def issue(report: SearchReport, finding: ExploreFinding, connector: dict[str, Any] | None) -> str:
    """A text that can be pasted into an issue of the engine's or the connector's project. ``connector`` is None for our
    own leader."""
    scenario = finding.scenario
    waits = " or ".join(str(wait) for wait in sorted({entry // 3 for entry in scenario.copies}))
    entry = "" if connector is None else f"`--kv-transfer-config '{json.dumps(connector)}'`, "
    real = ("The leader and the engine are the product's." if connector is None else
            "The scheduler and the connector are the real ones, on a CPU. The worker only copies block contents.")
    where = "an environment with kvbm-console" if connector is None else "an environment with vLLM; no GPU, no weights"
    return "\n".join([
        f"# {finding.signature}", "",
        f"{report.release}, {entry}{scenario.device_blocks} device blocks, "
        + "".join(f"{name} {value}, " for name, value in scenario.machine) +
        f"{scenario.host_blocks} host blocks, max_num_seqs {scenario.max_running}, max_num_batched_tokens "
        f"{scenario.batch_tokens}, block size 16.", "",
        f"In step {finding.verdict['step']}: {finding.verdict['sentence']}.", "",
        f"{real} Copies are reported {waits} steps after they were submitted.", "",
        "## Steps", "", *[f"- {story(action)}" for action in scenario.actions], "",
        "## Reproduce", "", f"`pytest test_reproduction.py` in {where}.", "",
        f"Met {finding.times} times in {report.runs:,} runs ({report.steps:,} scheduler steps), the first time after "
        f"{finding.cpu_s:.1f} s of CPU time, with profile {finding.profile} and seed {finding.seed}.", "",
    ])
