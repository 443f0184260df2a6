"""The errors that msgspec raises for bytes from outside.

Law of this file: whoever decodes what another program wrote catches all of them.
"""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised for bytes that are no message of ours. Older releases let the second out for text that is not UTF-8, and the
last is raised for a message that is nested without end."""
