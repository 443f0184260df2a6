"""Prometheus metrics of a daemon, and the Grafana dashboard that goes with them (``grafana.json``).

Law of this folder: metrics are totals. No request, prompt or hash is named, so labels stay few and nothing private
leaves.
"""
