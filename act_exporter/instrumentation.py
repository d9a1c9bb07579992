"""What takes the tensors of one trainer: the seam between a framework and everything else.

Hooks on torch's modules, wrapped calls of Keras' layers, arrays that a trainer hands over: each is
an `Instrumentation`, and nothing behind it knows which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from act_exporter.exceptions import SettingError
from act_exporter.sample import Norms, Sample, Update


@dataclass(frozen=True, slots=True)
class Listener:
    """What an instrumentation calls, in the training thread; none of it raises.

    Attributes:
        finish_step: a step has ended, with its number.
        sample_without_step: far more forwards came than a step has; they should be looked at.
        count_error: something went wrong at a stage, and training goes on.
    """

    finish_step: Callable[[int], None]
    sample_without_step: Callable[[], None]
    count_error: Callable[[str, Exception], None]


class Multiplier(Protocol):
    """What the output of one layer is multiplied by, in training.

    Attributes:
        found: whether its last output had a tensor of floats; None before the first.
    """

    found: bool | None

    def set(self, factor: float) -> None:
        """Multiply by `factor` from the next output on."""
        ...

    def remove(self) -> None:
        """Leave nothing of it in the model."""
        ...


class Instrumentation:
    """Takes the tensors of one trainer and has them on the host, a sample a sampled step.

    It looks from its making on. What has no body here must be there; a trainer whose gradients,
    updates or memory cannot be seen has none. All is called in the training thread.

    Attributes:
        sampling: whether the step under way is sampled; set by the exporter.
        paused: whether nothing counts, for a save, a load or a trial run; likewise.
    """

    sampling: bool = True
    paused: bool = False

    @property
    def learning_rate(self) -> float | None:
        """Of the last step; None where it is not known."""
        return None

    @property
    def seconds(self) -> float:
        """Spent looking, on the host, so far."""
        return 0.0

    @property
    def series(self) -> int:
        """Series of layers on the page beside those of the taps."""
        return 0

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last step."""
        raise NotImplementedError

    @property
    def joined(self) -> bool:
        """Whether the samples are of all ranks."""
        return False

    @property
    def speaks(self) -> bool:
        """Whether page and journal are this process' to make."""
        return True

    def take(self, step: int, *, stepped: bool = True) -> None:
        """Send what was gathered for `step` towards the host.

        Args:
            step: the step.
            stepped: whether an optimizer's step has ended it; else gradients are left alone.
        """
        raise NotImplementedError

    def skip(self) -> None:
        """A step that is not sampled has ended."""

    def end_step(self) -> None:
        """A step has ended, sampled or not, and was judged."""

    def samples(self) -> list[Sample]:
        """Those that have reached the host since the last call, in order."""
        raise NotImplementedError

    def norms(self, loss_scale: float | None) -> list[Norms]:
        """Norms of gradients, likewise; `loss_scale` is the last one that was recorded."""
        return []

    def updates(self) -> list[Update]:
        """What steps did to the weights, likewise."""
        return []

    def record(self, values: Mapping[str, Any]) -> None:
        """Keep numbers for the next sample, by name: Python's, or arrays of one element.

        Raises:
            Exception: one of them is no number; the caller counts it.
        """
        raise NotImplementedError

    def set_step(self, step: int) -> None:
        """The trainer says that `step` is finished, and from now on counts the steps itself."""

    def restart(self, step: int) -> None:
        """Go on counting from `step`, that of a restored state."""

    def forget(self) -> None:
        """Drop what was not handed out: it belongs to steps that were rolled back."""
        raise NotImplementedError

    def drop(self) -> None:
        """A pause is over: what gradients and optimizers did meanwhile does not count."""

    def look_often(self, *, learnt: bool) -> None:
        """Look at updates often for a while, since what is usual is new or not known."""

    def fault(self, layer: str) -> Multiplier:
        """Have the output of a watched layer multiplied, by 1 at first.

        Raises:
            SettingError: no fault can be put into it.
        """
        raise SettingError("no fault can be injected into layers that the trainer observes itself")

    def memory(self) -> dict[str, tuple[float, float]]:
        """Bytes in tensors and bytes that there are, by accelerator; waits for none of them."""
        return {}

    def close(self) -> None:
        """Leave nothing in the trainer; a second call does nothing."""
        raise NotImplementedError
