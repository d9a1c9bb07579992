"""What the guard did, told to whoever keeps a journal beside the detector: for reports, later."""

from __future__ import annotations

import logging
from typing import Any

from alerting.recovery.detector import Detector
from alerting.recovery.ranks import Ranks

log = logging.getLogger(__name__)


class Chronicle:
    """Tells it on rank 0; a detector without `note`, or one that fails, costs nothing but this.

    Args:
        detector: whose `note(kind, **fields)`, where it has one, writes a line of the journal; see
            `Notes`.
        ranks: who trains.
    """

    def __init__(self, detector: Detector, ranks: Ranks) -> None:
        self._note = getattr(detector, "note", None) if ranks.rank == 0 else None

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Something has happened: its kind, and strings, numbers or lists of those."""
        if self._note is None:
            return
        try:
            self._note(kind, **fields)
        except Exception as error:
            log.warning("the journal does not know of the %s: %s", kind, error)
