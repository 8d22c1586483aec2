"""Models: the zoo, batch norm and dropout that can be vectorised, checks, and weight files."""

from fairvar.models.check import Problem, check_model
from fairvar.models.norm import (
    KeyedDropout,
    PlainBatchNorm,
    call,
    sample_weight_names,
    swap_batch_norm,
    swap_dropout,
)
from fairvar.models.weights import load_weights, read_tensors
from fairvar.models.zoo import LSTM, MODELS, MobileNetV2, Transformer, build

__all__ = [
    "LSTM",
    "MODELS",
    "KeyedDropout",
    "MobileNetV2",
    "PlainBatchNorm",
    "Problem",
    "Transformer",
    "build",
    "call",
    "check_model",
    "load_weights",
    "read_tensors",
    "sample_weight_names",
    "swap_batch_norm",
    "swap_dropout",
]
