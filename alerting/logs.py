"""What the commands write on standard error."""

from __future__ import annotations

import logging
import os

from alerting.exceptions import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def configure_logging() -> None:
    """Log to standard error, at the level that ACT_LOG_LEVEL names.

    Raises:
        ConfigError: it names none.
    """
    name = os.environ.get("ACT_LOG_LEVEL", "INFO")
    if name.upper() not in LOG_LEVELS:
        raise ConfigError(f"ACT_LOG_LEVEL: must be one of {', '.join(LOG_LEVELS)}, not {name!r}.")
    logging.basicConfig(
        level=name.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
