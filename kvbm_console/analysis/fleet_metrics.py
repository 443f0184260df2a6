"""The figures of a fleet as metrics, for a Prometheus that alerts.

Every figure is a gauge, also a sum: it falls when a daemon leaves the fleet.

Law of this file: a daemon that is gone has its samples, and unknown figures are left out.
"""

from collections import Counter

from kvbm_console.analysis.fleet import GONE, FleetReport
from kvbm_console.metrics.exposition import Family, render

QUANTILES = (0.5, 0.9, 0.99)


def exposition(report: FleetReport) -> str:
    """The text format of Prometheus."""
    return render([*_daemons(report), *_sums(report)])


def _daemons(report: FleetReport) -> list[Family]:
    stands = Family("kvbm_fleet_daemons", "Daemons by how they stand. A fault or a gone one needs a person.")
    up = Family("kvbm_fleet_daemon_up", "1 if the daemon answers, else 0.")
    silent = Family("kvbm_fleet_daemon_silent_seconds", "Time since the last answer. Growing: the daemon is gone.")
    rate = Family("kvbm_fleet_daemon_hit_ratio", "Share of the prompt blocks that any tier had. Far below the others: "
                  "requests are routed past its cache.")
    holds = Family("kvbm_fleet_daemon_held_requests", "Requests that a breakpoint holds. Above 0 for long: somebody "
                   "forgot one.")
    problems = Family("kvbm_fleet_daemon_problems", "Problems by level and lint, at most eight of each daemon and "
                      "those of its parts.")
    for word, count in report.stands.items():
        stands.add(count, {"stands": word})
    names = Counter(row.name for row in report.rows)
    for row in report.rows:
        daemon = {"daemon": row.name}
        if names[row.name] > 1:  # a page that has a sample twice is refused as a whole
            daemon["target"] = row.target
        up.add(row.stands != GONE, daemon)
        silent.add(row.silent_s, daemon)
        rate.add(row.hit_rate, daemon)
        if row.summary is not None:
            holds.add(row.summary.holds, daemon)
            for (level, lint), count in Counter((each.level, each.lint) for each in row.summary.problems).items():
                problems.add(count, {**daemon, "level": level, "lint": lint})
    dropped = Family("kvbm_fleet_dropped_daemons", "Daemons without samples, because more publish than a view keeps. "
                     "Above 0: somebody publishes under ever new names.", [((), float(report.dropped))])
    return [stands, dropped, up, silent, rate, holds, problems]


def _sums(report: FleetReport) -> list[Family]:
    digest, reuse = report.digest, report.reuse
    counts = [
        ("kvbm_fleet_prompt_blocks", "Prompt blocks of the requests that the daemons remember.", digest.prompt_blocks),
        ("kvbm_fleet_held_blocks", "Those that some daemon held, as far as it is known. Far above the captured ones: "
         "routing misses caches.", reuse.held),
        ("kvbm_fleet_captured_blocks", "Those that the daemon of their request held. Far above the delivered ones: "
         "loads fail.", reuse.captured),
        ("kvbm_fleet_delivered_blocks", "Those that came from a cache.", reuse.delivered),
        ("kvbm_fleet_missed_blocks", "Those that were computed although a cache could have held them.",
         digest.missed_blocks),
        ("kvbm_fleet_finished_requests", "Requests that ended.", digest.finished),
        ("kvbm_fleet_preemptions", "Preempted requests. Growing: device memory is too small.", digest.preemptions),
    ]
    families = [Family(name, text, [((), float(count))]) for name, text, count in counts]
    for name, text, times in (
        ("kvbm_fleet_first_token_seconds", "Time to the first token, at most 2 % too high.", digest.first_token),
        ("kvbm_fleet_latency_seconds", "Time of a request, at most 2 % too high.", digest.latency),
    ):
        family = Family(name, text)
        for quantile in QUANTILES:
            ns = times.quantile(quantile)
            family.add(None if ns is None else ns / 1e9, {"quantile": str(quantile)})
        families.append(family)
    return families
