"""``simulate --trace FILE`` and ``compare --trace FILE`` with nothing else: format and sizes are found and stated.

Law of this file: a bare run equals the run in which everything that it states is said.
"""

import json
import os
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner, Result

from kvbm_console.cli.main import cli

MOONCAKE: Final = '{"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}\n'
OURS: Final = '{"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3], "priority": 2}\n'
AZURE: Final = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
BURST: Final = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,log\n"
FILES: Final = {
    "mooncake": "\n" + MOONCAKE, "mooncake ours": OURS, "mooncake bom": "\ufeff" + MOONCAKE,
    "azure": AZURE, "azure bom": "\ufeff" + AZURE,
    "burstgpt": BURST,
}
BLOCKS: Final = {"mooncake": 16_384, "azure": 16_384, "burstgpt": 16_384}
"""The device of each kind of workload, in blocks of 16 tokens."""


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="kvbm-console")


@pytest.mark.parametrize("name", FILES)
def test_a_bare_file_runs_and_states_what_it_took(name: str, tmp_path: Path) -> None:
    kind = name.split()[0]
    trace = tmp_path / "trace"
    trace.write_text(FILES[name], encoding="utf-8")
    bare = run("simulate", "--trace", str(trace))
    assert bare.exit_code == 0, bare.output
    assert bare.stdout.splitlines()[0] == (
        f"taken        the format {kind}, found in the file, --total-kv-blocks {BLOCKS[kind]}, --block-size 16, "
        "--kv-cpu-blocks 0")
    said = run("simulate", "--trace", f"{kind}:{trace}", "--total-kv-blocks", str(BLOCKS[kind]), "--block-size", "16",
               "--kv-cpu-blocks", "0")
    assert bare.stdout.splitlines()[1:] == said.stdout.splitlines()
    document = json.loads(run("simulate", "--trace", str(trace), "--format", "json").stdout)
    assert document["trace"] == f"{kind}:{trace}"
    assert document["settings"]["total_kv_blocks"] == BLOCKS[kind]


@pytest.mark.parametrize("more", [(), ("--cache-only",)])
def test_compare_takes_the_same(more: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(MOONCAKE)
    usual = ("--policies", "simple_lru", "--workers", "1", *more)
    head, *rest = run("compare", "--trace", str(trace), *usual).stdout.splitlines()
    blocks = "512" if more else "16384"
    assert head.startswith(f"taken        the format mooncake, found in the file, --total-kv-blocks {blocks}")
    said = run("compare", "--trace", f"mooncake:{trace}", "--total-kv-blocks", blocks, *usual)
    assert rest == said.stdout.splitlines()
    found = json.loads(run("compare", "--trace", str(trace), *usual, "--format", "json").stdout)
    assert (found["trace"], found["cells"][0]["total_kv_blocks"]) == (f"mooncake:{trace}", int(blocks))


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(("content", "says"), [
    ("text\n", "the first line is of no known format; name the format as mooncake:FILE, azure:FILE, burstgpt:FILE"),
    ('{"kind": "SlotMoved"}\n', "is of no known format"), ("", "is of no known format"), ("\x00\x01", "of no known"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens,Request tokens,Response tokens\n", "fits azure and burstgpt; name"),
    (None, "cannot be read: No such file or directory"),
])
def test_an_unknown_or_ambiguous_file_is_one_sentence(
    command: str, content: str | None, says: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    if content is not None:
        trace.write_text(content)
    done = run(command, "--trace", str(trace))
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert says in done.stderr
    assert str(trace) in done.stderr


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize("kind", ["", "mooncake:", "azure:", "dynamo:", "lmcache:"])
def test_a_pipe_is_refused_because_a_trace_is_read_more_than_once(command: str, kind: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = run(command, "--trace", f"{kind}{pipe}")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"kvbm-console: trace {pipe} must be a regular file, because it is read more than once\n"
