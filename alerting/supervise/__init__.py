"""`act-alerting supervise`: starts a trainer, and starts it again after a crash or a hang.

Outside `alerting.recovery`, which is in the trainer and imports torch: this process stays small.
"""
