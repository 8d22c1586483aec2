"""The models of the experiments, by name.

Initial parameters depend only on the seed, the name and the shapes: they are drawn on the CPU in
float32 from the stream ("init", name), and the global generators are not changed. All models but
MobileNetV2 have torch's default initialisation (uniform in ±1/√fan-in), also "multinomial", so that
seeds differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fairvar.common import rng
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


class SelfAttention(nn.Module):
    """Causal self-attention in plain operations, which support vmap and second derivatives in any
    order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b length width"]) -> Float[Tensor, "b length width"]:
        parts = self.inputs(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = (part.transpose(1, 2) for part in parts)  # (b, heads, length, features)
        score = q @ k.mT / math.sqrt(q.shape[-1])
        past = torch.ones(score.shape[-2:], dtype=torch.bool, device=x.device).tril()
        weight = torch.where(past, score, -torch.inf).softmax(-1)
        return self.outputs((weight @ v).transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """x + attention, then x + two layers, each of a normalised input and with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attend = nn.Sequential(
            nn.LayerNorm(width), SelfAttention(width, heads), nn.Dropout(dropout)
        )
        self.think = nn.Sequential(
            nn.LayerNorm(width),
            *(nn.Linear(width, 4 * width), nn.GELU()),
            *(nn.Linear(4 * width, width), nn.Dropout(dropout)),
        )

    def forward(self, x: Float[Tensor, "b length width"]) -> Float[Tensor, "b length width"]:
        x = x + self.attend(x)
        y: Tensor = x + self.think(x)
        return y


class Transformer(nn.Module):
    """Tokens → outputs for the next token after every position: a decoder, by default one that a
    CPU trains (19,041 parameters for 64 tokens of 65 kinds)."""

    def __init__(
        self,
        length: int,
        tokens: int,
        width: int = 32,
        layers: int = 1,
        heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        blocks = [TransformerBlock(width, heads, dropout) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Int64[Tensor, "b length"]) -> Float[Tensor, "b length tokens"]:
        return self.head(self.blocks(self.tokens(x) + self.places))


class LSTM(nn.Module):
    """Tokens → outputs for the next token after every position, by a recurrent layer. In plain
    operations: torch's own has no vmap rule, so clients would train one after another."""

    def __init__(self, tokens: int, width: int = 16, hidden: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.inputs, self.recurrent = nn.Linear(width, 4 * hidden), nn.Linear(hidden, 4 * hidden)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, x: Int64[Tensor, "b length"]) -> Float[Tensor, "b length tokens"]:
        """c ← σ(f) c + σ(i) tanh g,   h ← σ(o) tanh c,   with f larger by 1 at first."""
        given, seen = self.inputs(self.tokens(x)), []
        h = c = torch.zeros_like(given[:, 0, : given.shape[-1] // 4])
        for position in range(x.shape[1]):
            i, f, g, o = (given[:, position] + self.recurrent(h)).chunk(4, -1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            seen.append(h)
        return self.head(torch.stack(seen, 1))


def _lstm(shape: Shape, classes: int) -> nn.Module:
    _length("lstm", shape)
    return LSTM(classes)


def _transformer(shape: Shape, classes: int) -> nn.Module:
    return Transformer(_length("transformer", shape), classes)


def _length(name: str, shape: Shape) -> int:
    """The length of a sequence of tokens; the number of kinds of tokens is that of the classes."""
    if len(shape) != 1:
        raise BadInput(f"model {name} needs tokens as (length,), not samples of shape {shape}")
    return shape[0]


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "multinomial": _multinomial,
    "linear": _linear,
    "2nn": _two_hidden,
    "avgcnn": _avgcnn,
    "lenet5": _lenet5,
    "mobilenet_v2": _mobilenet_v2,
    "lstm": _lstm,
    "transformer": _transformer,
}


def build(
    name: str,
    input_shape: Shape,
    classes: int,
    seed: int = 0,
    make: Callable[[Shape, int], nn.Module] | None = None,
) -> nn.Module:
    """A model for inputs of this shape (without the batch axis), in training mode, on the CPU.

    "linear" has one output for any `classes`. `make` builds models that are not in `MODELS`; their
    initial parameters are drawn in the same way.
    """
    make = MODELS.get(name) if make is None else make
    if make is None:
        raise unknown("model", name, MODELS)
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        way = "" if shape else "; if a sample is one number, give x[:, None]"
        raise BadInput(f"model {name}: input shape {shape} must be positive, like (1, 28, 28){way}")
    if classes < 1:
        raise BadInput(f"model {name}: classes = {classes} must be at least 1")
    with _drawing_from(rng.key(seed, "init", name) >> 1):
        return make(shape, classes)


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Draw from this seed on the CPU in float32; restores the generator and the default dtype."""
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
