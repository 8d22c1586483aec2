"""Why epochs of a MobileNetV2 on small images diverge: gradients of small batches are huge.

    python benchmarks/small_batches.py

The norm of the gradient of a fresh MobileNetV2 (torch's own layers, training mode) on a batch of
noise, in float64 and float32. At 32×32 the last layers have one pixel, so that batch norm divides
by the standard deviation of as many values as there are samples.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from fairvar.models.zoo import build

SEEDS = 3


def norm(batch: int, size: int, dtype: torch.dtype, seed: int) -> float:
    torch.manual_seed(seed)
    x, y = torch.randn(batch, 3, size, size, dtype=torch.float64), torch.randint(100, (batch,))
    net = build("mobilenet_v2", (3, size, size), 100).to(dtype).train()
    cross_entropy(net(x.to(dtype)), y).backward()
    found = [p.grad.double().square().sum() for p in net.parameters() if p.grad is not None]
    return float(torch.stack(found).sum().sqrt())


def main() -> None:
    torch.set_num_threads(1)
    print(f"norm of the gradient, {SEEDS} draws; torch {torch.__version__}")
    for size in (32, 64):
        for batch in (2, 3, 4, 8, 32):
            for dtype in (torch.float64, torch.float32):
                found = [norm(batch, size, dtype, seed) for seed in range(SEEDS)]
                shown = "  ".join(f"{value:9.3g}" for value in found)
                print(f"{size}×{size}, batch {batch:2d}, {str(dtype)[6:]}: {shown}", flush=True)


if __name__ == "__main__":
    main()
