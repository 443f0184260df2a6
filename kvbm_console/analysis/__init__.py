"""Answers from recorded or live events: lints, explanations, requests, comparisons and exports.

Law of this room: an answer reads facts and events, and changes no fact and opens no connection.
"""
