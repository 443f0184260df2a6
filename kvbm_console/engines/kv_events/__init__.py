"""KV-event streams: what real engines publish about their caches, decoded, folded and followed.

Law of this folder: nothing here imports an engine; payloads are typed, limited and never trusted.
"""
