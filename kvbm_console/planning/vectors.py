"""Replaying files of vectors: scenarios that were executed on an independent tiered cache, state after every operation.

Law of this file: a ``normative`` scenario must be reproduced exactly. A ``bug_compat`` scenario shows a defect and must
come out differently. In both the contracts hold after every operation, checked by walking the blocks rather than by the
store's counts.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvbm_console.core.errors import InternalError, UsageError
from kvbm_console.core.ids import EMPTY_HASH
from kvbm_console.files import read_bounded
from kvbm_console.planning.store import VECTORS, KVStore, StoreConfig
from kvbm_console.simulator.hashing import as_hash, blis_hash

SCHEMA: Final = "kv-vectors/1"
FILE_BYTES_MAX: Final = 256 * 1024 * 1024
_KINDS: Final = ("hash_vectors", "metric_vectors", "cli_vectors", "scenarios")
CLOSE: Final = 1e-12
"""Rates are quotients of the same whole numbers, so they differ by rounding at most."""


class HashVector(msgspec.Struct):
    """hash = sha256 of the previous hash in hex and ``token|`` for each token."""

    prev: str
    tokens: list[int]
    hash: str


class CliVector(msgspec.Struct):
    """Arguments that a program must refuse before any work."""

    args: str
    expect: str = ""


class Operation(msgspec.Struct):
    """An operation with its arguments, its result and the state afterwards. Missing numbers are 0, lists empty."""

    op: str
    req: str = ""
    input: list[int] = []
    output: list[int] = []
    tokens: list[int] = []
    reqs: list[str] = []
    progress: int = 0
    start: int = 0
    end: int = 0
    chunk: int = 0
    index: int = 0
    t: int = 0
    cached: str = "none"
    result: dict[str, Any] | None = None
    state: dict[str, Any] = {}


class VectorScenario(msgspec.Struct):
    """A fresh cache and the operations on it."""

    name: str
    status: str
    config: StoreConfig
    ops: list[Operation]
    contracts: list[str] = []
    note: str = ""
    bug: str = ""
    initial: dict[str, Any] = {}


class Vectors(msgspec.Struct):
    """A file of vectors. Each vector is read by itself, so that an unknown vector does not hide the others."""

    schema: str
    hash_vectors: list[msgspec.Raw] = []
    metric_vectors: list[msgspec.Raw] = []
    cli_vectors: list[msgspec.Raw] = []
    scenarios: list[msgspec.Raw] = []
    others: list[str] = []
    """Unknown kinds of vectors in the file."""


class VectorLine(msgspec.Struct, frozen=True):
    """The verdict on a vector; ``why`` is its error, empty without an error."""

    name: str
    kind: str
    why: str = ""

    @property
    def ok(self) -> bool:
        """True without an error."""
        return not self.why


def read_vectors(path: Path) -> Vectors:
    """The vectors of a file. Raises ``UsageError`` with one sentence."""
    try:
        data = read_bounded(path, FILE_BYTES_MAX)
        vectors = msgspec.json.decode(data, type=Vectors)
        vectors.others = [
            key for key, value in msgspec.json.decode(data, type=dict[str, Any]).items()
            if isinstance(value, list) and key not in Vectors.__struct_fields__
        ]
    except UsageError as error:
        raise UsageError(f"--vectors {error}") from None
    except OSError as error:
        raise UsageError(f"--vectors {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"--vectors {path} is no file of vectors: {error}") from error
    if vectors.schema != SCHEMA:
        raise UsageError(f"--vectors {path} must have the schema {SCHEMA}, got {vectors.schema!r}")
    return vectors


def check_vectors(vectors: Vectors, refuses: Callable[[str], str]) -> Iterator[VectorLine]:
    """The verdict on every vector, in the order of the file.

    ``refuses`` runs a command line and returns the fault of the refusal, empty for a correct refusal.
    """
    for index, raw in enumerate(vectors.hash_vectors):
        yield _line(f"hash[{index}]", "hash", raw, HashVector, _check_hash)
    for index, raw in enumerate(vectors.metric_vectors):
        formula = _field(raw, "fn")
        yield _line(f"metric[{index}]{' ' if formula else ''}{formula}", "metric", raw, dict[str, Any], _check_metric)
    for raw in vectors.cli_vectors:
        yield _line(f"cli {_field(raw, 'args')}", "cli", raw, CliVector, lambda vector: refuses(vector.args))
    for index, raw in enumerate(vectors.scenarios):
        name = _field(raw, "name") or f"scenario[{index}]"
        yield _line(name, _field(raw, "status") or "scenario", raw, VectorScenario, check_scenario)
    for kind in vectors.others:
        yield VectorLine(kind, "unknown", f"vectors of this kind are not known, only {', '.join(_KINDS)}")


def _field(raw: msgspec.Raw, key: str) -> str:
    """The value of a vector under this key, empty without the key."""
    value = msgspec.json.decode(raw)
    return str(value.get(key, "")) if isinstance(value, dict) else ""


def _line(name: str, kind: str, raw: msgspec.Raw, of: Any, check: Callable[[Any], str]) -> VectorLine:
    """The verdict on a vector. A vector that cannot be read, or that breaks the store, fails with that reason."""
    try:
        return VectorLine(name, kind, check(msgspec.json.decode(raw, type=of)))
    except (msgspec.DecodeError, UsageError) as error:
        return VectorLine(name, kind, f"it cannot be read: {error}")


def _check_hash(vector: HashVector) -> str:
    got = blis_hash(vector.prev, vector.tokens)
    return "" if got == vector.hash else f"{got} is not {vector.hash}"


def _check_metric(metric: dict[str, Any]) -> str:
    arguments = {key: value for key, value in metric.items() if key not in ("fn", "expect")}
    formula = VECTORS.get(metric.get("fn", ""))
    if formula is None:
        return f"the metric {metric.get('fn')!r} is not known"
    try:
        got = formula(**arguments)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        return f"its arguments {arguments} are refused: {error}"
    return "" if _same(got, metric.get("expect")) else f"{got} is not {metric.get('expect')}"


# --- scenarios ---


def check_scenario(scenario: VectorScenario) -> str:
    """The first error of a scenario, empty without an error."""
    if scenario.status not in ("normative", "bug_compat"):
        return f"the status {scenario.status!r} is neither normative nor bug_compat"
    store = KVStore(scenario.config)
    normative = scenario.status == "normative"
    different = _difference(store.state(), scenario.initial) if scenario.initial else ""
    if different:
        return f"at the start: {different}"
    seen = 0
    outputs: dict[str, list[int]] = {}
    for number, operation in enumerate(scenario.ops):
        where = f"operation {number} ({' '.join(filter(None, (operation.op, operation.req)))})"
        before = store.state()
        run = _RUN.get(operation.op)
        if run is None:
            return f"{where} is not known"
        if operation.output:
            outputs[operation.req] = operation.output
        operation.output = outputs.get(operation.req, [])
        try:
            result = run(store, operation)
        except IndexError:
            return f"{where} names an output token that {operation.req!r} does not have"
        except InternalError as error:
            return f"{where}: BC-9: {error}"
        broken = _broken_contract(store, operation, result, before)
        if broken:
            return f"{where}: {broken}"
        different = _difference(result, operation.result, "result") or _difference(
            store.state(compatible=normative), operation.state
        )
        seen += bool(different)
        if different and normative:
            return f"{where}: {different}"
    if not normative and not seen:
        return "the defect that was observed is here too"
    return ""


def _alloc(store: KVStore, operation: Operation) -> dict[str, Any]:
    prompt = operation.input
    if operation.progress >= len(prompt):
        return {"ok": store.decode(operation.req, _output_token(operation, operation.start - len(prompt)))}
    cached = store.lookup(prompt) if operation.cached == "auto" else []
    return {"ok": store.allocate(operation.req, prompt, operation.start, operation.end, cached)}


def _output_token(operation: Operation, index: int) -> int:
    """The token of the request's output at ``index``. Raises ``IndexError`` without such a token."""
    if index < 0:
        raise IndexError(index)
    return operation.output[index]


