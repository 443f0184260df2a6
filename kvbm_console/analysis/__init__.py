"""Answers from recorded or live events: lints, explanations, requests, comparisons and exports.

Law of this room: every answer reads facts and events; none of them changes a fact or opens a connection.
"""
