"""The daemon's cache is the planner's: the same flags and keys make the same leader, links and engine.

Law of this file: what ``simulate`` is told and what ``serve`` is told is compared as configurations, field by field.
"""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvbm_console.cli import serve as serve_module
from kvbm_console.cli import simulate as simulate_module
from kvbm_console.cli.main import cli
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import engine_config
from kvbm_console.simulator.link import DEFAULT_LINKS
from server.options import DaemonOptions

WORKLOAD = "multiturn:requests=24,sessions=4"
SAID = (
    "--total-kv-blocks", "40", "--block-size", "8", "--kv-cpu-size", "64MiB", "--kv-disk-blocks", "90",
    "--kv-geometry", "2,8,128,2", "--kv-offload-threshold", "0.4", "--compat", "--kv-transfer-bandwidth", "7",
    "--kv-transfer-base-latency", "3", "--transfers", "sync", "--preset", "chat", "--frequency-weight", "0.6",
    "--pin-ttl-s", "5", "--step-base", "7ms", "--step-prefill-token", "21.5us", "--step-decode-request", "90us",
    "--max-num-batched-tokens", "77", "--max-num-seqs", "6", "--ranks", "3",
)
FILE = """[{}]
total-kv-blocks = 40
block-size = 8
kv-cpu-size = "64MiB"
kv-disk-blocks = 90
kv-geometry = "2,8,128,2"
kv-offload-threshold = 0.4
compat = true
kv-transfer-bandwidth = 7
kv-transfer-base-latency = 3
transfers = "sync"
preset = "chat"
frequency-weight = 0.6
pin-ttl-s = 5
step-base = "7ms"
step-prefill-token = "21.5us"
step-decode-request = "90us"
max-num-batched-tokens = 77
max-num-seqs = 6
ranks = 3
"""


class Stop(Exception):
    """The command was about to run with what it was told."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options with which a command would have run."""
    found: list[Any] = []

    def stop(options: Any, *rest: Any, **more: Any) -> None:
        found.append(options)
        raise Stop

    monkeypatch.setattr(simulate_module, "_with_engine", stop)
    monkeypatch.setattr(serve_module, "machine_line", stop)
    monkeypatch.setattr("server.daemon.run_daemon", stop)
    return found


def options_of(told: list[Any], *args: str) -> Any:
    result = CliRunner().invoke(cli, args)
    assert isinstance(result.exception, Stop), result.output
    return told.pop()


def same(simulated: SimulateOptions, served: DaemonOptions) -> None:
    assert served.engine is not None
    assert served.config == simulated.leader_config()
    assert tuple(served.links) == simulated.links()
    assert served.engine == engine_config(simulated)
    assert served.block_bytes == simulated.block_bytes


def test_the_same_flags_make_the_same_cache(told: list[Any]) -> None:
    simulated = options_of(told, "simulate", "--trace", WORKLOAD, *SAID)
    served = options_of(told, "serve", "--workload", WORKLOAD, *SAID)
    same(simulated, served)
    assert (served.config.eviction.policy, served.config.eviction.frequency_weight) == ("adaptive_lru", 0.6)
    assert served.config.g2_blocks == 64 * 2**20 // (8 * 2 * 8 * 128 * 2 * 2)
    assert not served.config.asynchronous
    assert served.config.ranks == 3
    engine = served.engine
    assert (engine.step_base_ns, engine.prefill_token_ns, engine.decode_request_ns) == (7_000_000, 21_500, 90_000)
    assert (engine.max_batch_tokens, engine.max_running) == (77, 6)
    assert served.config.thrash_window_ns == 250 * 7_000_000


def test_links_by_name_are_the_same_everywhere(told: list[Any]) -> None:
    words = ("--link", "pcie=9GB/s", "--link", "disk-read=800MB/s,50us")
    simulated = options_of(told, "simulate", "--trace", WORKLOAD, *words)
    served = options_of(told, "serve", "--workload", WORKLOAD, *words)
    rates = {link.name: link.bytes_per_s for link in served.links}
    assert tuple(served.links) == simulated.links()
    assert (rates["pcie-up"], rates["disk-read"], rates["disk-write"]) == (9e9, 8e8, 3e9)


def test_the_configuration_file_says_it_as_well(
    told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_flags = options_of(told, "serve", "--workload", WORKLOAD, *SAID)
    path = tmp_path / "config.toml"
    path.write_text(FILE.format("simulate") + FILE.format("serve"))
    monkeypatch.setenv("KVBM_CONSOLE_CONFIG", str(path))
    served = options_of(told, "serve", "--workload", WORKLOAD)
    same(options_of(told, "simulate", "--trace", WORKLOAD), served)
    assert served.config == by_flags.config


def test_what_is_not_said_is_the_workloads_own(told: list[Any]) -> None:
    served = options_of(told, "serve", "--workload", WORKLOAD)
    sizes = served.workload.capacities
    assert (served.engine.g1_blocks, served.config.block_tokens) == (sizes.g1_blocks, sizes.block_tokens)
    assert (served.config.g2_blocks, served.config.g3_blocks) == (sizes.g2_blocks, sizes.g3_blocks)
    assert served.links == DEFAULT_LINKS


def test_the_names_of_the_tiers_are_names_of_the_same_flags(told: list[Any]) -> None:
    short = ("--g1-blocks", "40", "--g2-blocks", "50", "--g3-blocks", "60", "--block-tokens", "8")
    long = ("--total-kv-blocks", "40", "--kv-cpu-blocks", "50", "--kv-disk-blocks", "60", "--block-size", "8")
    one, other = (options_of(told, "serve", "--workload", WORKLOAD, *flags) for flags in (short, long))
    assert (one.config, one.engine) == (other.config, other.engine)


def test_without_a_workload_there_is_no_device_to_size(told: list[Any]) -> None:
    result = CliRunner().invoke(cli, ["serve", "--total-kv-blocks", "40"], prog_name="kvbm-console")
    assert result.exit_code == 2
    assert "--total-kv-blocks needs --workload, got 40 without one" in result.stderr
    result = CliRunner().invoke(cli, ["serve", "--max-num-seqs", "4"], prog_name="kvbm-console")
    assert "--max-num-seqs needs --workload, got 4 without one" in result.stderr
    served = options_of(told, "serve", "--policy", "lfu", "--kv-cpu-blocks", "9")
    assert (served.config.eviction.policy, served.config.g2_blocks, served.config.g3_blocks) == ("lfu", 9, 32_768)
