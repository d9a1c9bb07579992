"""Tests of Keras on TensorFlow run without torch, in an environment of their own."""

import logging
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest


@pytest.fixture(autouse=True)
def _fresh():
    """The same random numbers and policy for each test, and no names that others used."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("float32")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    yield
    keras.config.set_dtype_policy("float32")
