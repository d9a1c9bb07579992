"""Checkpoints, backups and rollback inside the trainer.

```python
from alerting.recovery import TrainingGuard
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alerting.recovery.detector import Detector
from alerting.recovery.remedies import Callback, ClipGradients, LowerLearningRate, SkipBatches

if TYPE_CHECKING:
    from alerting.recovery.guard import TrainingGuard

__all__ = [
    "Callback",
    "ClipGradients",
    "Detector",
    "LowerLearningRate",
    "SkipBatches",
    "TrainingGuard",
]


def __getattr__(name: str) -> object:
    # Imported when used: torch takes seconds, and the commands that look at checkpoints need none.
    if name == "TrainingGuard":
        try:
            from alerting.recovery.guard import TrainingGuard
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "TrainingGuard guards trainings of torch, which is not installed: pip install"
                " 'act-exporter[torch]'; alerting.recovery.keras has the guard for Keras"
            ) from None
        return TrainingGuard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
