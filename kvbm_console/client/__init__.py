"""The client library: attach to a daemon, follow its events, debug its slots, feed it from an engine.

>>> import inspect; inspect.iscoroutinefunction(Client.status)
True

``Client`` is one connection. ``LiveFeed`` and ``LiveControls`` stay with a target across lost connections. Every
failure is one of three exceptions with one sentence: ``ConnectionLost`` (nobody there, or gone), ``Refused`` (not now,
not by this role), ``UsageError`` (the request itself is wrong).

Law of this package: what a caller gets is exact or says what is missing; nothing is retried behind its back.
"""

from kvbm_console.client.access import Access
from kvbm_console.client.connection import Client, Hello
from kvbm_console.client.control import ControlSession
from kvbm_console.client.feeder import FeedClient
from kvbm_console.client.hooks import HookedFeed
from kvbm_console.client.live import LiveControls, LiveFeed
from kvbm_console.client.subscription import Ended, Subscription

__all__ = [
    "Access", "Client", "ControlSession", "Ended", "FeedClient", "Hello", "HookedFeed", "LiveControls", "LiveFeed",
    "Subscription",
]
