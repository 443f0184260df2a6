"""The simulated machine: workloads, scheduler, device pool and links that drive a leader in virtual time.

Law of this room: the same workload, configuration and seed give the same events.
"""
