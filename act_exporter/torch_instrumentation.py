"""Torch's instrumentation: hooks on the modules, parameters and optimizers of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from act_exporter.fault_hook import FaultHook
from act_exporter.gradients import Gradients, Scaler, Which
from act_exporter.instrumentation import Instrumentation, Listener
from act_exporter.layers import ModuleTap
from act_exporter.memory import device_memory
from act_exporter.probe import Probe
from act_exporter.ranks import Ranks
from act_exporter.sample import Norms, Sample, Update
from act_exporter.steps import Steps
from act_exporter.updates import Updates


class TorchInstrumentation(Instrumentation):
    """Probe, gradients, updates, steps and ranks of one model, as one.

    Args:
        model: the model.
        taps: what to watch.
        listener: told of steps and errors.
        exceed_threshold: for the share of elements with |x| above it.
        gradients: as of `start_exporter`.
        scaler: likewise.
        ranks: all of the process group, whose samples are joined; None for this process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[ModuleTap],
        listener: Listener,
        *,
        exceed_threshold: float,
        gradients: Which,
        scaler: Scaler | None,
        ranks: Ranks | None,
    ) -> None:
        on_error = listener.count_error
        self._modules = {tap.layer: tap.module for tap in taps}
        self._ranks = ranks
        self._gradients = Gradients(model, taps, which=gradients, scaler=scaler, on_error=on_error)
        self._updates = Updates(model, taps, enabled=gradients is not False, on_error=on_error)
        self._probe = Probe(
            model,
            taps,
            exceed_threshold=exceed_threshold,
            on_stuck=listener.sample_without_step,
            on_error=on_error,
        )
        self._steps = Steps(model, listener.finish_step, on_error, self._updates)

    @property
    def sampling(self) -> bool:
        """Whether the step under way is sampled."""
        return self._probe.sampling

    @sampling.setter
    def sampling(self, sampling: bool) -> None:
        self._probe.sampling = self._gradients.sampling = self._updates.sampling = sampling

    @property
    def paused(self) -> bool:
        """Whether nothing counts."""
        return self._probe.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._probe.paused = self._steps.paused = paused

    @property
    def learning_rate(self) -> float | None:
        """The largest of the last step."""
        return self._steps.learning_rate

    @property
    def seconds(self) -> float:
        """Spent in hooks, on the host."""
        return self._probe.seconds + self._gradients.seconds + self._updates.seconds

    @property
    def series(self) -> int:
        """Of gradients and, two families a layer, of updates."""
        return self._gradients.series + 2 * self._updates.series

    @property
    def idle(self) -> bool:
        """Whether nothing was trained since the last step; a graph that replays hides that."""
        return self._probe.idle

    @property
    def joined(self) -> bool:
        """Whether the samples are of all ranks."""
        return self._ranks is not None

    @property
    def speaks(self) -> bool:
        """Of joined ranks the first one does."""
        return self._ranks is None or self._ranks.rank == 0

    def take(self, step: int, *, stepped: bool = True) -> None:
        """Send what was gathered for `step` towards the host."""
        self._probe.take(step)
        # Without a step they may be infinite by design: that is what a scaler skips.
        if stepped:
            self._gradients.take(step)
            self._updates.take(step)

    def skip(self) -> None:
        """A step that is not sampled has ended."""
        self._probe.skip()

    def end_step(self) -> None:
        """A step has ended."""
        self._probe.end_step()

    def samples(self) -> list[Sample]:
        """Those that have arrived, of joined ranks from all of them."""
        samples = self._probe.arrived()
        if self._ranks is not None:
            return self._ranks.join(samples)
        return [sample for sample in samples if not sample.lost]

    def norms(self, loss_scale: float | None) -> list[Norms]:
        """Norms of gradients that have arrived."""
        return self._gradients.arrived(loss_scale)

    def updates(self) -> list[Update]:
        """Updates that have arrived."""
        return self._updates.arrived()

    def record(self, values: Mapping[str, Any]) -> None:
        """Keep numbers for the next sample; those on a device are read with it, not here."""
        self._probe.record({name: torch.as_tensor(value) for name, value in values.items()})

    def set_step(self, step: int) -> None:
        """Count no more: the trainer does."""
        self._steps.set(step)

    def restart(self, step: int) -> None:
        """Go on counting from `step`."""
        self._steps.restart(step)

    def forget(self) -> None:
        """Drop what was not handed out."""
        self._probe.forget()
        if self._ranks is not None:
            self._ranks.forget()
        self._gradients.forget()
        self._updates.forget()

    def drop(self) -> None:
        """A pause is over."""
        self._gradients.drop()
        self._updates.drop()

    def look_often(self, *, learnt: bool) -> None:
        """Look at updates often for a while."""
        self._updates.look_often(learnt=learnt)

    def fault(self, layer: str) -> FaultHook:
        """Have the output of a watched module multiplied."""
        return FaultHook(self._modules[layer])

    def memory(self) -> dict[str, tuple[float, float]]:
        """What torch's allocator counts."""
        return device_memory()

    def close(self) -> None:
        """Remove the hooks."""
        self._steps.close()
        self._probe.close()
        self._gradients.close()
        self._updates.close()
        if self._ranks is not None:
            self._ranks.close()
