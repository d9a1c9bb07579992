"""From an alert to a recovery: Alertmanager's webhook in, requests to the trainer's guard out.

Nothing is imported here: the receiver's dependencies (fastapi, pydantic) must stay out of the
training process, which imports only `alerting.recovery`.
"""
