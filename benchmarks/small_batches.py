"""Why epochs of a MobileNetV2 on small images diverge: derivatives on small batches are huge.

    python benchmarks/small_batches.py                   # norms of first and second derivatives
    python benchmarks/small_batches.py --rounds 20       # runs by the reference loop

The norm of the gradient g of a fresh MobileNetV2 (torch's own layers, training mode) on a batch of
noise, and of the product of the Hessian with g, in float64 and float32. At 32×32 the last layers
have one pixel, so that batch norm divides by the standard deviation of as many values as there are
samples. With --rounds: FedAvg and FairGrad in ragged epochs whose last batches hold two samples,
and the same with `drop_last`, by the plain loop in float64.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fairvar as fv
from fairvar.models.norm import hessian_product
from fairvar.models.zoo import build

SEEDS = 3
SIZES, BATCH, CLASSES = (18, 34), 16, 10  # samples of the clients: the last batch has two
STRENGTHS = (0.0, 1e-5, 1e-4)


def norms(batch: int, size: int, dtype: torch.dtype, seed: int) -> tuple[float, float]:
    """‖g‖ and ‖H g‖."""
    torch.manual_seed(seed)
    x, y = torch.randn(batch, 3, size, size, dtype=torch.float64), torch.randint(100, (batch,))
    net = build("mobilenet_v2", (3, size, size), 100).to(dtype).train()
    params = list(net.parameters())
    loss = cross_entropy(net(x.to(dtype)), y)
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    gradient = [slope.detach() for slope in slopes]
    return length(gradient), length(hessian_product(slopes, params, gradient))


def length(parts: list[Tensor] | tuple[Tensor, ...]) -> float:
    return float(torch.stack([part.double().square().sum() for part in parts]).sum().sqrt())


def derivatives() -> None:
    print(f"‖g‖, ‖H g‖, {SEEDS} draws; torch {torch.__version__}")
    for size in (32, 64):
        for batch in (2, 4, 8, 32):
            for dtype in (torch.float64, torch.float32):
                found = [norms(batch, size, dtype, seed) for seed in range(SEEDS)]
                shown = "  ".join(f"{g:8.2g}, {product:8.2g}" for g, product in found)
                print(f"{size}×{size}, batch {batch:2d}, {str(dtype)[6:]}: {shown}", flush=True)


def run(strength: float, drop_last: bool, rounds: int, lr: float) -> fv.History:
    """A strength of 0 is FedAvg."""
    torch.manual_seed(0)
    pairs = [(torch.randn(m, 3, 32, 32), torch.randint(CLASSES, (m,))) for m in SIZES]
    federation = fv.Federation.from_arrays(pairs, classes=CLASSES)
    method = fv.FairGrad(strength) if strength else fv.FedAvg()
    return fv.train(
        "mobilenet_v2", federation, method, rounds, lr, batch_size=BATCH, local_epochs=1,
        drop_last=drop_last, dtype=torch.float64, engine="reference", evaluate_every=1,
        evaluate_splits=("train",), evaluate_local=False,
    )  # fmt: skip


def runs(rounds: int, lr: float, strengths: list[float], ways: tuple[bool, ...]) -> None:
    print(f"clients of {SIZES} images of 32×32, batches of {BATCH}, lr {lr:g}, float64, reference "
          f"loop; torch {torch.__version__}")  # fmt: skip
    for strength in strengths:
        for drop_last in ways:
            started = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the table says which runs diverge
                history = run(strength, drop_last, rounds, lr)
            end = history.diverged_at
            said = "finite" if end is None else f"not finite after round {end}"
            losses = " ".join(f"{float(row.nanmean()):.3g}" for row in history.loss)
            print(f"strength {strength:g}, drop_last {drop_last}: {said}; losses {losses} "
                  f"({time.process_time() - started:.0f} s)", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=0, help="of the runs; 0: derivatives only")
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--drop-last", action="store_true", help="only runs with whole batches")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rounds:
        ways = (True,) if given.drop_last else (False, True)
        runs(given.rounds, given.lr, given.strengths, ways)
    else:
        derivatives()


if __name__ == "__main__":
    main()
