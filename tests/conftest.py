"""For all tests: models here are tiny, and a barrier between threads costs more than their work."""

from __future__ import annotations

import torch

torch.set_num_threads(1)

# Without torch, in an environment of their own: `make test-keras`.
collect_ignore = ["keras"]
