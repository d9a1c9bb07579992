"""What is done to a healthy training run: a function a kind of fault, a table of sizes and places.

Each function is called once, right before the first faulty step, with the training, a place and a
size, and may leave callbacks behind. Sources stand in their docstrings: "A04" and the like are the
project's collection of public cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tests.benchmarks.trainees import LinearAttention, Training, batches

FP16_MAX = 65504.0
FP8_MAX = 448.0  # e4m3

Inflict = Callable[[Training, str, float], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the table.

    Attributes:
        kind: what recall is counted by.
        inflict: the function.
        place: a module or what the function says.
        size: what the function says.
        trainee: name of the kind of training that it befalls, see `recordings.PREFIXES`.
        steps: steps to train on with it.
    """

    kind: str
    inflict: Inflict
    place: str
    size: float
    trainee: str = "plain"
    steps: int = 150

    @property
    def name(self) -> str:
        return f"{self.kind} | {self.place} | {self.size:g}"


def weights(training: Training, place: str, size: float) -> None:
    """The weights of one module, or of all projections in blocks, times `size`.

    A bad kernel, or a wrong scale at load.
    Source: the practice guide's hundredfold growth; the demo's own fault.
    """
    for module in _projections(training, place):
        _scale(module, size)


def bit_flip(training: Training, place: str, size: float) -> None:
    """One weight's exponent flipped: times 2 to the power of `size`.

    Source: silent data corruption, "The Llama 3 Herd of Models", 2024, section 3.3.4.
    """
    with torch.no_grad():
        training.model.get_submodule(place).weight[1, 1] *= 2.0**size


def nan_weight(training: Training, place: str, size: float) -> None:
    """One element of a weight becomes NaN, or Inf where `size` says so.

    Source: the same; wandb/wandb#955 for what it does to watchers.
    """
    with torch.no_grad():
        weight = training.model.get_submodule(place).weight
        # Of the embedding the space's row: every batch has spaces.
        weight[ord(" ") % len(weight), 1] = size


def learning_rate(training: Training, place: str, size: float) -> None:
    """The learning rate times `size` from here on.

    Source: the practice guide; marin#1368 for what one bad update does.
    """
    training.rate_factor = size


def exp_feature_map(training: Training, place: str, size: float) -> None:
    """Linear attention's feature map becomes exp, without normaliser; query and key times `size`.

    Source: the second seed's unstable block.
    """
    places = _blocks(place)
    for index in places:
        attention = training.model.blocks[index].attn
        assert isinstance(attention, LinearAttention)
        attention.unbounded = True
        with torch.no_grad():
            attention.qkv.weight[: 2 * attention.qkv.in_features] *= size


def from_the_start(training: Training, place: str, size: float) -> None:
    """Nothing is changed here: the model was built with the fault, which is there from step 1."""


def garbage(training: Training, place: str, size: float) -> None:
    """`size` batches of garbage: random bytes, or one byte over and over.

    Source: bad data, as in the PaLM paper's loss spikes (2022, section 5.1).
    """

    def bad(tokens: torch.Tensor, number: int) -> torch.Tensor:
        if number > size:
            return tokens
        if place == "random bytes":
            generator = torch.Generator().manual_seed(number)
            return torch.randint(0, 256, tokens.shape, generator=generator)
        return torch.full_like(tokens, 7)

    training.on_batch = bad


def norm_gain(training: Training, place: str, size: float) -> None:
    """A norm's gain times `size`.

    Source: bigscience tr11-176B chronicles, a norm whose gain was not what had been saved.
    """
    _scale(training.model.get_submodule(place), size)


def fp16_activation(training: Training, place: str, size: float) -> None:
    """A feed-forward part ends in fp16, its output brought to `size` of fp16's largest value.

    Then dropout of 0.1, whose factor of 1/0.9 makes an inf of what was still finite (size 0.957).
    Source: A01, huggingface/transformers#5651.
    """
    part = training.model.get_submodule(place)
    largest = _largest_output(training, part.down)
    _scale(part.down, size * FP16_MAX / largest)
    _in_half(part.down)
    forward = part.forward
    part.forward = lambda x: F.dropout(forward(x), 0.1)


def fp16_residual(training: Training, place: str, size: float) -> None:
    """The residual sum in fp16: 4e4 from the feed-forward part on a stream of 3e4, times `size`.

    Source: A02, huggingface/transformers PR#19229.
    """
    block = training.model.get_submodule(place)
    with torch.no_grad():
        block.mlp.down.bias[0] = 4e4 * size
    _in_half(block.mlp.down)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + block.attn(block.norm1(x))
        stream = x + 3e4 * size * F.one_hot(torch.tensor(0), x.shape[-1])
        return (stream.half() + block.mlp(block.norm2(x))).float()

    block.forward = forward


