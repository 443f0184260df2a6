"""The tap: a connector beside or around vLLM's own, through which a daemon sees and stops single requests.

It has three parts, from the engine outwards. ``connector`` and ``recorder`` run in the scheduler's thread and only
append to a bounded queue. ``sender`` is a thread that turns records into bytes for a process of our own. ``reporter``
is that process, which speaks to the daemon. ``vllm`` binds the connector to vLLM's base class.

Law of this package: the engine never waits for it, never meets an error of it, and imports nothing heavy because of it.
Records that it cannot keep up with are dropped and counted.
"""
