"""The console: a terminal picture of a live daemon or of a recording.

Law of this package: ``model``, ``draw`` and ``views`` know nothing of Textual, so that every number and every row can
be tested as plain data; ``canvas``, ``terminal`` and ``app`` put rows on the terminal and carry keys back.
"""
