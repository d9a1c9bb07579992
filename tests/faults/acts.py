"""What happens to a trainer before a step: `Act.do` in the plans."""

from __future__ import annotations

from tests.alerting.recovery.trainer import open_request
from tests.faults.child import Child


def break_model(child: Child) -> None:
    """A weight a hundredfold, which the detector sees in this step."""
    child.note("bad")
    child.trainer.break_model()


def ask_for_recovery(child: Child) -> None:
    """As the receiver asks."""
    open_request(child.plan.run_folder, "recover")


def ask_for_backup(child: Child) -> None:
    """As the receiver asks."""
    open_request(child.plan.run_folder, "checkpoint")


def break_and_ask(child: Child) -> None:
    """A bad step, and the request for what follows from it."""
    break_model(child)
    ask_for_recovery(child)
