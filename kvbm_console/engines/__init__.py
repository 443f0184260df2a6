"""Adapters of real engines: their event streams, their capture files and Dynamo's recordings.

Law of this room: an adapter reports its engine, and a leader decides nothing for such an engine.
"""