def fp8_amax(training: Training, place: str, size: float) -> None:
    """Half of a module's output quantised to e4m3 by the other half's largest value.

    `size` is how much larger this half is; "clamped" in the place gives a slow error, else NaN.
    Source: A07, pytorch/torchtitan#3109, NVIDIA/Megatron-LM PR#442.
    """
    name, _, clamped = place.partition(" ")
    module = training.model.get_submodule(name)
    with torch.no_grad():
        module.weight[: len(module.weight) // 2] *= size
    forward = module.forward

    def quantised(x: torch.Tensor) -> torch.Tensor:
        y = forward(x)
        scale = FP8_MAX / y[..., y.shape[-1] // 2 :].abs().max().detach()
        scaled = y.detach() * scale
        if clamped:
            scaled = scaled.clamp(-FP8_MAX, FP8_MAX)
        stored = scaled.to(torch.float8_e4m3fn).float() / scale
        return y + (stored - y.detach())  # straight through for the gradient

    module.forward = quantised


class _BadBackward(torch.autograd.Function):
    """Forward is the identity; backward multiplies one position's gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[0, 0] *= ctx.factor
        return gradient, None


def backward_only(training: Training, place: str, size: float) -> None:
    """A backward pass that multiplies one position's gradient by `size`; forward is right.

    Inf times 0 is NaN, so a `size` of inf is the exp that overflows in a decay's backward.
    Source: A09, fla-org/flash-linear-attention#77.
    """
    module = training.model.get_submodule(place)
    forward = module.forward
    module.forward = lambda x: _BadBackward.apply(forward(x), size)


def gradient_spike(training: Training, place: str, size: float) -> None:
    """One step's gradient of one weight times `size`, with a calm loss and clipping.

    Source: A14, huggingface/transformers#45676, unslothai/unsloth#5207.
    """
    weight = training.model.get_submodule(place).weight

    def spike(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * size if training.faulty_steps == 1 else gradient

    weight.register_hook(spike)


def logits_blow_up(training: Training, place: str, size: float) -> None:
    """Query and key weights times `size` at once: attention logits times its square.

    Source: "Scaling Vision Transformers to 22 Billion Parameters", 2023, arXiv:2302.05442.
    """
    for index in _blocks(place):
        attention = training.model.blocks[index].attn
        _scale(attention.q_proj, size)
        _scale(attention.k_proj, size)


def query_key_growth(training: Training, place: str, size: float) -> None:
    """Query and key weights times `size` after each step; three larger updates on the way.

    Source: A04, the Marin 32B retrospective, marin-community/marin#1368.
    """
    projections = [
        projection
        for index in _blocks(place)
        for projection in (
            training.model.blocks[index].attn.q_proj,
            training.model.blocks[index].attn.k_proj,
        )
    ]

    def grow(number: int) -> None:
        for projection in projections:
            _scale(projection, size)
        training.rate_factor = 3.0 if number in (30, 80, 130) else 1.0

    training.after_step = grow


def optimizer_state(training: Training, place: str, size: float) -> None:
    """A moment of AdamW times `size`, in all parameters or those of one module.

    `place` is "second" or "first", and may go on with a module's name.
    Source: C13, NVIDIA/Megatron-LM#1842.
    """
    moment, _, name = place.partition(" ")
    module = training.model.get_submodule(name)
    key = {"first": "exp_avg", "second": "exp_avg_sq"}[moment]
    for parameter in module.parameters():
        training.optimizer.state[parameter][key].mul_(size)


def drift(training: Training, place: str, size: float) -> None:
    """One module's weights, or those of all blocks' projections, times `size` after each step.

    Source: the slow instabilities of Wortsman et al. 2023, arXiv:2309.14322.
    """
    modules = _projections(training, place)

    def grow(_: int) -> None:
        for module in modules:
            _scale(module, size)

    training.after_step = grow


def bf16_weights(training: Training, place: str, size: float) -> None:
    """Weights kept in bf16: rounded after each step; the learning rate times `size`.

    Source: A11, state-spaces/mamba#6.
    """
    training.rate_factor = size

    def round_all(_: int) -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.copy_(parameter.bfloat16())

    training.after_step = round_all


def lost_soft_cap(training: Training, place: str, size: float) -> None:
    """The final soft cap lost in a configuration, and the head times `size`.

    Source: A15, PrimeIntellect-ai/prime-rl#2362.
    """
    head = training.model.get_submodule(place)
    head.cap = None
    _scale(head, size)


def stale_second_moment(training: Training, place: str, size: float) -> None:
    """No clipping, beta2 of 0.999, learning rate 1e-2, and the loss times `size` for backward.

    Source: A19, "Stable and low-precision training for large-scale vision-language models", 2023.
    """
    training.clip = None
    training.loss_factor = size
    training.rate_factor = 10.0
    for group in training.optimizer.param_groups:
        group["betas"] = (0.9, 0.999)


def router_growth(training: Training, place: str, size: float) -> None:
    """A router's weights times `size` after each step.

    Source: A20, NVIDIA/Megatron-LM#1545, pytorch/torchtitan#1246.
    """
    router = training.model.get_submodule(place)
    training.after_step = lambda _: _scale(router, size)


def _table() -> tuple[Fault, ...]:
    qkv, down, q = "blocks.1.attn.qkv", "blocks.2.mlp.down", "blocks.2.attn.q_proj"
    inf, nan = float("inf"), float("nan")
    parts = (qkv, down, "blocks.3.mlp.up", "embed", "head", "all projections")
    return (
        *(Fault("weights times 100", weights, place, 100) for place in parts),
        *(Fault("weights times 10", weights, place, 10) for place in parts),
        *(Fault("weights times 0", weights, place, 0) for place in (down, "head")),
        *(Fault("bit flip", bit_flip, down, size) for size in (16, 64, 120)),
        Fault("bit flip", bit_flip, "blocks.0.attn.qkv", 64),
        *(Fault("learning rate", learning_rate, "all", size) for size in (10, 30, 100, 1000)),
        *(
            Fault("exp feature map", exp_feature_map, place, size, "linear")
            for place in ("0", "3", "0,1,2,3")
            for size in (1, 3, 10)
        ),
        *(Fault("garbage batch", garbage, "random bytes", size) for size in (1, 3, 20)),
        *(Fault("garbage batch", garbage, "one byte", size) for size in (1, 20)),
        *(
            Fault("norm gain", norm_gain, place, size)
            for place in ("blocks.1.norm1", "blocks.3.norm2", "norm")
            for size in (10, 50)
        ),
        *(
            Fault("fp16 overflow", fp16_activation, place, size)
            for place in ("blocks.0.mlp", "blocks.2.mlp")
            for size in (0.4, 0.957, 1.5)
        ),
        *(Fault("fp16 overflow", fp16_residual, "blocks.2", size) for size in (0.5, 1)),
        *(
            Fault("one NaN weight", nan_weight, place, nan)
            for place in ("embed", "blocks.0.attn.qkv", down, "head")
        ),
        Fault("one NaN weight", nan_weight, down, inf),
        *(
            Fault("attention logits", logits_blow_up, place, size, "split")
            for place in ("0", "2", "0,1,2,3")
            for size in (3, 10, 30)
        ),
        *(
            Fault("q/k growth (A04)", query_key_growth, "0,1", size, "split", 300)
            for size in (1.01, 1.03)
        ),
        *(
            Fault("optimizer state", optimizer_state, place, size)
            for place, size in (
                ("second", 0),
                ("second", 1e-4),
                ("first", 100),
                ("first", 10_000),
                (f"second {down}", 0),
                (f"first {down}", nan),
                ("second", inf),
            )
        ),
        *(
            Fault(f"drift of {(size - 1) * 100:.0f} %", drift, place, size, steps=500)
            for size in (1.01, 1.02)
            for place in (qkv, down, "head", "all projections")
        ),
        *(
            Fault("fp8 amax (A07)", fp8_amax, place, size)
            for place in (qkv, f"{qkv} clamped")
            for size in (4, 40)
        ),
        *(
            Fault("backward only (A09)", backward_only, place, size)
            for place in ("blocks.1.attn", "blocks.3.mlp")
            for size in (inf, 1e6)
        ),
        *(Fault("bf16 weights (A11)", bf16_weights, "all", size) for size in (0.3, 1)),
        *(Fault("gradient spike (A14)", gradient_spike, q, size, "split") for size in (1500, 1e6)),
        *(Fault("lost soft cap (A15)", lost_soft_cap, "head", size, "capped") for size in (4, 20)),
        *(
            Fault("stale second moment (A19)", stale_second_moment, "all", size)
            for size in (30, 1000)
        ),
        *(
            Fault("router growth (A20)", router_growth, "blocks.1.mlp.router", size, "mixture", 300)
            for size in (1.035, 1.1)
        ),
        # Baselines and windows settle after 200 steps at the soonest.
        *(
            Fault("before the baseline", inflict, place, size, "young")
            for inflict, place, size in (
                (weights, qkv, 100),
                (weights, "head", 100),
                (learning_rate, "all", 100),
                (nan_weight, down, nan),
            )
        ),
        Fault("exp from the start", from_the_start, "0,1,2,3", 1, "unbounded", 400),
    )


def _blocks(place: str) -> list[int]:
    return [int(index) for index in place.split(",")]


def _projections(training: Training, place: str) -> list[nn.Module]:
    if place == "all projections":
        return [part for part in training.model.blocks.modules() if isinstance(part, nn.Linear)]
    return [training.model.get_submodule(place)]


def _in_half(module: nn.Module) -> None:
    """Its output becomes fp16, where a tap sees it too."""
    forward = module.forward
    module.forward = lambda x: forward(x).half()


def _scale(module: nn.Module, size: float) -> None:
    with torch.no_grad():
        module.weight.mul_(size)


def _largest_output(training: Training, module: nn.Module) -> float:
    """Over one batch, outside training: nothing is counted, and no batch of the run used up."""
    seen: list[float] = []
    handle = module.register_forward_hook(lambda *given: seen.append(float(given[2].abs().max())))
    training.model.eval()
    with torch.no_grad():
        training.model(next(batches(0))[:, :-1])
    training.model.train()
    handle.remove()
    return seen[0]


FAULTS = _table()
