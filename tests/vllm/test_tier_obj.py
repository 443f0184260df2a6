"""The tap around vLLM's own ``obj`` tier: NIXL and an S3 server in this process. Run by ``make test-vllm``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")
pytest.importorskip("nixl", reason="vLLM's obj tier copies by NIXL")
pytest.importorskip("moto", reason="an S3 server in this process")

import boto3
from moto.server import ThreadedMotoServer

from tests.vllm.tiered import Below, key, tapped

pytestmark = pytest.mark.timeout(600)
KEYS = [key(number) for number in range(1, 17)]
BUCKET = "blocks"
LOGIN = {"access_key": "a", "secret_key": "b", "region": "us-east-1"}


@pytest.fixture
def store() -> Iterator[tuple[Any, str]]:
    """A client of an S3 server with an empty bucket, and the server's address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", aws_access_key_id=LOGIN["access_key"],
                          aws_secret_access_key=LOGIN["secret_key"], region_name=LOGIN["region"])
    client.create_bucket(Bucket=BUCKET)
    yield client, f"http://{host}:{port}"
    server.stop()


def test_a_damaged_object_is_found_and_computed_again(tmp_path: Path, store: tuple[Any, str]) -> None:
    client, address = store
    entry = {"type": "obj", "io_threads": 2,
             "store_config": {"bucket": BUCKET, "endpoint_override": address, "scheme": "http", **LOGIN}}
    one = Below(tmp_path, [tapped(entry, integrity="fail")])
    try:
        one.store(KEYS)
        one.forget_host()
        assert one.fetch(KEYS) == (KEYS, [])
        objects = {found["Key"]: found["Size"] for found in client.list_objects_v2(Bucket=BUCKET)["Contents"]}
        assert list(objects.values()) == [one.size] * len(KEYS)
        (name,) = [name for name in objects if KEYS[3][:-4].hex() in name]
        content = bytearray(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        content[77] ^= 4
        client.put_object(Bucket=BUCKET, Key=name, Body=bytes(content))
        for _ in range(2):
            one.forget_host()
            assert one.fetch(KEYS) == ([each for each in KEYS if each != KEYS[3]], [])
        gauges = one.tiers[0].gauges()
        assert (gauges["damaged_blocks"], gauges["unknown_blocks"], gauges["check_errors"]) == (1, 0, 0)
    finally:
        one.close()
