"""KV-event streams: the events that real engines publish about their caches, decoded, folded and followed.

Law of this folder: nothing here imports an engine. Payloads are typed, limited and never trusted.
"""