def _admit(store: KVStore, operation: Operation) -> dict[str, Any]:
    cached, start, end, ok = store.admit(operation.req, operation.input, operation.chunk)
    return {"ok": ok, "cached": cached, "start": start, "end": end}


def _release(store: KVStore, operation: Operation) -> None:
    store.release(operation.req)


def _mirror(store: KVStore, operation: Operation) -> None:
    store.mirror(operation.reqs)


def _clock(store: KVStore, operation: Operation) -> None:
    store.clock(operation.t)


_RUN: Final[dict[str, Callable[[KVStore, Operation], dict[str, Any] | None]]] = {
    "alloc": _alloc,
    "admit": _admit,
    "decode": lambda store, operation: {"ok": store.decode(operation.req, _output_token(operation, operation.index))},
    "lookup": lambda store, operation: {"blocks": store.lookup(operation.tokens)},
    "release": _release,
    "mirror": _mirror,
    "clock": _clock,
    "pending": lambda store, operation: {"ticks": store.pending()},
    "consume": lambda store, operation: {"ticks": store.consume()},
}
"""Operation to the function that runs it and returns the result in the form of the vectors."""


# --- contracts, by walking ---


def _broken_contract(
    store: KVStore, operation: Operation, result: dict[str, Any] | None, before: dict[str, Any]
) -> str:
    """The first contract that does not hold after an operation, empty when all do."""
    pool = store.pool
    problems = pool.audit(store.requests.values())
    if problems:
        return f"BC-9: {problems[0]}"
    refused = result is not None and result.get("ok") is False
    pure = operation.op in ("lookup", "pending") or refused
    if pure and _difference(store.state(), before):
        return f"BC-3: it changed {_difference(store.state(), before)}"
    if len(store.host.resident) > store.config.cpu_blocks:
        return f"BC-10: {len(store.host.resident)} blocks in a host tier of {store.config.cpu_blocks}"
    for request, blocks in store.requests.items():
        problem = _broken_chain(store, request, blocks)
        if problem:
            return problem
    if operation.op == "lookup":
        return _broken_lookup(store, operation.tokens, result)
    return ""


