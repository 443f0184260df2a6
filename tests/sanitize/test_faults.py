"""Twelve planted faults are named, faithful copies are never called wrong, and the actions do what they say."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kvbm_console.sanitize.__main__ import main
from kvbm_console.sanitize.checker import Corrupt
from kvbm_console.sanitize.ledger import CopyLedger
from kvbm_console.sanitize.planted import FAULTS, Play, named, play
from kvbm_console.sanitize.verdict import KINDS

SEEDS = 5


def numpy_arrays() -> dict[str, Any]:
    return {}


def torch_tensors() -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed: `make test-vllm` runs this")
    return {"make": torch.from_numpy}


def torch_as_a_device() -> dict[str, Any]:
    return {**torch_tensors(), "on_device": True}


ways = pytest.mark.parametrize("way", [numpy_arrays, torch_tensors, torch_as_a_device])


@ways
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, way: Callable[[], dict[str, Any]]) -> None:
    """With its kind, block, places, copy, last writer and missing edge; the play without it is silent."""
    for seed in range(SEEDS):
        wanted, findings = play(fault, seed=seed, **way())
        assert findings, f"{fault} was not found with seed {seed}"
        assert named(wanted, findings[0], fault), (wanted, findings[0])
        assert play(fault, seed=seed, planted=False, **way())[1] == []


def test_every_kind_but_the_unknown_one_is_planted() -> None:
    assert FAULTS.keys() | {"other-bytes"} == KINDS.keys()
    assert len(FAULTS) == 12


@pytest.mark.parametrize("fault", ["swapped-blocks", "torn-copy", "wrong-layer-offset", "truncated"])
def test_the_load_of_a_bad_slot_blames_the_store(fault: str) -> None:
    """The load has brought the slot's bytes as they are: its request is named, and the store's cause."""
    made = Play(fault)
    hashes, ways = [made.block() for _ in range(3)], list(zip(made.places, made.slots[:3], strict=False))
    for place, _ in ways:
        made.compute(place)
    made.store(1, "a", hashes, ways)
    for rank in made.ranks:
        rank.fault = ""
    back = list(zip(made.places[3:6], made.slots[:3], strict=False))
    made.load(2, "b", hashes, back)
    findings = made.findings()
    loads = [one for one in findings if one.stage == "load"]
    assert {(one.hash, one.kind, one.edge) for one in loads} == {
        (one.hash, one.kind, one.edge) for one in findings if one.stage == "copy"
    }
    assert {one.request for one in loads} == {"b"}
    assert all("store 1" in one.writer for one in loads)


@pytest.mark.parametrize("fault", ["swapped-blocks", "torn-copy", "wrong-layer-offset", "truncated", "wrong-stride"])
def test_a_fault_of_a_load_blames_the_load(fault: str) -> None:
    made = Play(fault)
    hashes, ways = [made.block() for _ in range(2)], list(zip(made.places, made.slots[:2], strict=False))
    for place, _ in ways:
        made.compute(place)
    for rank in made.ranks:
        rank.fault = ""
    made.store(1, "a", hashes, ways)
    for rank in made.ranks:
        rank.fault = fault
    targets = [place for place in range(4, 16, 2) if place not in (ways[0][0], ways[1][0])]
    made.load(2, "b", hashes, list(zip(targets, made.slots[:2], strict=False)))
    findings = made.findings()
    assert {one.kind for one in findings} == {fault}
    assert all("load 2" in one.writer and one.stage == "load" for one in findings)


@given(some.integers(0, 2**32), some.lists(some.tuples(some.booleans(), some.integers(1, 4)), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_faithful_copies_are_never_called_wrong(seed: int, steps: list[tuple[bool, int]]) -> None:
    """Random stores and loads of a host tier that forgets its oldest blocks, with places reused at once."""
    made = Play("", seed=seed)
    resident: dict[int, int] = {}
    number = 0
    for load, count in steps:
        number += 1
        places = made.dice.sample(made.places, count)
        if load and resident:
            hashes = made.dice.sample(sorted(resident), min(count, len(resident)))
            made.load(number, "l", hashes, [(place, resident[key]) for place, key in zip(places, hashes, strict=False)])
            continue
        hashes = [made.block() for _ in range(count)]
        for place in places:
            made.compute(place)
        slots = made.dice.sample(made.slots, count)
        resident = {key: slot for key, slot in resident.items() if slot not in slots}
        made.store(number, "s", hashes, list(zip(places, slots, strict=True)))
        resident.update(zip(hashes, slots, strict=True))
    assert made.findings() == []
    checker = made.ranks[0].checker
    assert checker.checked > 0
    assert checker.unknown == checker.mismatches == 0


@given(some.integers(0, 7), some.integers(0, 4_095), some.integers(1, 255), some.booleans())
@settings(max_examples=30, deadline=None)
def test_any_flipped_byte_is_found(layer: int, byte: int, by: int, on_host: bool) -> None:
    """A byte that changes while a block lies on the host, or on the device before it is read."""
    made = Play("")
    key, place, back, slot = made.block(), *made.places[:2], made.slots[0]
    made.compute(place)
    made.store(1, "a", [key], [(place, slot)])
    rank = made.ranks[0]
    if on_host:
        rank.host[layer][slot][byte] ^= np.int8(by - 128)
        made.load(2, "b", [key], [(back, slot)])
    else:
        made.load(2, "b", [key], [(back, slot)], end=False)
        rank.device[layer][back][byte] ^= np.int8(by - 128)
        rank.checker.end(2)
    if by == 128:  # a flip by nothing
        assert made.findings() == []
    else:
        (finding,) = made.findings()
        assert (finding.hash, finding.place, finding.slot, finding.copy) == (key, back, slot, 2)
        assert finding.kind == "other-bytes"  # no copy leaves such a hole, so none is blamed
        assert f"at bytes {byte:,} to {byte:,} of layer {layer}" in finding.writer


def test_report_changes_nothing_recompute_names_the_places_and_stop_raises() -> None:
    for action in ("report", "recompute"):
        made = Play("early-read", action=action)
        wanted = FAULTS["early-read"](made)
        assert made.ranks[0].checker.take_invalid() == ({wanted.place} if action == "recompute" else set())
        assert [one.kind for one in made.findings()] == ["early-read"]
        assert made.ranks[0].checker.take_invalid() == set()
    with pytest.raises(Corrupt, match="the place does not hold"):
        FAULTS["early-read"](Play("early-read", action="stop"))
    with pytest.raises(Corrupt, match="did not wait for layers 4 to 7"):
        FAULTS["torn-copy"](Play("torn-copy", action="stop"))


def test_a_forgotten_content_is_not_checked_and_not_wrong() -> None:
    ledger = CopyLedger(contents_max=4)
    made = Play("", ledger=ledger)
    hashes = [made.block() for _ in range(6)]
    ways = list(zip(made.places[:6], made.slots[:6], strict=True))
    for place, _ in ways:
        made.compute(place)
    for number, (key, way) in enumerate(zip(hashes, ways, strict=True), 1):
        made.store(number, "a", [key], [way])
    made.known.clear()  # the scheduler's side forgets before the worker's
    made.load(9, "b", hashes, [(place, slot) for place, (_, slot) in zip(made.places[6:], ways, strict=False)])
    assert made.findings() == []
    assert made.ranks[0].checker.unknown == 2
    assert made.ranks[0].checker.checked == 6 + 4
    assert len(ledger.contents) == len(ledger.by_whole) == 4
    assert [key for key, _, _ in ledger.contents] == hashes[2:]


def test_a_block_that_is_computed_again_replaces_its_content() -> None:
    """Rounding may differ from one computation of a block to the next."""
    made = Play("")
    key, (one, two, back), (first, second) = made.block(), made.places[:3], made.slots[:2]
    for number, (place, slot) in enumerate(((one, first), (two, second)), 1):
        made.compute(place)
        made.store(number, "a", [key], [(place, slot)])
    made.load(3, "b", [key], [(back, second)])
    assert made.findings() == []


def test_the_table_says_that_each_fault_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.split()[:3] for line in lines if line.split()[0] in FAULTS]
    assert told[:12] == [[fault, "2", "0"] for fault in FAULTS]
    with pytest.raises(SystemExit):
        main(["--seeds", "0"])
    assert "--seeds must be from 1 to 10000, and not 0." in capsys.readouterr().err
