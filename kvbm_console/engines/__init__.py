"""Engines that drive a leader: the simulated one, its workloads, and (later) adapters for real ones.

Law of this package: an engine talks to the leader only through ``dispatch.LeaderPort``, with the entry points that
connectors use; the simulated one by the calls of ``port.EnginePort``, which become those.
"""
