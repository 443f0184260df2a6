"""The questions as tools of the Model Context Protocol, for agents that debug.

``kvbm-console mcp`` serves one source over stdio, or over streamable HTTP on this machine. Each tool is a question of
``answers``, and its answer is one JSON document of at most ``ANSWER_TOKENS_MAX`` tokens. Verbs that change a daemon
are offered only with ``--control``.

Law of this file: an anticipated failure is the sentence of its error, and a tool's description says when to use it.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from kvbm_console.answers import answers, replays
from kvbm_console.answers.control import LiveControl
from kvbm_console.answers.pages import Answer, text_of
from kvbm_console.answers.source import AnswerSource, RecordingSource
from kvbm_console.core.errors import KvbmConsoleError

INSTRUCTIONS: Final = """kvbm-console tells what the tiered KV cache of an LLM engine did: slots are requests, tiers are
G1 device, G2 host, G3 disk, and every change is a numbered event.
Begin with overview. For trouble ask doctor, for one request ask why (misses, time) and then story (its events). Look
around a deciding event with events first=SEQ-20 last=SEQ+20. For "since when" ask when.
A place is an event's number ("237") or an engine's time ("700ms", "1.5s"). An answer with next_offset has more rows:
ask again with that offset. Name the deciding event by its seq in your conclusion."""

QUESTIONS: Final[dict[str, str]] = {
    "overview": "Begin here: what is recorded or running, slots by state, tiers, holds, the worst findings.",
    "doctor": "All problems that a person should look at, each with its events (seq, evidence), cause and remedy.",
    "slots": "The live requests at a place. filter is an expression: state = onboarding and age > 10 ms.",
    "story": "Every event of one request in order: its states, copies, blocks, holds. Use it after why.",
    "why": "Why a request missed blocks of its prompt and where its time went; names the deciding event of each. "
           "With block, everything about that one block of the prompt, in also earlier evictions.",
    "events": "Events between two places, optionally those for which filter holds: kind = BlocksEvicted and tier = g2, "
              "operation = 10, request = \"chat.*\" (~ for globs).",
    "when": "Since when: the moments at which an expression became true, of slots (tokens.computed > 100, "
            "tiers.g2.available = 0, held) or of events (kind = PrefetchLimited).",
    "tiers": "Capacity, use, hits, evictions of each tier, whether prefetch pays, and occupancy over time.",
}
"""Tool to its description, which an agent chooses by."""
REPLAYS: Final[dict[str, str]] = {
    "what_if": "The least change (a tier's capacity, a threshold) that would have spared a request its misses, its "
               "preemption or its wait, found by replays; and the event from which on no change tried helps.",
    "curve": "How many blocks pay: the exact hit rate of one LRU cache by capacity. Use it for tier too small.",
}
"""Tools of recordings alone, which are run again."""
VERBS: Final[dict[str, str]] = {
    "break_set": "Set a breakpoint that holds requests: to_state (as onboarding), request (a glob), when (an "
                 "expression). A hold ends by itself after max_hold_s, at most 120.",
    "break_list": "The breakpoints of all owners.",
    "break_clear": "Remove a breakpoint by its id.",
    "holds": "Requests that stand still at a breakpoint; wait_s waits for the first one, at most 30.",
    "continue_hold": "Let a held request go on.",
    "step_hold": "Let a held request go on to its next site and stop it there again.",
}
"""Tools of the role control."""


def server_of(
    source: AnswerSource, beside: AnswerSource | None, control: LiveControl | None, version: str
) -> MCPServer[Any]:
    """The server with the tools for a source; ``diff`` with a run beside it, verbs with control."""
    server: MCPServer[Any] = MCPServer(
        "kvbm-console", instructions=INSTRUCTIONS, version=version, log_level="WARNING",
    )
    for name, about in QUESTIONS.items():
        _offer(server, name, about, getattr(answers, name), source)
    if isinstance(source, RecordingSource):
        for name, about in REPLAYS.items():
            _offer(server, name, about, getattr(replays, name), source)
    if beside is not None:
        about = f"This run beside {beside.name}: the first event that differs, figures, requests that went another way."
        _offer(server, "diff", about, answers.difference, source, beside)
    if control is not None:
        for name, about in VERBS.items():
            _offer(server, name, about, getattr(control, name))
    return server


def _offer(
    server: MCPServer[Any], name: str, about: str, question: Callable[..., Awaitable[Answer]], *given: AnswerSource
) -> None:
    """Register a question as a tool; ``given`` are its first arguments, which no agent states."""

    @functools.wraps(question)
    async def tool(**arguments: Any) -> str:
        try:
            return text_of(await question(*given, **arguments))
        except KvbmConsoleError as error:
            raise ToolError(str(error)) from None

    signature = inspect.signature(question, eval_str=True)
    asked = list(signature.parameters.values())[len(given):]
    tool.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in asked], return_annotation=str)
    tool.__annotations__ = {one.name: one.annotation for one in asked} | {"return": str}
    server.add_tool(tool, name=name, description=about, structured_output=False)
