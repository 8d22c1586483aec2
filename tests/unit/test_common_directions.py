"""What the papers of FedMGDA+, FedFV and AdaFed promise, on random updates."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt

import pytest
import torch
from torch import Tensor

import fairvar as fv
from fairvar.common.tree import gram
from fairvar.engine.server import Aggregator
from fairvar.methods import Replies


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(
    method: fv.Method, updates: Tensor, loss: Tensor | None = None, **more: Tensor
) -> Tensor:
    n = len(updates)
    loss = torch.linspace(1, 2, n, dtype=torch.float64) if loss is None else loss
    share = more.get("share", torch.full((n,), 1 / n, dtype=torch.float64))
    replies = Replies(loss, share, torch.arange(n), n, updates @ updates.T)
    return method.weigh({}, replies)[0]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    size = max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= tolerance * size, (found, expected)


def problems(number: int = 40, most: int = 7) -> Iterator[tuple[Tensor, Tensor]]:
    """Updates of 2 … `most` clients in more dimensions than clients, and their losses."""
    for seed in range(number):
        n = 2 + seed % (most - 1)
        common = drawn(1, most + 2, seed=seed) if seed % 3 else 0.0
        yield common + drawn(n, most + 2, seed=100 + seed), drawn(n, seed=200 + seed).exp()


# -- FedMGDA+ --------------------------------------------------------------------------------------
@pytest.mark.parametrize("eps", [0.0, 0.07, 0.3, 1.0])
def test_fedmgda_does_not_depend_on_the_length_of_an_update(eps: float) -> None:
    method = fv.FedMGDA(eps=eps, step=0.3)
    for updates, _ in problems():
        expected = weights(method, updates) @ updates
        factors = drawn(len(updates), seed=9).exp()[:, None]
        close(weights(method, factors * updates) @ (factors * updates), expected)
        assert float(expected.norm()) <= 0.3 * (1 + 1e-12)


def test_fedmgda_without_bounds_serves_every_client() -> None:
    """MGDA: ⟨u_i, d⟩ ≥ ‖d‖², so that no client's loss rises to first order."""
    for updates, _ in problems():
        u = updates / updates.norm(dim=1, keepdim=True)
        d = weights(fv.FedMGDA(eps=1.0), updates) @ updates
        assert float((u @ d).min()) >= float(d @ d) - 1e-10


def test_fedmgda_with_eps_zero_is_the_mean_direction() -> None:
    for updates, _ in problems():
        u = updates / updates.norm(dim=1, keepdim=True)
        share = drawn(len(u), seed=4).softmax(0)
        close(weights(fv.FedMGDA(eps=0.0), updates, share=share) @ updates, share @ u)


def test_fedmgda_of_equal_updates_is_a_step_along_them() -> None:
    update = drawn(1, 5)
    for n in (1, 4):
        found = weights(fv.FedMGDA(step=0.7), update.expand(n, 5))
        close(found, torch.full((n,), 0.7 / n, dtype=torch.float64) / update.norm())


@pytest.mark.parametrize("scale", ["unit", "mean"])
def test_fedmgda_leaves_clients_without_an_update_out(scale: str) -> None:
    updates, method = drawn(4, 6), fv.FedMGDA(scale=scale)
    share = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    still = updates * torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    found, others = weights(method, still, share=share), [0, 2, 3]
    rest = share[others] / share[others].sum()
    expected = weights(method, updates[others], torch.ones(3).double(), share=rest)
    if scale == "mean":  # the client counts in the mean length
        expected = expected * share[others].sum()
    close(found[others], expected)
    assert float(found[1]) == 0
    close(weights(method, 0 * updates), torch.zeros(4, dtype=torch.float64))


def test_the_step_of_fedmgda_decays() -> None:
    method = fv.FedMGDA(step=0.5, decay=0.8)
    for t in (0, 1, 7):
        assert method.at_round(t).step == pytest.approx(0.5 * 0.8**t, rel=1e-14)
        assert method.at_round(t).at_round(t).step == method.at_round(t).step
    assert 0 < method.at_round(10**6).step < 1e-299
    assert fv.FedMGDA().at_round(3) is not None


