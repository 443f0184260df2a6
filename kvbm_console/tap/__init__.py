"""The tap: a connector beside or around vLLM's own, through which a daemon sees and stops single requests.

Three parts, from the engine outwards: ``connector`` and ``recorder`` run in the scheduler's thread and only append to a
bounded queue; ``sender`` is a thread that turns what was queued into bytes for a process of our own; ``reporter`` is
that process, which speaks to the daemon. ``vllm`` binds the first to vLLM's base class.

Law of this package: the engine never waits for it, never meets an error of it, and imports nothing heavy because of it;
what it cannot keep up with is dropped and counted.
"""
