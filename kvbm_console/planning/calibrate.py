"""``calibrate``: the step model of a real engine from measurements.

An iteration takes base + prompt tokens x a + decoding requests x b. The three times are fitted by least squares of the
relative error, none below 0, because a step of 100 ms may be off by more than a step of 5 ms. For each choice of times
at 0 the best other times are found, and the best choice counts. With three times that is exact. For example, three
steps of (0, 1) in 5 ms, (0, 3) in 7 ms and (1000, 3) in 12 ms give the times 4 ms, 5 us and 1 ms.

Outliers (a step that compiled a kernel) are left out and counted. A time that the measurements do not determine is
refused: with equal steps alone, base and requests cannot be told apart.

Law of this file: every prediction is compared with a measurement. Errors of step times, first tokens and time per token
come with the times. Errors of the second half come from times that were fitted to the first half alone.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from kvbm_console.analysis.nearest_rank import nearest_rank
from kvbm_console.core.errors import UsageError
from kvbm_console.planning.copies import LinkFit
from kvbm_console.planning.fitting import Errors, Matrix, errors_of, nonnegative, standard_errors
from kvbm_console.planning.ledger import MachineLedger
from kvbm_console.planning.measured import SERVED_MAX, Device, Equation, Measured, Served
from kvbm_console.planning.meter import RequestRecord
from kvbm_console.simulator.config import EngineConfig
from kvbm_console.simulator.workloads import Capacities, GivenRequests, Request

SCHEMA: Final = "kvbm-console.calibrate/1"
NAMES: Final = ("step-base", "step-prefill-token", "step-decode-request")
"""The flags, in the order of the coefficients."""
COUNTED: Final = ("iterations", "prompt tokens", "decoding requests")
ROWS_MIN: Final = 12
"""Four measurements for each time; fewer determine no errors."""
ALIKE: Final = 1e-6
"""A column is a copy of the others if they leave less than this share of it unexplained."""
UNSURE: Final = 0.25
"""A time is refused when its standard error moves a step of the largest count by more than this share."""
OUTLIER_MADS: Final = 8.0
OUTLIER_MIN: Final = 0.05
"""An outlier has an error above ``OUTLIER_MADS`` median errors and above this share."""
ROUNDS: Final = 4
"""Rounds of fit, weights and outliers; the results settle in two or three."""
BLOCK_TOKENS: Final = 1_024
"""Block size of the machine that serves the measured requests again. The blocks are counted and never shared."""

class Compared(Errors, frozen=True):
    """Errors of single requests, and measured and predicted percentiles of all requests."""

    measured_p50_ms: float
    predicted_p50_ms: float
    measured_p99_ms: float
    predicted_p99_ms: float


class Prediction(msgspec.Struct, frozen=True):
    """The errors of predictions; null without measurements."""

    times: Errors | None
    """Errors of step times; for a table of requests, of the times after their first tokens."""
    ttft: Compared | None
    tpot: Compared | None
    """Errors of the time for each token after the first."""


class Calibration(msgspec.Struct, frozen=True):
    """The fitted times, in nanoseconds, and the errors of their predictions."""

    schema: str
    source: str
    kind: str
    """recording, steps or requests."""
    measurements: int
    left_out: int
    """Number of outliers."""
    requests: int
    max_num_batched_tokens: int
    max_num_seqs: int
    """Limits with which the requests were served again: from the flags, else the largest of the recording."""
    device_blocks: int | None
    """Device blocks with which the requests were served again, from a recording without hits below the device. Null
    stands for as many blocks as the requests need, and then no block is shared."""
    step_base_ns: int
    step_prefill_token_ns: int
    step_decode_request_ns: int
    standard_errors_ns: tuple[float, float, float]
    """Standard errors of the three times."""
    prefill_tokens_max: float
    decode_requests_max: float
    """Largest counts of an average step; beyond them the times are a guess."""
    fitted: Prediction
    second_half: Prediction
    """Predictions by times that were fitted to the first half alone."""
    flags: str
    """The times as flags of the command line."""
    written: str | None
    """The configuration file that was written."""
    tiers: bool = False
    """True if the requests were served again by the recorded machine, with its lower tiers and copies."""
    links: list[LinkFit] = []
    """The links of a recording with copies, with queue and wire apart."""


class Fit(msgspec.Struct, frozen=True):
    """Coefficients in nanoseconds, in the order of ``NAMES``."""

    times: tuple[float, float, float]
    errors: tuple[float, float, float]
    left_out: int

    def config(self, limits: EngineConfig) -> EngineConfig:
        """The engine with these times."""
        base, prefill, decode = (round(value) for value in self.times)
        return msgspec.structs.replace(
            limits, step_base_ns=max(1, base), prefill_token_ns=prefill, decode_request_ns=decode
        )


Again = Callable[[EngineConfig], list[tuple[Served, RequestRecord]]]
"""Serves the measured requests again with these step times."""


def calibrate(source: str, measured: Measured, limits: EngineConfig, again: Again | None = None) -> Calibration:
    """Fit the times and measure their errors. ``limits`` holds the most tokens and requests of a measured iteration.
    ``again`` stands for ``serve``.

    Raises ``UsageError`` when the measurements do not determine a time.
    """
    equations = measured.equations
    fit = fit_times(source, equations)
    config = fit.config(limits)
    machine = again is not None
    if again is None:
        def again(config: EngineConfig) -> list[tuple[Served, RequestRecord]]:
            return serve(config, measured.requests, measured.device)

    middle = len(equations) // 2
    half_ns = equations[middle].at_ns
    try:
        earlier: Fit | None = fit_times(source, equations[:middle])
    except UsageError:
        earlier = None
    each = [equation.steps for equation in equations]
    return Calibration(
        schema=SCHEMA, source=source, kind=measured.kind, measurements=len(equations), left_out=fit.left_out,
        requests=len(measured.requests), max_num_batched_tokens=limits.max_batch_tokens,
        max_num_seqs=limits.max_running,
        device_blocks=None if measured.device is None else measured.device.blocks, step_base_ns=config.step_base_ns,
        step_prefill_token_ns=config.prefill_token_ns, step_decode_request_ns=config.decode_request_ns,
        standard_errors_ns=fit.errors,
        prefill_tokens_max=max(row.prefill_tokens / steps for row, steps in zip(equations, each, strict=True)),
        decode_requests_max=max(row.decode_requests / steps for row, steps in zip(equations, each, strict=True)),
        fitted=_tried(config, equations, again, None),
        second_half=Prediction(None, None, None) if earlier is None else _tried(
            earlier.config(limits), equations[middle:], again, half_ns
        ),
        flags=" ".join(f"--{name} {value}ns" for name, value in zip(
            NAMES, (config.step_base_ns, config.prefill_token_ns, config.decode_request_ns), strict=True
        )),
        written=None, tiers=machine,
    )


def residuals(found: Calibration, measured: Measured) -> list[tuple[float, float]]:
    """For each measurement the predicted time in milliseconds, and by how many percent the measured one is longer."""
    pairs = []
    for row in measured.equations:
        told_ns = (
            row.steps * found.step_base_ns + row.prefill_tokens * found.step_prefill_token_ns
            + row.decode_requests * found.step_decode_request_ns
        )
        pairs.append((told_ns / 1e6, 100 * (row.time_ns / told_ns - 1)))
    return pairs


# --- fitting ---


def fit_times(source: str, equations: Sequence[Equation]) -> Fit:
    """The three times. Raises ``UsageError`` with the first time that is not determined."""
    if len(equations) < ROWS_MIN:
        raise UsageError(f"{source} must have at least {ROWS_MIN} measurements of busy steps, got {len(equations)}")
    rows = np.array([equation[1:4] for equation in equations], dtype=np.float64)
    times = np.array([equation.time_ns for equation in equations], dtype=np.float64)
    if not (times > 0).all():
        raise UsageError(f"{source} must have times above 0, got {times.min():g} ns")
    _require_determined(source, rows / times[:, None])
    kept = np.ones(len(times), dtype=bool)
    weights = 1 / times
    fitted = np.zeros(3)
    for _ in range(ROUNDS):
        fitted = nonnegative(rows[kept] * weights[kept, None], times[kept] * weights[kept])
        predicted = rows @ fitted
        off = np.abs(times / np.maximum(predicted, 1) - 1)
        kept = off <= max(OUTLIER_MIN, OUTLIER_MADS * float(np.median(off)))
        weights = 1 / np.maximum(predicted, 1)  # by the expected time, because a long time by chance would count less
    spread = standard_errors(rows[kept] * weights[kept, None], times[kept] * weights[kept], fitted)
    errors = spread[0], spread[1], spread[2]
    typical = float(np.median(times / rows[:, 0]))
    most = (rows / rows[:, :1]).max(axis=0)
    for name, counted, error, count, time_ns in zip(NAMES, COUNTED, errors, most, fitted, strict=True):
        if not error * count <= UNSURE * (typical + time_ns * count):
            raise UsageError(
                f"{source} cannot tell --{name}: its {counted} vary too little, the time would be wrong by "
                f"{error:,.0f} ns"
            )
    return Fit((float(fitted[0]), float(fitted[1]), float(fitted[2])), errors, int(len(times) - kept.sum()))


def _require_determined(source: str, rows: Matrix) -> None:
    """Refuse a column that is 0 or follows from the others; prompt tokens and requests before the base."""
    for at in (1, 2, 0):
        column = rows[:, at]
        others = np.delete(rows, at, axis=1)
        rest = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        if float(np.linalg.norm(rest)) <= ALIKE * float(np.linalg.norm(column)):
            why = "all 0" if not column.any() else "the same in all of them, or follow from the others"
            raise UsageError(f"{source} cannot tell --{NAMES[at]}: its {COUNTED[at]} are {why}")


# --- trying ---


def _tried(
    config: EngineConfig, equations: Sequence[Equation], again: Again, since_ns: float | None
) -> Prediction:
    """Errors of times, and of the requests that arrived from ``since_ns`` on (None: of all requests) and were not held.
    """
    times = [
        abs(
            row.steps * config.step_base_ns + row.prefill_tokens * config.prefill_token_ns
            + row.decode_requests * config.decode_request_ns - row.time_ns
        ) / row.time_ns for row in equations
    ]
    firsts: list[tuple[float, float]] = []
    tokens: list[tuple[float, float]] = []
    for real, served in again(config):
        if real.held or (since_ns is not None and real.arrived_ns < since_ns):
            continue
        assert served.first_token_ns is not None
        assert served.finished_ns is not None
        firsts.append((real.first_token_ns - real.arrived_ns, served.first_token_ns - served.arrived_ns))
        if real.output_tokens > 1:
            tokens.append((
                (real.finished_ns - real.first_token_ns) / (real.output_tokens - 1),
                (served.finished_ns - served.first_token_ns) / (real.output_tokens - 1),
            ))
    return Prediction(errors_of(times), _compared(firsts), _compared(tokens))


def _compared(pairs: list[tuple[float, float]]) -> Compared | None:
    """The errors of (measured, predicted) pairs. A pair without time has no relative error and is left out."""
    errors = errors_of([abs(predicted - real) / real for real, predicted in pairs if real > 0])
    if errors is None:
        return None
    real_ms, predicted_ms = (sorted(value / 1e6 for value in column) for column in zip(*pairs, strict=True))
    return Compared(
        errors.values, errors.median, errors.p90,
        *(nearest_rank(times, percent) for percent in (50, 99) for times in (real_ms, predicted_ms)),
    )


def serve(
    config: EngineConfig, requests: Sequence[Served], device: Device | None = None
) -> list[tuple[Served, RequestRecord]]:
    """Serve at most ``SERVED_MAX`` of the requests on the simulated engine. Returns each with its simulated record.

    Without a device a request computes the tokens that it had to compute, and there is room for all requests.
    """
    workload = _again(requests[:SERVED_MAX], device)
    engine = msgspec.structs.replace(config, g1_blocks=workload.capacities.g1_blocks)
    records: dict[int, RequestRecord] = {}

    def ended(record: RequestRecord) -> None:
        records[int(record.request)] = record

    MachineLedger(engine, workload, workload.capacities.block_tokens, ended=ended).run_to_end()
    return [(requests[at], records[at]) for at in sorted(records) if records[at].first_token_ns is not None]


def _again(served: Sequence[Served], device: Device | None) -> GivenRequests:
    """Measured requests as a workload, at their times; without a device no block is shared."""
    blocks, size = device or (
        sum(-(-(real.computed_tokens + real.output_tokens) // BLOCK_TOKENS) for real in served), BLOCK_TOKENS
    )
    requests: list[Request] = []
    key = 1
    since_ns = served[0].arrived_ns if served else 0
    for at, real in enumerate(served):
        hashes, output_hashes, prompt = real.hashes, real.output_hashes, real.prompt_tokens
        if device is None:
            prompt = real.computed_tokens
            full = prompt // BLOCK_TOKENS
            total = (prompt + real.output_tokens) // BLOCK_TOKENS
            hashes, output_hashes = tuple(range(key, key + full)), tuple(range(key + full, key + total))
            key += total
        requests.append(Request(
            str(at), round(real.arrived_ns - since_ns), hashes, output_hashes, prompt, real.output_tokens
        ))
    return GivenRequests("measured", requests, Capacities(size, max(1, min(2**22, blocks)), 0, 0, 8_192))
