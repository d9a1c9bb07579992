"""What findings say to change, as code: each function changes a model in place, or one step.

Apply what changes a model before the optimizer is made and before DDP or FSDP is put around it.
Layers and weights are given by their own names, or globs over these, as findings give them.
"""

from act_exporter.doctor.remedies.attention import (
    elu_features,
    linear_attention,
    softmax_features,
)
from act_exporter.doctor.remedies.clipping import clip_gradients
from act_exporter.doctor.remedies.norms import add_norm, set_gains
from act_exporter.doctor.remedies.weights import initialise, scale_for_depth

__all__ = [
    "add_norm",
    "clip_gradients",
    "elu_features",
    "initialise",
    "linear_attention",
    "scale_for_depth",
    "set_gains",
    "softmax_features",
]
