"""The models of the experiments, by name.

A model's first parameters depend on the seed, the name and the shapes alone: they are drawn on the
CPU in float32 from the stream ("init", name), whatever was drawn before, and the global generators
are left as they were. All models but MobileNetV2 keep torch's default initialisation (uniform in
±1/√fan-in), also "multinomial": zeros would make every seed start from the same point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fairvar import rng
from fairvar.errors import BadInput, unknown
from fairvar.models.mobilenet import MobileNetV2

Shape = tuple[int, ...]
SMALLEST = 16  # two rounds of (5x5 convolution, halving) leave one pixel of 16


def _multinomial(shape: Shape, classes: int) -> nn.Module:
    """Multinomial regression, with bias: convex, 7,850 parameters on MNIST."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _linear(shape: Shape, classes: int) -> nn.Module:
    """x ↦ ⟨w, x⟩: with loss "mse" every client's loss is a quadratic. One output; no classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 1, bias=False))


def _two_hidden(shape: Shape, classes: int) -> nn.Module:
    """FL-bench's `2nn`."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(math.prod(shape), 200), nn.ReLU()),
        *(nn.Linear(200, 200), nn.ReLU()),
        nn.Linear(200, classes),
    )


def _avgcnn(shape: Shape, classes: int) -> nn.Module:
    """FL-bench's `avgcnn`: two convolutional layers, no batch norm, so that f_i is well defined."""
    channels, height, width = _image("avgcnn", shape)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * _left(height) * _left(width), 512), nn.ReLU()),
        nn.Linear(512, classes),
    )


def _lenet5(shape: Shape, classes: int) -> nn.Module:
    """FL-bench's `lenet5`, with batch norm after each convolution."""
    channels, height, width = _image("lenet5", shape)
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(16 * _left(height) * _left(width), 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU()),
        nn.Linear(84, classes),
    )


def _mobilenet_v2(shape: Shape, classes: int) -> nn.Module:
    channels, _, _ = _image("mobilenet_v2", shape, smallest=1)
    return MobileNetV2(classes, channels)


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "multinomial": _multinomial,
    "linear": _linear,
    "2nn": _two_hidden,
    "avgcnn": _avgcnn,
    "lenet5": _lenet5,
    "mobilenet_v2": _mobilenet_v2,
}


def build(name: str, input_shape: Shape, classes: int, seed: int = 0) -> nn.Module:
    """A model for inputs of this shape (without the batch axis), in training mode, on the CPU.

    "linear" always has one output, whatever `classes` says.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        raise BadInput(f"model {name}: input shape {shape} must be positive, like (1, 28, 28)")
    if classes < 1:
        raise BadInput(f"model {name}: classes = {classes} must be at least 1")
    with _drawing_from(rng.key(seed, "init", name) >> 1):
        return MODELS[name](shape, classes)


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Draw from this seed on the CPU in float32, then put generator and default type back."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _image(name: str, shape: Shape, smallest: int = SMALLEST) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise BadInput(
            f"model {name} needs images as (channels, height, width), not {shape}: "
            "use multinomial or 2nn, or reshape the data"
        )
    if min(shape[1:]) < smallest:
        raise BadInput(
            f"model {name} needs images of at least {smallest}x{smallest}, "
            f"not {shape[1]}x{shape[2]}: use multinomial or 2nn"
        )
    return shape[0], shape[1], shape[2]


def _left(pixels: int) -> int:
    """Pixels per side after two rounds of (5x5 convolution without padding, halving)."""
    return ((pixels - 4) // 2 - 4) // 2
