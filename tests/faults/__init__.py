"""Faults of a guarded training, each as a small experiment of which the loss is measured.

    python -m tests.faults                 (make test-faults; minutes; writes build/faults.json)

Processes are killed for real, files damaged for real. The trainer is `tests.alerting.recovery`'s,
and the guard in it the shipped one up to the point at which the fault strikes.
"""
