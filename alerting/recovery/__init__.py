"""Checkpoints, backups and rollback inside the trainer.

```python
from alerting.recovery import TrainingGuard
```
"""

from alerting.recovery.detector import Detector
from alerting.recovery.guard import TrainingGuard

__all__ = ["Detector", "TrainingGuard"]
