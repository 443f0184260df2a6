"""``sanitize``: fingerprints of blocks in a real process, at each point where a copy may go wrong.

A block is fingerprinted when a store takes it, when the store's copy ends, and when a load hands it to the model. All
three must agree. A difference is a finding: it names the block, its last writer, the copy and the missing edge.

- ``fingerprint``: 64 bits of each layer of a block, computed where its bytes lie.
- ``ledger``: copies, contents and writers, bounded, of one rank.
- ``checker``: the three points, and the verdict.
- ``planted``: 12 faults in a copier of CPU tensors, which the checker must name.

Law of this room: it runs inside an engine's worker. numpy is its only dependency, torch is found on the tensors.
"""
