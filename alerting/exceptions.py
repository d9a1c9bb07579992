"""Every error that this package raises on purpose."""


class AlertingError(Exception):
    """Base of this package's errors; its message is one sentence for the user."""


class ControlError(AlertingError):
    """A file of the control directory cannot be read or does not say what it must."""


class ConfigError(AlertingError):
    """A setting, config file or secret file is missing, unreadable or wrong."""


class CheckpointError(AlertingError):
    """A checkpoint or checkpoint folder is missing, foreign, partial or altered."""


class RecoveryHaltedError(AlertingError):
    """The guard stopped the training: no healthy checkpoint, or the rollback budget is spent."""


class NotSentError(AlertingError):
    """A chat tool did not take a message; the sentence holds no address and no secret.

    Attributes:
        retry: whether the same message may be taken later.
        after: seconds before which it will not be, None where the tool doesn't say.
    """

    def __init__(self, sentence: str, *, retry: bool, after: float | None = None) -> None:
        super().__init__(sentence)
        self.retry = retry
        self.after = after