def _broken_chain(store: KVStore, request: str, blocks: Sequence[int]) -> str:
    """A request holds exactly the blocks of its tokens, and every full one carries the hash of its prefix."""
    tokens, size = store.tokens_of[request], store.config.block_size
    if len(blocks) != -(-len(tokens) // size):
        return f"BC-5: {request} has {len(blocks)} blocks for {len(tokens)} tokens"
    previous = ""
    for at in range(len(tokens) // size):
        previous = blis_hash(previous, tokens[at * size : (at + 1) * size])
        if store.pool.hash_of[blocks[at]] != as_hash(bytes.fromhex(previous)):
            return f"BC-3: block {blocks[at]} of {request} does not hold its tokens"
    return ""


def _broken_lookup(store: KVStore, tokens: Sequence[int], result: dict[str, Any] | None) -> str:
    """A lookup finds the longest prefix whose blocks are all resident."""
    size, previous, longest = store.config.block_size, "", 0
    standing = {key for key in store.pool.hash_of if key != EMPTY_HASH}
    for at in range(0, len(tokens) - size + 1, size):
        previous = blis_hash(previous, tokens[at : at + size])
        if as_hash(bytes.fromhex(previous)) not in standing:
            break
        longest += 1
    found = len((result or {}).get("blocks", ()))
    return "" if found == longest else f"BC-5: {found} blocks found where {longest} stand"


# --- comparing ---


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, (int, float)) and isinstance(expected, (int, float)):
        return abs(got - expected) <= CLOSE
    return bool(got == expected)


def _difference(got: Any, expected: Any, path: str = "") -> str:
    """The first difference of two plain values, empty without a difference; keys beyond ``expected`` are ignored."""
    if isinstance(got, dict) and isinstance(expected, dict):
        if path.endswith("requests") and got.keys() != expected.keys():
            return f"{path}: {sorted(got)} is not {sorted(expected)}"
        for key, value in expected.items():
            if key not in got:
                return f"{path}.{key} is missing".lstrip(".")
            difference = _difference(got[key], value, f"{path}.{key}".lstrip("."))
            if difference:
                return difference
        return ""
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, pair in enumerate(zip(got, expected, strict=True)):
            difference = _difference(*pair, f"{path}[{index}]")
            if difference:
                return difference
        return ""
    return "" if _same(got, expected) else f"{path or 'value'} {got!r} is not {expected!r}"
