"""Generates ``kvbm_console/wire/v1`` from the contract beside this file.

Law of this file: the committed code is exactly what ``python proto/generate.py`` writes; a test compares the two.
Only messages are generated. The service has no stubs: server and client pass batches on as the bytes they are, so
they register and call methods by the descriptors' names (``kvbm_console.wire.service``).
"""

import sys
from importlib import import_module, resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = "kvbm_console/wire/v1/console.proto"


def generate(target: Path) -> None:
    """Write ``console_pb2.py`` and its type stub below ``target``; exits with the compiler's status on an error."""
    protoc = import_module("grpc_tools.protoc")
    builtin = str(resources.files("grpc_tools") / "_proto")
    paths = [f"-I{ROOT / 'proto'}", f"-I{builtin}"]
    status = protoc.main(["protoc", *paths, f"--python_out={target}", f"--pyi_out={target}", PROTO])
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
