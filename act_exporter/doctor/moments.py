"""What an optimizer remembers of each parameter, beside the gradient that it gets now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from act_exporter.doctor.step import Gradient, Step
from act_exporter.norms import elements


@dataclass(frozen=True, slots=True)
class Moments:
    """What is remembered of one parameter.

    Attributes:
        layer: the module that it is in.
        count: its elements.
        first: the first moment's rms, corrected for the steps made; None where there is none.
        second: root of the second moment's mean, likewise.
        gradient: rms of what the optimizer gets now; None where that is not known.
        value: the parameter's own rms; 0 where its gradient is not known.
        bound: on first / second, whatever gradients were; None where betas set none.
        lost: whether the step counter is 0 although there are moments.
        epsilon: of its group; None where it has none.
        dtype: of the parameter.
    """

    layer: str
    count: int
    first: float | None
    second: float | None
    gradient: float | None
    value: float
    bound: float | None
    lost: bool
    epsilon: float | None
    dtype: torch.dtype

    @property
    def size(self) -> float:
        """Rms of the larger moment; 0 where there is none."""
        return max(self.first or 0.0, self.second or 0.0)

    @property
    def elasticity(self) -> float:
        """How much the loss changed, by the moments, as the parameter changed by a share of it."""
        return self.size * self.value * self.count


def moments_of(
    optimizer: torch.optim.Optimizer, names: dict[int, str], step: Step | None
) -> Iterator[Moments]:
    gradients: dict[str, Gradient] = (step.used or step.gradients) if step is not None else {}
    for group in optimizer.param_groups:
        betas = group.get("betas", ())
        beta1, beta2 = betas if len(betas) == 2 else (0.0, float(group.get("alpha", 0.0)))
        epsilon = group.get("eps")
        bound = None
        if len(betas) == 2 and beta1**2 < beta2 < 1:
            # Of sums with weights beta1^i and beta2^i, by Cauchy and Schwarz.
            bound = (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            name = names.get(id(parameter), "")
            gradient = gradients.get(name)
            steps = float(state.get("step", 1))
            first, second = state.get("exp_avg"), state.get("exp_avg_sq", state.get("square_avg"))
            known = isinstance(second, torch.Tensor)
            yield Moments(
                layer=name.rpartition(".")[0],
                count=parameter.numel(),
                first=_rms(first) / _corrected(beta1, steps) if is_float(first) else None,
                second=(_mean(second) / _corrected(beta2, steps)) ** 0.5 if known else None,
                gradient=gradient.rms if gradient is not None and gradient.rms > 0 else None,
                value=gradient.value if gradient is not None else 0.0,
                bound=bound,
                lost=known and steps == 0 and bool(second.any()),
                epsilon=float(epsilon) if isinstance(epsilon, float | int) else None,
                dtype=parameter.dtype,
            )


def usual_growth(moments: Iterable[Moments]) -> float:
    """The median of gradients over what second moments know of them; 1 where neither is known."""
    ratios = sorted(own.gradient / own.second for own in moments if own.gradient and own.second)
    return ratios[len(ratios) // 2] if ratios else 1.0


def _corrected(beta: float, steps: float) -> float:
    return 1 - beta**steps if steps > 0 and beta > 0 else 1.0


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _rms(tensor: torch.Tensor) -> float:
    return float(elements(tensor).double().square().mean().sqrt())


def _mean(tensor: torch.Tensor) -> float:
    return float(elements(tensor).double().mean())
