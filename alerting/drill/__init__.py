"""`act-alerting drill`: a synthetic alert through the user's own deployment, hop by hop."""

from alerting.drill.drill import perform

__all__ = ["perform"]
