"""``kvbm-console calibrate``: the step model of a real engine, from a recording or a table of it.

Law of this file: a file is never overwritten, and ``--profile`` of ``simulate`` takes the file of ``--out``.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kvbm_console.cli.compare import draw_residuals, require_plot
from kvbm_console.cli.output import number, print_result, warn
from kvbm_console.cli.params import FilePath, format_option
from kvbm_console.core.errors import UsageError
from kvbm_console.simulator.link_settings import LinkSetting

if TYPE_CHECKING:
    from kvbm_console.planning.calibrate import Again, Calibration, Compared
    from kvbm_console.planning.fitting import Errors
    from kvbm_console.planning.measured import Measured

TABLE_TOKENS: Final = 8_192
TABLE_REQUESTS: Final = 256
"""Limits of an iteration that the simulated engine shares."""


@click.command()
@click.argument("path", metavar="RUN|FILE", type=FilePath(exists=True, path_type=Path))
@click.option("--max-num-batched-tokens", type=click.IntRange(1, 2**20), metavar="N",
              help="Most tokens of one iteration of the engine that was measured.  [default: the most that a recording "
                   f"has, {TABLE_TOKENS} for a table]")
@click.option("--max-num-seqs", type=click.IntRange(1, 2**20), metavar="N",
              help="Most requests that the engine ran at once.  [default: the most that a recording has, "
                   f"{TABLE_REQUESTS} for a table]")
@click.option("--out", type=FilePath(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write times and links with their range, for --profile of simulate, compare, plan, serve and demo; "
                   "the file must not exist.")
@click.option("--plot", type=FilePath(path_type=Path, dir_okay=False), metavar="FILE",
              help="Draw how far each measurement is from its fit, as .svg or .png; needs the extra 'plot'.")
@format_option("text", "json")
def calibrate(
    path: Path, max_num_batched_tokens: int | None, max_num_seqs: int | None, out: Path | None, plot: Path | None,
    form: str,
) -> None:
    """Fit --step-base, --step-prefill-token and --step-decode-request to measurements of an engine.

    RUN is a recording, as the tap of a real engine makes it. FILE is a table in CSV, JSON or JSON lines. A table of
    steps has the columns prefill_tokens, decode_requests and duration_ns. A table of requests has arrived_ns,
    first_token_ns, finished_ns, prompt_tokens, output_tokens and, where the engine has a prefix cache, cached_tokens;
    simulate --requests-out writes such a table. Times may be in _us, _ms or _s instead of _ns.

    Of a recording with copies it also fits the links, with the time in the queue and on the wire apart.

    It prints the flags, and how far the step model is off with them. The requests are served again by the simulated
    engine: errors of first tokens and of time per token are those of that run. That engine has the device of the
    recording if nothing was found below it. Else a recording of the simulated engine is served by its machine, with
    tiers and copies, and one of a real engine with room for all requests and without copies. A recording with gaps or
    with requests of several sequences is not served again.
    """
    from kvbm_console.planning.calibrate import calibrate as fit
    from kvbm_console.planning.calibrate import residuals
    from kvbm_console.planning.copies import copies_in, fit_links
    from kvbm_console.planning.measured import read_measured
    from kvbm_console.recording.reader import Recording
    from kvbm_console.simulator.config import EngineConfig

    if out is not None and out.exists():
        raise UsageError(f"--out must name a new file, got {str(out)!r}, which exists")
    if plot is not None:
        require_plot(plot)
    measured = read_measured(path, max_num_batched_tokens or TABLE_TOKENS)
    limits = EngineConfig(
        g1_blocks=1, max_batch_tokens=max_num_batched_tokens or measured.tokens_most or TABLE_TOKENS,
        max_running=max_num_seqs or measured.running_most or TABLE_REQUESTS,
    )
    found = fit(str(path), measured, limits, None if max_num_batched_tokens or max_num_seqs else _again(path, measured))
    copies = copies_in(Recording.open(path)) if measured.kind == "recording" else []
    found = msgspec.structs.replace(found, links=fit_links(copies))
    if plot is not None:
        shown = {"steps": residuals(found, measured)}
        for link in found.links:
            shown[f"{link.link}, {link.route}"] = [
                link.residual(copy) for copy in copies if copy.route.label == link.route
            ]
        draw_residuals(plot, found.source, shown)
        warn(f"drawn into {plot}")
    if out is not None:
        try:
            out.write_text(_file(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out cannot be written: {error.strerror}, got {str(out)!r}") from None
        found = msgspec.structs.replace(found, written=str(out))
    print_result(form, found, lambda: _lines(found))


def _again(path: Path, measured: "Measured") -> "Again | None":
    """Serves the requests by the machine of a recording that has lower tiers; None if there is none."""
    from kvbm_console.planning.recorded import read_run
    from kvbm_console.planning.run import by_machine

    if measured.kind != "recording" or not measured.requests or measured.device is not None:
        return None
    load = read_run(str(path))
    return by_machine(load, measured.requests) if load.exact else None


def _lines(calibration: "Calibration") -> list[str]:
    from kvbm_console.planning.calibrate import NAMES

    times = (calibration.step_base_ns, calibration.step_prefill_token_ns, calibration.step_decode_request_ns)
    left = f", {number(calibration.left_out)} far from the others left out" if calibration.left_out else ""
    rows = [("source", f"{calibration.source}: {number(calibration.measurements)} measurements{left}, "
                       f"{number(calibration.requests)} requests")]
    rows += [
        (name, f"{number(time)} ns ± {error:,.0f}")
        for name, time, error in zip(NAMES, times, calibration.standard_errors_ns, strict=True)
    ]
    rows.append(("valid for", f"up to {calibration.prefill_tokens_max:,.0f} prompt tokens and "
                              f"{calibration.decode_requests_max:,.0f} decoding requests in a step"))
    if calibration.requests:
        blocks = calibration.device_blocks
        device = "room for all" if blocks is None else f"{number(blocks)} device blocks"
        machine = f"at most {number(calibration.max_num_batched_tokens)} tokens and " \
                  f"{number(calibration.max_num_seqs)} requests in a step, {device}"
        if calibration.tiers:
            machine = "the machine of the recording, with its lower tiers and copies"
        rows.append(("served again with", machine))
    tried = ("all", calibration.fitted), ("second half, by times of the first", calibration.second_half)
    for name, key in (("step times", "times"), ("ttft", "ttft"), ("tpot", "tpot")):
        rows += [
            (name, f"{which}: {_off(getattr(errors, key))}") for which, errors in tried
            if getattr(errors, key) is not None
        ]
    rows += [
        (f"link {link.link}", f"{link.bytes_per_s / 1e9:,.2f} GB/s after {link.latency_ns:,} ns "
                              f"± {link.standard_errors[0]:,.0f}, {link.route}: {number(link.copies)} copies of "
                              f"{link.bytes_min:,} to {link.bytes_max:,} bytes, {_off(link.errors)}; "
                              f"{100 * link.queue_share:.1f} % of their time in the queue")
        for link in calibration.links
    ]
    rows.append(("flags", calibration.flags))
    if calibration.written is not None:
        rows.append(("written", calibration.written))
    return [f"{name:<20} {words}" for name, words in rows]


def _off(errors: "Errors | Compared") -> str:
    from kvbm_console.planning.calibrate import Compared

    text = f"off by {100 * errors.median:.1f} % (median), {100 * errors.p90:.1f} % (p90)"
    if not isinstance(errors, Compared):
        return text
    return (
        f"{text}; p50 {errors.measured_p50_ms:,.3f} ms and predicted {errors.predicted_p50_ms:,.3f}, "
        f"p99 {errors.measured_p99_ms:,.3f} and {errors.predicted_p99_ms:,.3f}"
    )


def _file(found: "Calibration") -> str:
    from kvbm_console.planning.profile import StepProfile, profile_text

    step = StepProfile(
        found.step_base_ns, found.step_prefill_token_ns, found.step_decode_request_ns, found.prefill_tokens_max,
        found.decode_requests_max,
    )
    best = {link.link: link for link in sorted(found.links, key=lambda link: link.copies)}
    return profile_text(found.source, step, {
        LinkSetting(name, link.bytes_per_s, link.latency_ns): {
            "error": round(link.errors.median, 3), "bytes_min": link.bytes_min, "bytes_max": link.bytes_max,
        } for name, link in best.items()
    })
