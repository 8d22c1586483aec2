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
from jaxtyping import Float
from torch import Tensor, nn

from fairvar import rng
from fairvar.errors import BadInput, unknown

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


# MobileNetV2, table 2: expansion t, output channels c, repeats n, stride s of the first repeat.
BOTTLENECKS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip
STEM, FEATURES = 32, 1280


def _unit(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution, batch norm, ReLU6; the size only changes by the stride."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class Bottleneck(nn.Module):
    """Widen (1x1), filter each channel (3x3), narrow linearly (1x1); add the input if it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *([_unit(inputs, wide, 1)] if expansion > 1 else []),
            _unit(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d v u"]:
        y: Tensor = self.conv(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al., CVPR 2018), width 1.0, ending in a global mean: 32x32 and 64x64
    images go in as they are (the total stride is 32).

    Parameters and buffers carry the names and shapes of torchvision's `mobilenet_v2`, so that
    published weight files load strictly. `dropout` is 0: FairGrad's two passes over a batch must
    see the same function.
    """

    def __init__(self, classes: int = 1000, channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [_unit(channels, STEM, 3, stride=2)]
        width = STEM
        for expansion, outputs, repeats, stride in BOTTLENECKS:
            for i in range(repeats):
                layers.append(Bottleneck(width, outputs, stride if i == 0 else 1, expansion))
                width = outputs
        layers.append(_unit(width, FEATURES, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(FEATURES, classes))
        # He's normal (by fan-out) for convolutions; N(0, 0.01²) and zero for the classifier.
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0.0, 0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        return self.classifier(self.features(x).mean((2, 3)))


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
