"""MobileNetV2 (Sandler et al., CVPR 2018, table 2), width 1.0.

Parameters and buffers carry the names and shapes of torchvision's `mobilenet_v2`, so that published
weight files load strictly, and torchvision itself is not needed. The network ends in a global mean,
so 32x32 and 64x64 images go in as they are (the total stride is 32).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

# Table 2: expansion t, output channels c, repeats n, stride s of the first repeat.
BOTTLENECKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
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
    """`dropout` is 0: FairGrad's two passes over a batch must see the same function."""

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
        self._initialise()

    def _initialise(self) -> None:
        """He's normal (by fan-out) for convolutions; N(0, 0.01²) and zero for the classifier."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, 0.0, 0.01)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        return self.classifier(self.features(x).mean((2, 3)))
