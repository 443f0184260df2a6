"""Events as JSON documents, as the commands print them.

Law of this file: the documents are the library's (``stream.event_document``); nothing is added here.
"""

from kvbm_console.stream.event_document import (
    HASH_COLUMNS,
    ID_COLUMNS,
    IDENTIFIERS,
    INDEX_COLUMNS,
    event_document,
    spec_document,
)

__all__ = ["HASH_COLUMNS", "IDENTIFIERS", "ID_COLUMNS", "INDEX_COLUMNS", "event_document", "spec_document"]
