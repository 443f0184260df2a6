"""The bytes of blocks: slots on disk, and for the simulated engine arenas in memory with a process for each rank.

- ``slot_file``: blocks in places of a file that is as long as it will ever be, found again by the next process.
- ``ranks``: the worker processes as the daemon sees them.
- ``worker``: such a process. ``orders``: the messages between the two.
- ``arena``, ``memory``: places in memory that both share. ``contents``: what a block must hold.

Law of this room: the daemon gives orders and moves no byte. ``slot_file`` imports nothing of the leader, because an
engine's process uses it, too.
"""
