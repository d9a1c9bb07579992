"""What kind of fault it is, from what was calm and what was not when it began.

- activation: layers went bad while the gradients were calm (bad weights, an unbounded feature map,
  a dtype's end). The onset says which layer was first.
- gradient: the gradient exploded while every layer was calm; layers that follow are consequences.
- data: loss and gradient jumped for one batch, the layers hardly, and the next batches were calm.
- parameters: nearly all layers became non-finite in one step: an update broke the weights the step
  before, and the first layer in order is no culprit.
- resume: it began within a few steps of a restored state: what was loaded is not what was saved. An
  update of the weights that is too large, or another learning rate than the saved one, is a sign of
  it while all else is calm.
- loss: the loss alone; layers and gradients are calm (a loss function, labels, a head).

A verdict is made when the fault begins, and stands until 100 sampled steps were clean: later, when
everything is bad, causes and consequences can no longer be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from act_exporter.training import Level

Verdict = Literal["activation", "gradient", "data", "parameters", "resume", "loss"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

_MEANINGS: dict[str, str] = {
    "activation": "An activation fault: layers went bad while the gradients were calm. Bad weights,"
    " an unbounded feature map, or the end of the number format.",
    "gradient": "A gradient fault: the gradient exploded while every layer was calm, and layers"
    " that follow are consequences. Look at backward, the learning rate and clipping.",
    "data": "A bad batch: loss and gradient jumped for one batch, the layers hardly. A rollback"
    " alone would bring it again.",
    "parameters": "Broken parameters: nearly all layers became non-finite in one step. An update"
    " broke the weights the step before, and the layer named first is no culprit.",
    "resume": "A resume fault: it began within a few steps of a restored state. What was loaded is"
    " not what was saved.",
    "loss": "A loss fault: the loss alone went out of line, layers and gradients are calm. Look at"
    " the loss function, the labels or a head.",
}
# Share of tensors that are non-finite at once: what a broken layer spoils is what comes after it,
# which is nearly all only where weights everywhere are broken, or the very first layer is.
_NEARLY_ALL = 0.9

# Sampled steps after a restored state in which an anomaly is laid to it: the largest wrong updates
# of a lost optimizer state come in the first five (2.2 to 1.2 times the right ones, measured).
_RESUMED_STEPS = 10

# Sampled steps for which a gradient's jump stays the possible cause of layers that go bad, and
# after which a single jump that nothing followed was that batch's.
_FOLLOWING_STEPS = 3


def meaning(verdict: str) -> str:
    """What a verdict means and where to look, in sentences; another version may know others."""
    return _MEANINGS.get(verdict, f"The verdict is {verdict}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One sampled step in short.

    Attributes:
        bad: layers' tensors that broke the hard rule or had a non-finite element.
        nonfinite_share: of the tensors that ran, how many had a non-finite element, 0 to 1.
        loss: level of the loss; "calm" where it is not known.
        grad_norm: level of the gradient's norm; likewise.
        update: level of the update's RMS over the learning rate; likewise.
        other_rate: whether the learning rate is not the one that was saved with a restored state.
    """

    bad: int
    nonfinite_share: float
    loss: Level
    grad_norm: Level
    update: Level
    other_rate: bool = False


class Diagnosis:
    """Follows one run.

    Args:
        clean_steps: sampled steps in which nothing was wrong, after which a verdict is over.
    """

    def __init__(self, clean_steps: int) -> None:
        self.verdict: Verdict | None = None
        self._clean_steps = clean_steps
        self._clean = 0  # sampled steps since the last one in which anything was wrong
        self._since_resume = _RESUMED_STEPS
        self._since_gradient = (
            _FOLLOWING_STEPS  # since a jump of the gradient while layers were calm
        )
        self._with_loss = False  # whether the loss jumped with it

    def observe(self, facts: Facts) -> Verdict | None:
        """Take in a sampled step; the verdict in force after it."""
        # Later on, an update that is too large has its cause in one of the others.
        resuming = self._since_resume < _RESUMED_STEPS
        misled = resuming and (facts.update != "calm" or facts.other_rate)
        wrong = facts.bad > 0 or facts.loss != "calm" or facts.grad_norm != "calm" or misled
        if wrong:
            # Whatever the first word was, bad layers are more than a number that jumped.
            if self.verdict is None or (facts.bad and self.verdict in ("data", "loss")):
                self.verdict = self._judge(facts)
            if not facts.bad and facts.grad_norm != "calm" and self._since_gradient:
                self._since_gradient, self._with_loss = 0, facts.loss == "high"
            self._clean = 0
        else:
            self._clean += 1
            if self._clean == _FOLLOWING_STEPS and self.verdict == "gradient" and self._with_loss:
                self.verdict = "data"
            if self._clean >= self._clean_steps:
                self.verdict = None
        self._since_gradient = min(self._since_gradient + 1, _FOLLOWING_STEPS + 1)
        self._since_resume = min(self._since_resume + 1, _RESUMED_STEPS)
        return self.verdict

    def resumed(self) -> None:
        """A state was restored: what was wrong before it is undone."""
        self.verdict = None
        self._clean = 0
        self._since_resume = 0
        self._since_gradient = _FOLLOWING_STEPS

    def _judge(self, facts: Facts) -> Verdict:
        if self._since_resume < _RESUMED_STEPS:
            return "resume"
        if facts.nonfinite_share >= _NEARLY_ALL:
            return "parameters"
        if facts.bad:
            return "gradient" if self._since_gradient < _FOLLOWING_STEPS else "activation"
        return "loss" if facts.grad_norm == "calm" else "gradient"
