"""Sick small models, one fault each, and healthy ones, generated from seeds.

Each fault is shown by a measurement that knows nothing of the doctor: a draw in which it cannot be
measured is thrown away, and the next one is taken.
"""

from tests.act_exporter.doctor.corpus.drawing import HALVES, KINDS, Half, draw, healthy
from tests.act_exporter.doctor.corpus.patient import Patient

__all__ = ["HALVES", "KINDS", "Half", "Patient", "draw", "healthy"]
