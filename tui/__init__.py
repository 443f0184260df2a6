"""The console: a terminal picture of a live daemon or of a recording.

``canvas``, ``terminal`` and ``app`` put rows on the terminal and carry keys back. Law of this package: ``model``,
``draw`` and ``views`` know nothing of Textual, so every number and row can be tested as plain data.
"""
