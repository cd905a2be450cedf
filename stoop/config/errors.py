"""Errors that users see. Each message is one sentence that says what to do."""


class StoopError(Exception):
    """Base of every error that a user can cause and fix."""


class ConfigError(StoopError, ValueError):
    """An engine option is unknown, out of range, or cannot be combined with another."""


class MemoryShortage(ConfigError):
    """What was asked for does not fit in memory. Commands replace the advice by their own flags."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem = problem


class CheckpointError(StoopError):
    """Files of a model are missing, broken, or not supported."""


class FetchError(StoopError):
    """A model could not be downloaded or stored."""


class RequestError(StoopError, ValueError):
    """One request cannot be served as asked; the engine and other requests continue."""


class RequestLost(StoopError):
    """A step of the engine failed, and this request was in it; other requests continue."""


class CoreDied(StoopError):
    """The process that computes has ended, and this request with it, or it is not there any more.

    Requests can be made again once it has been restarted.
    """


class MissingError(StoopError, AttributeError):
    """A method or attribute that vLLM has and stoop lacks."""
