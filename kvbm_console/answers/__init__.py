"""Answers for programs that ask step by step: an agent over MCP, an editor over DAP.

``source`` is the recording or daemon that is asked, ``answers`` has the questions, ``pages`` keeps an answer small.
``mcp`` offers the questions to agents. ``dap`` lets editors debug requests as threads, over a ``debuggee``.

Law of this package: it asks the functions that the commands and the console ask, and adds no judgement of its own.
"""
