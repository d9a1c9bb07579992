"""Every error that this package raises on purpose.

They are raised only where the user calls us, before or between steps; inside a training step
nothing is raised, errors are counted in `act_errors_total{stage}` and logged once a cause.
"""


class ActExporterError(Exception):
    """Base of this package's errors; its message is one sentence for the user."""


class SettingError(ActExporterError, ValueError):
    """An argument or an `ACT_*` variable has a value that cannot serve."""


class NothingToWatchError(ActExporterError, ValueError):
    """The model has no module that the watch setting selects."""


class StateError(ActExporterError, ValueError):
    """A saved state is not one of ours or has lost a part; nothing was loaded from it."""


def one_line(error: BaseException) -> str:
    """Anybody's error, as it is part of a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())
