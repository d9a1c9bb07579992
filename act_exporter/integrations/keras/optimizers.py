"""The optimizers of a model, seen when they have unscaled gradients and not yet clipped them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from act_exporter.integrations.keras.gradients import Gradients
from act_exporter.integrations.keras.matrix import Numbers
from act_exporter.integrations.keras.patches import Patches


class Optimizers:
    """Those of one model, with what is seen of their steps.

    Args:
        model: its optimizer is the one it was compiled with, or those in its attributes.
        given: that of a custom loop; None for the model's own.
        gradients: where the norms go; None for none.
        numbers: where learning rate and loss scale go.
        on_error: told of anything that went wrong.
    """

    def __init__(
        self,
        model: keras.Model,
        given: Optimizer | None,
        gradients: Gradients | None,
        numbers: Numbers,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self._model = model
        self._given = given
        self._gradients = gradients
        self._numbers = numbers
        self._on_error = on_error
        self._patches = Patches()
        self._found: list[Optimizer] = []

    def find(self) -> None:
        """Look for them anew: the model may have been compiled again."""
        found = list(self._find())
        if [*map(id, found)] == [*map(id, self._found)]:
            return
        self._patches.restore()
        self._found = found
        for optimizer in found:
            inner = optimizer
            if isinstance(optimizer, LossScaleOptimizer):
                self._patches.put(optimizer, "apply", self._scaled(optimizer))
                inner = optimizer.inner_optimizer
            # Called when the gradients are whole, and not in a step that a loss scaler skips.
            self._patches.put(inner, "_backend_apply_gradients", self._applied(inner))

    def _find(self) -> Iterator[Optimizer]:
        if self._given is not None:
            yield self._given
            return
        own = getattr(self._model, "optimizer", None)
        values = [own, *vars(self._model).values()]
        optimizers = [value for value in values if isinstance(value, Optimizer)]
        yield from {id(optimizer): optimizer for optimizer in optimizers}.values()

    def iterations(self) -> list[int] | None:
        """How often each has stepped; None where there is none."""
        if not self._found:
            return None
        return [int(_on_host(own.iterations)) for own in self._found]

    def learning_rate(self) -> float | None:
        """The largest that they have now."""
        rates = [_on_host(own.learning_rate) for own in self._found]
        return max(rates, default=None)

    def close(self) -> None:
        """Give them their own methods back."""
        self._patches.restore()

    def _scaled(self, optimizer: LossScaleOptimizer) -> Callable[..., Any]:
        original = optimizer.apply

        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
            self._contained(lambda: self._numbers.set("loss_scale", scale))
            return original(*args, **kwargs)

        return apply

    def _applied(self, optimizer: Optimizer) -> Callable[..., Any]:
        original = optimizer._backend_apply_gradients

        @functools.wraps(original)
        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
            self._contained(lambda: self._see(optimizer, grads, trainable_variables))
            return original(grads, trainable_variables)

        return apply

    def _see(self, optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        self._numbers.set("learning_rate", optimizer.learning_rate)
        if optimizer.loss_scale_factor is not None:
            self._numbers.set("loss_scale", optimizer.loss_scale_factor)
        if self._gradients is not None:
            self._gradients.see(_accumulated(optimizer, grads, variables), variables)

    def _contained(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._on_error("gradient", error)


def _on_host(number: Any) -> float:
    """A number, a variable or a tensor of one element."""
    return float(number.numpy() if hasattr(number, "numpy") else number)


def _accumulated(optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """What the optimizer steps with: the mean over the micro-batches, if it gathers some."""
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return list(grads)
    gathered = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(own)] for own in variables
    ]
    return [
        grad if grad is None else (tf.convert_to_tensor(before) + grad) / steps
        for before, grad in zip(gathered, grads, strict=True)
    ]
