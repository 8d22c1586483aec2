"""Models: the zoo, batch norm that can be vectorised, checks, and weight files."""

from fairvar.models.check import Problem, check_model
from fairvar.models.norm import PlainBatchNorm, call, sample_weight_names, swap_batch_norm
from fairvar.models.weights import load_weights, read_tensors
from fairvar.models.zoo import MODELS, MobileNetV2, build

__all__ = [
    "MODELS",
    "MobileNetV2",
    "PlainBatchNorm",
    "Problem",
    "build",
    "call",
    "check_model",
    "load_weights",
    "read_tensors",
    "sample_weight_names",
    "swap_batch_norm",
]
