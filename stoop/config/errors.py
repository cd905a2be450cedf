"""What goes wrong at the border. Each message is one sentence that says what to do."""


class StoopError(Exception):
    """Base of every error that a user can cause and mend."""


class ConfigError(StoopError, ValueError):
    """An engine option is unknown, out of range, or cannot be combined with another."""


class MemoryShortage(ConfigError):
    """What was asked for does not fit. The advice is apart: commands have flags of their own."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem = problem


class CheckpointError(StoopError):
    """Files of a model are missing, broken, or of a kind that we cannot load."""


class FetchError(StoopError):
    """A model could not be downloaded or stored."""


class RequestError(StoopError, ValueError):
    """One request cannot be served as asked; the engine and its other requests go on."""


class MissingError(StoopError, AttributeError):
    """A method or attribute that vLLM has and stoop lacks."""
