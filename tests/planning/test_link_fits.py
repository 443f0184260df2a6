"""``calibrate`` finds the links of a machine again, in the copies of its recording.

Law of this file: the links are drawn by the test, and the copies go through leader, mover and file.
"""

import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvbm_console.cli.main import cli
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.ids import Route
from kvbm_console.planning.copies import CopyTime, copies_in, copies_of, fit_links
from kvbm_console.planning.measured import origins_of
from kvbm_console.planning.profile import read_profile
from kvbm_console.recording.reader import Recording
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link import DEFAULT_LINKS
from kvbm_console.simulator.link_settings import read_links
from kvbm_console.simulator.machine import SimulatedMachine
from kvbm_console.simulator.multiturn import Multiturn, Settings
from tests.planning.test_recorded import recorded
from tests.tap.kept import run_of


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulatedMachine, Path]:
    """A machine with slow and odd links, and its recording."""
    dice = random.Random(8)
    links = tuple(
        msgspec.structs.replace(
            link, bytes_per_s=link.bytes_per_s * dice.uniform(0.05, 1), base_latency_ns=dice.randint(5_000, 900_000)
        ) for link in DEFAULT_LINKS
    )
    machine = SimulatedMachine(
        leader=LeaderConfig(g2_blocks=96, g3_blocks=900, offload_law="order", offload_threshold=0.5),
        engine=EngineConfig(g1_blocks=128, max_batch_tokens=256), links=links,
    )
    path = tmp_path_factory.mktemp("run")
    recorded(machine, Multiturn(Settings(sessions=8, requests=60, think=0.5)), path)
    return machine, path


def test_the_links_of_a_machine_are_found_again(machine: tuple[SimulatedMachine, Path]) -> None:
    built, path = machine
    fits = fit_links(copies_in(Recording.open(path)))
    assert {"pcie-down", "pcie-up", "disk-write"} <= {fit.link for fit in fits}
    links = {link.name: link for link in built.links}
    for fit in fits:
        if fit.copies < 8 or fit.bytes_min == fit.bytes_max:
            continue
        assert fit.bytes_per_s == pytest.approx(links[fit.link].bytes_per_s, rel=1e-3)
        assert fit.latency_ns == pytest.approx(links[fit.link].base_latency_ns, rel=1e-3)
        assert fit.errors.p90 < 1e-3
    assert any(fit.queue_share > 0.01 for fit in fits)


def test_noise_is_stated_and_the_link_is_found_within_it() -> None:
    dice = random.Random(3)
    copies = []
    for _ in range(400):
        size = dice.randrange(2**20, 2**28)
        wire = (50_000 + size / 12e9 * 1e9) * dice.uniform(0.9, 1.1)
        copies.append(CopyTime(Route.G2_G1, size, dice.randrange(10**6), round(wire)))
    fit, = fit_links(copies)
    latency_error, gib_error = fit.standard_errors
    assert abs(fit.latency_ns - 50_000) <= 4 * latency_error
    assert abs(2**30 * 1e9 / fit.bytes_per_s - 2**30 / 12) <= 4 * gib_error
    assert 0.03 < fit.errors.median < 0.07


def test_a_copy_of_a_real_engine_ends_within_a_step(tmp_path: Path) -> None:
    """A load of vLLM in ``trouble`` ends in the third step, a store too, and its bytes go from the second step on."""
    run_of("trouble").record(tmp_path, [64])
    recording = Recording.open(tmp_path)
    found = copies_in(recording)
    plain = copies_of(recording, recording.block_bytes or 1, origins_of(recording))
    assert len(found) == len(plain)
    for ours, told in zip(found, plain, strict=True):
        assert ours.wire_ns < told.wire_ns
    loads = [copy.wire_ns for copy in found if copy.route is Route.G2_G1]
    stores = [copy.wire_ns for copy in found if copy.route is Route.G1_G2]
    assert min(told.wire_ns - ours.wire_ns for ours, told in zip(found, plain, strict=True)) >= 4_000_000
    assert min(loads) > 20_000_000
    assert min(stores) > 12_000_000


def test_a_few_copies_have_a_latency_alone() -> None:
    fit, = fit_links([CopyTime(Route.G1_G2, size, 0, 7_000) for size in (100, 200, 300)])
    assert fit.latency_ns == 7_000
    assert fit.bytes_per_s >= 1e15


def test_the_file_of_calibrate_has_the_links(machine: tuple[SimulatedMachine, Path], tmp_path: Path) -> None:
    out = tmp_path / "machine.toml"
    result = CliRunner().invoke(cli, ["calibrate", str(machine[1]), "--out", str(out)], prog_name="kvbm-console")
    assert result.exit_code == 0, result.output
    assert "of their time in the queue" in result.stdout
    links = read_profile(out).links
    assert {link.name for link in links} >= {"pcie-down", "pcie-up", "disk-write"}
    assert read_links(out) == links, "a file of --links as well"
