"""The contract: what is generated from the structs is fresh, and another schema takes another minor version."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (
    "proto/kvbm_console/wire/v1/console.proto", "proto/versions.json", "kvbm_console/wire/v1/console_pb2.py",
    "kvbm_console/wire/v1/console_pb2.pyi",
)


def test_the_contract_its_code_and_its_versions_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    made = subprocess.run([sys.executable, str(ROOT / "proto" / "generate.py"), str(tmp_path)], capture_output=True)
    assert made.returncode == 0, made.stderr.decode()
    for name in GENERATED:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), f"{name} is stale: run make proto"


def test_a_schema_that_changed_under_its_version_is_refused() -> None:
    generator = runpy.run_path(str(ROOT / "proto" / "generate.py"))
    known, present = json.loads((ROOT / "proto" / "versions.json").read_text()), generator["digests"]()
    assert generator["with_versions"](known, present) == known
    for version in present:
        with pytest.raises(SystemExit, match=f"{version}: raise that version"):
            generator["with_versions"](known | {version: "another digest"}, present)


def test_a_field_is_part_of_the_digest() -> None:
    generator = runpy.run_path(str(ROOT / "proto" / "generate.py"))
    from google.protobuf.descriptor_pb2 import DescriptorProto

    message = DescriptorProto(name="SlotClosed")
    before = list(generator["_declared"](message))
    message.field.add(name="slot", number=1)
    assert generator["_digest"](before) != generator["_digest"](generator["_declared"](message))