# -- FedFV -----------------------------------------------------------------------------------------
def fair_average(updates: Tensor, loss: Tensor, alpha: float, external: bool) -> Tensor:
    """The authors' loops on vectors."""
    n, order = len(loss), loss.argsort().tolist()
    keep = order[ceil((n - 1) * (1 - alpha)) :] if alpha > 0 else []
    moved = [u.clone() for u in updates]
    for i in range(n):
        for j in order:
            along = moved[i] @ updates[j]
            if i not in keep and j != i and along < 0:
                moved[i] -= along / (updates[j] @ updates[j]) * updates[j]
    d = torch.stack(moved).mean(0)
    if external:
        against = [u for u in updates if d @ u < 0]
        c = torch.stack(against).sum(0) if against else torch.zeros_like(d)
        if d @ c < 0:
            d = d - (d @ c) / (c @ c) * c
    return d * updates.mean(0).norm() / d.norm()


@pytest.mark.parametrize("external", ["official", "off"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_fedfv_from_products_is_fedfv_on_vectors(alpha: float, external: str) -> None:
    for updates, loss in problems(50):
        expected = fair_average(updates, loss, alpha, external == "official")
        found = weights(fv.FedFV(alpha=alpha, external=external), updates, loss) @ updates
        close(found, expected, 1e-9)


@pytest.mark.parametrize("external", ["official", "off"])
def test_the_step_of_fedfv_has_the_length_of_fedavgs(external: str) -> None:
    for updates, loss in problems():
        d = weights(fv.FedFV(external=external), updates, loss) @ updates
        assert float(d.norm()) == pytest.approx(float(updates.mean(0).norm()), rel=1e-10)


@pytest.mark.parametrize("external", ["official", "off"])
def test_fedfv_without_conflicts_is_fedavg(external: str) -> None:
    for updates, loss in problems():
        even = torch.full_like(loss, 1 / len(loss))
        close(weights(fv.FedFV(external=external), updates.abs(), loss), even)
    for updates, loss in problems():
        even = torch.full_like(loss, 1 / len(loss))
        close(weights(fv.FedFV(alpha=1.0, external="off"), updates, loss), even)


def test_fedfv_keeps_the_share_alpha() -> None:
    """0.7 of ten clients are seven, though 9 · (1 − 0.7) is no whole number: 9 − ⌈2.7⌉ …, and of
    eleven 10 · (1 − 0.7) = 3.0000000000000004 counts as 3."""
    K = torch.eye(11, dtype=torch.float64) - 0.09
    C = fv.FedFV(alpha=0.7)._projected(K)
    changed = (torch.eye(11, dtype=torch.float64) != C).any(1)
    assert changed.tolist() == [True] * 3 + [False] * 8


def test_fedfv_stays_where_two_opposite_updates_leave_nothing() -> None:
    one = drawn(1, 4)
    for alpha in (0.0, 0.1):
        found = weights(fv.FedFV(alpha=alpha), torch.cat([one, -one]))
        assert bool(torch.isfinite(found).all())
        assert float((found @ torch.cat([one, -one])).norm()) < 1e-12


# -- AdaFed ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("gamma", [0.0, 0.1, 1.0, 3.0])
def test_the_losses_of_adafed_fall_at_the_prescribed_rates(gamma: float) -> None:
    """⟨g_k, d⟩ = f_k^γ ‖d‖²"""
    for updates, loss in problems():
        d = weights(fv.AdaFed(gamma), updates, loss) @ updates
        close(updates @ d, loss**gamma * (d @ d), 1e-9)
        u = updates / updates.norm(dim=1, keepdim=True)
        scaled = weights(fv.AdaFed(gamma, normalise=True), updates, loss) * updates.norm(dim=1)
        d = scaled @ u
        close(u @ d, loss**gamma * (d @ d), 1e-9)


def test_adafed_is_the_papers_gram_schmidt_in_any_order() -> None:
    for seed, (updates, loss) in enumerate(problems()):
        order = torch.randperm(len(loss), generator=torch.Generator().manual_seed(seed))
        u: list[Tensor] = []
        for g, c in zip(updates[order], loss[order], strict=True):
            along = [g @ v / (v @ v) for v in u]
            rest = g - sum(a * v for a, v in zip(along, u, strict=True))
            u.append(rest / (c - sum(along)))
        inverse = torch.stack([1 / (v @ v) for v in u])
        expected = (inverse / inverse.sum()) @ torch.stack(u)
        close(weights(fv.AdaFed(1.0), updates, loss) @ updates, expected, 1e-8)


def test_adafed_scales_with_the_losses() -> None:
    for updates, loss in problems():
        found, more = (weights(fv.AdaFed(2.0), updates, f) for f in (loss, 3 * loss))
        close(more, found / 9)
        assert float(weights(fv.AdaFed(0.0), updates, loss).sum()) == pytest.approx(1, abs=1e-9)


def test_adafed_only_keeps_a_client_without_loss_from_rising() -> None:
    """f_k = 0: ⟨g_k, d⟩ = 0, and the others have their rates."""
    for updates, loss in problems():
        loss = loss * (torch.arange(len(loss)) > 0)
        d = weights(fv.AdaFed(1.0), updates, loss) @ updates
        close(updates @ d, loss * (d @ d), 1e-9)


def test_adafed_of_equal_clients_is_along_fedavg() -> None:
    update, loss = drawn(1, 5).expand(4, 5), torch.full((4,), 2.0, dtype=torch.float64)
    close(weights(fv.AdaFed(3.0), update, loss) @ update, update[0] / 8)


def test_adafed_moves_on_where_the_rates_cannot_be_met() -> None:
    """More clients than dimensions: least squares, and nothing is divided by zero."""
    for seed in range(20):
        updates, loss = drawn(6, 3, seed=seed), drawn(6, seed=50 + seed).exp()
        a = weights(fv.AdaFed(1.0), updates, loss)
        assert bool(torch.isfinite(a).all())
        assert float(loss @ a) == pytest.approx(1, abs=1e-9)
        assert 1e-3 < float((a @ updates).norm()) < 1e3


def test_adafed_stalls_where_equal_updates_have_other_losses() -> None:
    """As documented: two updates that differ by ε force ‖d‖ to about ε."""
    u, across = torch.eye(2, dtype=torch.float64)
    updates, loss = torch.stack([u, u + 1e-3 * across]), torch.tensor([1.0, 2.0]).double()
    length = float((weights(fv.AdaFed(1.0), updates, loss) @ updates).norm())
    assert length == pytest.approx(1e-3 / sqrt(1 + 1e-6), rel=1e-3)


def test_adafed_stays_where_no_common_direction_exists() -> None:
    """Opposite updates of equally bad clients, and clients without any loss."""
    one = drawn(1, 4)
    loss = torch.ones(2, dtype=torch.float64)
    assert float(weights(fv.AdaFed(), torch.cat([one, -one]), loss).abs().max()) == 0
    assert float(weights(fv.AdaFed(), drawn(2, 4), 0 * loss).abs().max()) == 0


@pytest.mark.parametrize("length", [1e-140, 1e-150, 1e-160, 1e-200])
def test_adafed_stays_where_updates_have_all_but_vanished(length: float) -> None:
    """Of a client whose model has converged to zero: 1 / ‖D‖² overflows before ‖D‖ is zero."""
    found = weights(fv.AdaFed(), length * drawn(3, 5))
    assert bool(found.isfinite().all())
    assert (float(found.abs().max()) == 0) is (length < 1e-145)


@pytest.mark.parametrize("normalise", [False, True])
def test_adafed_has_no_rates_for_losses_below_zero(normalise: bool) -> None:
    """f^γ is not real, or of the wrong sign: the run must end as diverged, not stand still. γ = 0
    does not look at the losses."""
    updates, loss = drawn(3, 5), torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    for gamma in (0.5, 1.0, 2.0):
        assert bool(weights(fv.AdaFed(gamma, normalise), updates, loss).isnan().all())
    unknown = torch.tensor([1.0, torch.nan, 2.0], dtype=torch.float64)
    assert bool(weights(fv.AdaFed(1.0, normalise), updates, unknown).isnan().all())
    found, expected = (weights(fv.AdaFed(0.0, normalise), updates, f) for f in (loss, loss.abs()))
    assert torch.equal(found, expected)


# -- runs that diverge -----------------------------------------------------------------------------
@pytest.mark.parametrize("method", [fv.FedMGDA(), fv.FedFV(), fv.AdaFed()], ids=repr)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_updates_that_are_not_finite_raise_nothing(method: fv.Method, value: float) -> None:
    updates = drawn(3, 4)
    updates[1, 2] = value
    assert weights(method, updates).shape == (3,)


@pytest.mark.parametrize("method", [fv.FedMGDA(), fv.FedFV(), fv.AdaFed()], ids=repr)
def test_products_that_overflow_end_the_run(method: fv.Method) -> None:
    """Updates of 1e160 have products beyond float64: weights of zero would look like a run that
    does not move."""
    half = torch.full((2,), 0.5, dtype=torch.float64)
    server = Aggregator(method, half, torch.arange(2), 2)
    for length, ends in ((1e150, False), (1e160, True)):
        found, _ = server.weigh({}, half, gram({"w": length * drawn(2, 4)}))
        assert bool(found.isnan().all()) is ends
