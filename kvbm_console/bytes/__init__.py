"""The bytes of blocks below the host tier.

- ``slot_file``: blocks in places of a file that is as long as it will ever be, found again by the next process.

Law of this room: it imports nothing of the leader, because an engine's process uses it, too.
"""
