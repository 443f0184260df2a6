"""Links by name, and their measurement."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvbm_console.cli.main import cli
from kvbm_console.core.config import LeaderConfig
from kvbm_console.core.errors import UsageError
from kvbm_console.core.eviction.policy import PolicyConfig
from kvbm_console.core.ids import Route
from kvbm_console.core.instructions import StartTransfer
from kvbm_console.core.stimuli import TransferFinished
from kvbm_console.planning import linkbench
from kvbm_console.planning.compare import grid, without_a_tier
from kvbm_console.planning.links import LinkBench, LinkTime, file_of, fitted, measure_links
from kvbm_console.planning.options import SimulateOptions
from kvbm_console.planning.run import simulate
from kvbm_console.simulator.calendar import Calendar
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.link import DEFAULT_LINKS, LinkMover, LinkSpec
from kvbm_console.simulator.link_settings import LinkSetting, links_of, read_links
from kvbm_console.simulator.machine import SimulatedMachine

CHATS = "multiturn:requests=60,sessions=8"


def told(kind: str, base_ns: int, bytes_per_s: float, *, odd: float = 1.0) -> list[LinkTime]:
    """Times of a perfect link, but for the smallest size."""
    return [
        LinkTime(kind, 4, size, round((base_ns + size * 1e9 / bytes_per_s) * (odd if at == 0 else 1)), 1, 1, True)
        for at, size in enumerate(linkbench.SIZES)
    ]


@given(base_ns=st.integers(0, 2_000_000), rate=st.floats(1e7, 1e11))
def test_a_fit_finds_the_numbers_of_a_link(base_ns: int, rate: float) -> None:
    (link,) = fitted(told("disk-read", base_ns, rate))
    assert link.error < 0.02
    copy_ns = 2 * 2**20 * 1e9 / rate + base_ns
    assert abs(link.base_latency_ns + 2 * 2**20 * 1e9 / link.bytes_per_s - copy_ns) <= 0.02 * copy_ns


def test_a_file_of_fits_becomes_the_links_of_a_machine(tmp_path: Path) -> None:
    rows = [*told("memcpy", 1_000, 16e9), *told("disk-read", 42_000, 970e6), *told("disk-write", 32_000, 2.17e9)]
    path = tmp_path / "links.toml"
    path.write_text(file_of(LinkBench(fitted(rows), rows)))
    links = {link.name: link for link in links_of(read_links(path))}
    read = links["disk-read"]
    assert (round(read.base_latency_ns, -3), round(read.bytes_per_s, -6)) == (42_000, 970e6)
    assert read.routes == (Route.G3_G2, Route.G3_G1)
    assert abs(read.copy_ns(2 * 2**20) / (42_000 + 2 * 2**20 / 0.97) - 1) < 0.01
    assert links["pcie-up"] == next(link for link in DEFAULT_LINKS if link.name == "pcie-up")


def test_a_fit_that_is_wrong_by_half_is_not_written() -> None:
    rows = told("disk-read", 10_000, 1e9, odd=9.0)
    with pytest.raises(UsageError, match="that of disk-read is off by"):
        file_of(LinkBench(fitted(rows), rows))


@pytest.mark.parametrize(("texts", "changed"), [
    (["pcie=50GB/s"], {"pcie-down": (20_000, 50e9), "pcie-up": (20_000, 50e9)}),
    (["disk-read=1GiB/s,1ms", "disk-read=2GB/s"], {"disk-read": (1_000_000, 2e9)}),
    (["G3>G1=1GB/s,5us"], {"G3>G1": (5_000, 1e9)}),
])
def test_a_setting_changes_its_links_alone(texts: list[str], changed: dict[str, tuple[int, float]]) -> None:
    links = links_of(map(LinkSetting.parse, texts))
    usual = {link.name: (link.base_latency_ns, link.bytes_per_s) for link in DEFAULT_LINKS}
    assert {link.name: (link.base_latency_ns, link.bytes_per_s) for link in links} == usual | changed
    routes = [route for link in links for route in link.routes]
    assert sorted(routes) == sorted(route for link in DEFAULT_LINKS for route in link.routes), "each route has one link"


@pytest.mark.parametrize(("words", "sentence"), [
    ("--link dsk=3GB/s", "must name one of pcie, disk, net"),
    ("--link disk=3", "must be NAME=BANDWIDTH"),
    ("--link disk=3GB/s,20", "must be NAME=BANDWIDTH"),
    ("--link disk=0GB/s", "must have a bandwidth above 0"),
    ("--kv-transfer-bandwidth 3", "--kv-transfer-bandwidth needs --compat, got 3 without it"),
    ("--kv-transfer-base-latency 3", "--kv-transfer-base-latency needs --compat, got 3 without it"),
    ("--compat --link disk=3GB/s", "--compat makes all links alike, so it takes no --link"),
    ("--links nowhere", "must name a file that can be read, got 'nowhere'"),
    ("--links odd", "must name a file of bench links, got 'odd'"),
])
def test_a_mistake_is_one_sentence(words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").write_text("[disk-read]\nspeed = 3\n")
    done = CliRunner().invoke(cli, ["simulate", "--trace", CHATS, "--total-kv-blocks", "9", *words.split()])
    assert done.exit_code == 2
    assert sentence in done.output


def test_a_slow_disk_is_slow_and_compare_says_what_a_tier_costs() -> None:
    options = SimulateOptions(
        trace="multiturn:requests=30,sessions=6", total_kv_blocks=100, kv_cpu_blocks=120, kv_disk_blocks=2_000,
        policy=PolicyConfig(policy="simple_lru"), stats_every=0,
    )
    rates = ("3GB/s", "50MB/s")
    fast, slow = (
        simulate(msgspec.structs.replace(options, link=(LinkSetting.parse(f"disk={rate}"),))).document for rate in rates
    )
    without = simulate(msgspec.structs.replace(options, kv_disk_blocks=0)).document
    assert slow["ttft_ms"]["mean"] > 1.5 * fast["ttft_ms"]["mean"]
    assert [text for text in slow["settings"]["links"] if text.startswith("disk")] == [
        "disk-write=50000000B/s,100000ns", "disk-read=50000000B/s,100000ns"
    ]

    lines = [
        CliRunner().invoke(cli, [
            "compare", "--trace", options.trace, "--total-kv-blocks", "100", "--kv-cpu-blocks", "120",
            "--kv-disk-blocks", "2000", "--policies", "simple_lru,belady", "--workers", "1", "--link", f"disk={rate}",
        ]).stdout.splitlines()
        for rate in rates
    ]
    mean, bare = slow["ttft_ms"]["mean"], without["ttft_ms"]["mean"]
    points = 100 * (slow["prefix_hit_rate"] - without["prefix_hit_rate"])
    assert [line for line in lines[1] if "slower than without the disk" in line] == [
        "simple_lru with 100 device, 120 host, 2,000 disk blocks is slower than without the disk tier: mean ttft "
        f"{mean:,.1f} ms, {mean - bare:,.1f} ms more, for {points:+.2f} points of hit rate"
    ]
    assert any("without the disk" in line for line in lines[0]) == (fast["ttft_ms"]["mean"] > bare)


def test_settings_without_a_lower_tier_are_run_once_for_all_policies() -> None:
    options = SimulateOptions(trace=CHATS, total_kv_blocks=9)
    policies = ("simple_lru", "lfu", "belady")
    bare = [without_a_tier(each) for each in grid(options, policies, (), (9,), (0, 5), cache_only=False)]
    assert bare[:3] == [{}, {}, {}]
    assert bare[3] == bare[4] != {} == bare[5]
    assert bare[3]["host"].options.kv_cpu_blocks == 0


def test_compat_alone_has_the_unit_of_the_vectors() -> None:
    """Every command has the links of a machine; copies take next to no time with --compat."""
    plain = SimulateOptions(trace=CHATS, total_kv_blocks=9)
    assert plain.links() == DEFAULT_LINKS
    found = {}
    for words in ((), ("--compat",), ("--compat", "--kv-transfer-bandwidth", "50")):
        done = CliRunner().invoke(cli, [
            "simulate", "--trace", "multiturn:requests=4,sessions=2", "--total-kv-blocks", "90", "--kv-cpu-blocks", "9",
            "--stats-every", "0", "--format", "json", *words,
        ])
        assert done.exit_code == 0, done.output
        found[words] = msgspec.json.decode(done.stdout)["settings"]
    assert found.pop(())["links"] == [
        LinkSetting(link.name, link.bytes_per_s, link.base_latency_ns).text for link in DEFAULT_LINKS
    ]
    assert [told["kv_transfer_bandwidth"] for told in found.values()] == [100, 50]


def test_a_setting_leaves_the_other_links_of_a_recording() -> None:
    machine = SimulatedMachine(
        leader=LeaderConfig(), engine=EngineConfig(g1_blocks=9), links=links_of([LinkSetting("net", 5e9)])[2:],
    )
    links = {link.name: link for link in SimulateOptions(
        trace=CHATS, total_kv_blocks=9, machine=machine, link=(LinkSetting("disk", 1e9), LinkSetting("G1>G2", 2e9)),
    ).links()}
    assert {name: link.bytes_per_s for name, link in links.items()} == {
        "disk-write": 1e9, "disk-read": 1e9, "net-out": 5e9, "net-in": 5e9, "G1>G2": 2e9,
    }
    assert links["G1>G2"].routes == (Route.G1_G2,)


def copied_ns(spec: LinkSpec, size_bytes: int) -> int:
    """How long the simulated mover takes for a copy of this size."""
    calendar = Calendar()
    ended: list[int] = []

    class Reports:
        """Keeps when the copy ended."""

        def submit(self, kind: type[Any], *args: Any) -> None:
            """A report of the mover."""
            if kind is TransferFinished:
                ended.append(calendar.now_ns)

    LinkMover(calendar, Reports(), size_bytes, links=(spec,)).start(StartTransfer(1, 0, Route.G1_G2, b"", b"", 1, 1, 1))
    while calendar.run_next():
        pass
    (took_ns,) = ended
    return took_ns


def test_the_machine_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    done = measure_links(tmp_path, 0.4)
    assert {(link.name, link.depth) for link in done.links} == {
        ("memcpy", 1), ("disk-read", 1), ("disk-read", 4), ("disk-write", 1), ("disk-write", 4),
    }
    assert all(row.p90_ns >= row.p50_ns > 0 for row in done.times)
    assert {row.size_bytes for row in done.times} == set(linkbench.SIZES)
    assert not list(tmp_path.iterdir())
    for link in done.links:
        spec = LinkSpec(
            name=link.name, routes=(Route.G1_G2,), base_latency_ns=link.base_latency_ns, bytes_per_s=link.bytes_per_s
        )
        for row in done.times:
            if (row.kind, row.depth) == (link.name, link.depth):
                simulated = copied_ns(spec, row.size_bytes)
                assert abs(simulated - row.p50_ns) <= link.error * row.p50_ns + 1, "off by more than the stated error"


@pytest.mark.parametrize("words", ["--disk nowhere", "--disk file", "--out file"])
def test_a_place_that_cannot_be_measured_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, ["bench", "links", *words.split(), "--for", "100ms"])
    assert done.exit_code == 2
    assert done.output.startswith(f"kvbm-console: {words.split()[0]} must ")


def test_a_disk_without_room_is_refused_with_the_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbm_console.planning.links.ROOM_BYTES", 2**60)
    with pytest.raises(UsageError, match=f"--disk must have room for {2**60} bytes"):
        measure_links(tmp_path, 0.1)


def test_a_saturated_link_sheds_copies_and_the_report_counts_them_by_reason() -> None:
    """The same counts with and without a leader and its events."""
    options = SimulateOptions(
        trace=CHATS, total_kv_blocks=100, kv_cpu_blocks=400, policy=PolicyConfig(policy="simple_lru"), stats_every=0,
        link=(LinkSetting.parse("pcie=2MB/s,100us"),),
    )
    told = simulate(options).document["skipped_copies"]
    assert told["link_busy"] > 10
    assert simulate(options, leader=True).document["skipped_copies"] == told
    waits = msgspec.structs.replace(options, kv_offload_link_busy="queue")
    assert "link_busy" not in simulate(waits).document["skipped_copies"]
    shown = CliRunner().invoke(cli, [
        "simulate", "--trace", CHATS, "--total-kv-blocks", "100", "--kv-cpu-blocks", "400", "--link",
        "pcie=2MB/s,100us", "--policy", "simple_lru",
    ]).stdout
    assert f"link busy {told['link_busy']:,}" in shown
