"""The rules that a publisher of KV events must keep, and the checker that judges a stream by them.

``statements`` reads payloads as they are on the wire, and ``rules`` has the rules and the checker. ``hearing`` follows
a publisher over ZeroMQ and compares its replay with the messages that were heard.

Law of this package: only evidence makes a verdict. A rule that the stream did not exercise is not passed, and an event
about blocks from before the first message is not judged.
"""
