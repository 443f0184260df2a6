"""Gets from a question to the event that decides it, with the tools alone and without a model.

It reads the question for a request's name and for a tier, and goes on by what the tools answer: the kind of a finding,
a reason of ``why``, a state of prefetch. It knows no case by its name.

Law of this file: every step is a call of a tool, and the answer is the number of an event that a tool has shown.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

Call = Callable[..., Awaitable[dict[str, Any]]]
TIERS = {"host": "G2", "disk": "G3", "device": "G1"}


def rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an answer as objects."""
    return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]


async def solve(question: str, call: Call) -> int | None:
    """The number of the deciding event, None when the tools show none."""
    seen = await call("overview")
    findings = rows(await call("doctor"))
    for finding in findings:
        found = await by_finding(finding, call)
        if found is not None:
            return found
    prefetch = seen["prefetch"]
    if "prefetch" in question.lower() and prefetch is not None and prefetch["limits"]:
        return int(rows(await call("when", expression="kind = PrefetchLimited"))[0]["seq"])
    named = [name for name in re.findall(r"[\w.-]*\w", question) if re.search(r"\w\.\w|\d", name)]
    return await by_misses(named[0], question, call) if named else None


async def by_finding(finding: dict[str, Any], call: Call) -> int | None:
    """The deciding event of a finding, by its kind."""
    seq, request = int(finding["seq"]), finding["request"]
    if finding["lint"] in ("held", "wrong_bytes", "silent"):
        return seq
    if finding["lint"] == "stuck":  # the event with which the copy that it waits for began
        about = re.search(r"op (\d+)", finding["because"])
        if about is None:
            return None
        shown = rows(await call("events", filter=f"operation = {about[1]}"))
        started = [row["seq"] for row in shown if row["kind"] == "OperationStarted"]
        return int(started[-1]) if started else None
    if finding["lint"] == "preempt_loop":  # the third time makes it a loop
        shown = rows(await call("when", expression=f'request = "{request}" and state = preempted'))
        return [int(row["seq"]) for row in shown if row["became"]][2]
    if finding["lint"] == "lost":  # the last event that is there
        shown = rows(await call("events", first=str(seq - 5), last=str(seq + 60)))
        gap = next(at for at, row in enumerate(shown) if row["kind"] == "Gap")
        return int(shown[gap - 1]["seq"])
    if finding["lint"] == "failed_copies":  # the rank that said so
        shown = rows(await call("events", filter="kind = OperationReported and not ok"))
        return int(shown[0]["seq"]) if shown else None
    return None  # a verdict says that something is wrong, and other findings say where it began


async def by_misses(request: str, question: str, call: Call) -> int | None:
    """The event that took the first missed block of a request from the tier that the question is about."""
    first = rows(await call("why", request=request))[0]
    tier = next((tier for word, tier in TIERS.items() if word in question and "empty" not in question), None)
    if tier is not None:
        block = rows(await call("why", request=request, block=int(first["blocks"].split("-")[0])))[0]
        for text in reversed([f"{block['text']} (event {block['seq']})", *block["also"]]):
            about = re.search(rf"evicted from {tier} .*\(event (\d+)\)", text)
            if about is not None:
                return int(about[1])
    return None if first["seq"] is None else int(first["seq"])
