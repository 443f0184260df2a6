"""The client library: attach to a daemon, follow its events, debug its slots, feed it from an engine.

>>> import inspect; inspect.iscoroutinefunction(Client.status)
True

``Client`` is one connection. ``LiveFeed`` and ``LiveControls`` stay with a target across lost connections. Every
failure is one of three exceptions with one sentence. ``ConnectionLost`` means that no daemon answers, ``Refused`` that
the daemon does not do it now or for this role, ``UsageError`` that the request is wrong.

Law of this package: an answer is exact or names the missing part, and nothing is retried behind the caller's back.
"""

from kvbm_console.client.access import Access
from kvbm_console.client.connection import Client, Hello
from kvbm_console.client.control import ControlSession
from kvbm_console.client.feeder import FeedClient, HookedFeed
from kvbm_console.client.live import LiveControls, LiveFeed
from kvbm_console.client.subscription import Ended, Subscription

__all__ = [
    "Access", "Client", "ControlSession", "Ended", "FeedClient", "Hello", "HookedFeed", "LiveControls", "LiveFeed",
    "Subscription",
]
