"""``explore``: a race detector for KV connectors.

The engine's scheduler and connector are the real ones. The worker is ours: it takes the connector's own metadata and
copies each block in a shadow memory, at a moment that the scenario chooses. Monitors check every step.

- ``scenario``: everything that is random in a run, as plain data, with seeds and profiles.
- ``shadow``: the memory without bytes, the worker that copies in it, and the sentence for a wrong read.
- ``connectors``, ``nixl``, ``mooncake``, ``lmcache``, ``example``: our worker's half of each connector.
- ``conformance``: the test of an adapter that somebody else writes.
- ``vllm``: vLLM's scheduler driven through a scenario, and its monitors.
- ``shrink``: the smallest scenario that still ends in the same verdict.
- ``search``: many runs in several processes, guided by coverage.
- ``report``: a reproduction as a pytest file, a text for an upstream issue, a recording.

Law of this room: the modules of a reproduction (``report.PARTS``) import only each other, the standard library and the
engine, because a reproduction consists of their source.
"""
