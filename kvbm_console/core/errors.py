"""The errors of the library, one class for each kind of cause.

Law of this file: the class says whose fault it is. A bug of ours is an ``InternalError``. A peer that asks for the
impossible gets ``Refused``. A mistake that the user can mend is a ``UsageError``, one sentence with the field or file,
the bound and the value.
"""


class KvbmConsoleError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(KvbmConsoleError):
    """Raised when a flag, a file or a configuration value is wrong; its text is the one sentence shown to the user."""


class InternalError(KvbmConsoleError):
    """Raised when the core catches itself in a mistake; carries the story of what it concerns."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(message if not story else message + "\n" + "\n".join(story))
        self.message = message
        self.story = story


class InvalidTransition(InternalError):
    """Raised when a slot is asked to make a move that the transition table does not have."""


class InvariantViolation(InternalError):
    """Raised when an audit finds a broken invariant; ``rule`` names it, for example ``I2``."""

    def __init__(self, rule: str, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(f"{rule}: {message}", story)
        self.rule = rule


class Refused(KvbmConsoleError):
    """Raised inside a handler, before its first event, when the peer asked for something impossible."""


class FoldError(KvbmConsoleError):
    """Raised when an event does not fit the facts: a seq out of order, an id that is unknown or not free."""


class NotFound(UsageError):
    """Raised when there is no such thing as a request or a run that was named, although the name is well formed."""


class RecordingError(UsageError):
    """Raised when a recording cannot be read because its format is not ours, its major version differs, or it is
    corrupt. Names the file."""


class CorruptRecording(RecordingError):
    """Raised when a recording has damaged bytes before valid ones, so that reading on would skip events."""


class ConnectionLost(KvbmConsoleError):
    """Raised when a daemon cannot be reached or went away."""
