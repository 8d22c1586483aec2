"""`PlainBatchNorm` under vmap against a loop over torch's layer on unpadded batches, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from torch.nn.functional import cross_entropy

from fairvar.common.tree import Tree, expand, stack, tree_map, typed_as, weighted_sum
from fairvar.errors import BadInput
from fairvar.models import PlainBatchNorm, build, call, sample_weight_names, swap_batch_norm

torch.set_num_threads(1)
# torch's own forward mode imports something that it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated")

SIZES = [5, 2, 7, 3]  # real samples of the four clients; the longest batch has no padding
LONGEST = max(SIZES)
CLOSE = 1e-10


def small_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)),
        *(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
    ).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return net


def batches(padding: float = 1e3) -> tuple[Tensor, Tensor, Tensor]:
    """x, y, real; the padding holds large numbers, so that a leak shows."""
    torch.manual_seed(1)
    x = torch.randn(len(SIZES), LONGEST, 2, 10, 10, dtype=torch.float64)
    y = torch.randint(0, 3, (len(SIZES), LONGEST))
    real = (torch.arange(LONGEST) < torch.tensor(SIZES)[:, None]).double()
    return x + padding * (1 - real)[:, :, None, None, None], y, real


def own_state(net: nn.Module) -> tuple[Tree, Tree]:
    return {n: p.detach() for n, p in net.named_parameters()}, dict(net.named_buffers())


def client_params(params: Tree) -> list[Tree]:
    torch.manual_seed(2)
    return [tree_map(lambda p: p + 0.05 * torch.randn_like(p), params) for _ in SIZES]


def loop(net: nn.Module, params: Tree, i: int, direction: Tree | None = None) -> dict[str, Any]:
    """Client i the plain way: the original module in training mode, its real samples only."""
    x, y, _ = (t[i, : SIZES[i]] for t in batches())
    copies = {n: b.clone() for n, b in net.named_buffers()}
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    loss = cross_entropy(functional_call(net.train(), {**leaves, **copies}, (x,)), y)
    gradient = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    answer: dict[str, Any] = {
        "loss": loss.detach(),
        "gradient": dict(zip(leaves, gradient, strict=True)),
        "buffers": copies,
    }
    if direction is not None:
        inner = sum((g * direction[n]).sum() for n, g in answer["gradient"].items())
        product = torch.autograd.grad(inner, list(leaves.values()))
        answer["product"] = dict(zip(leaves, product, strict=True))
    return answer


def assert_equal(tree: Tree, expected: Tree) -> None:
    assert tree.keys() == expected.keys()
    for name, leaf in expected.items():
        assert torch.allclose(tree[name].to(leaf.dtype), leaf, rtol=CLOSE, atol=CLOSE), name


def pick(tree: Tree, i: int) -> Tree:
    return tree_map(lambda leaf: leaf[i], tree)


def client_loss_of(module: nn.Module) -> Any:
    def client_loss(
        params: Tree, buffers: Tree, x: Tensor, y: Tensor, real: Tensor
    ) -> tuple[Tensor, Tree]:
        outputs, buffers = call(module, params, buffers, x, real)
        losses = cross_entropy(outputs, y, reduction="none")
        return (losses * real).sum() / real.sum(), buffers

    return client_loss


@pytest.mark.parametrize("stacked", [True, False])
def test_recipe_a_shared_parameters_autograd_outside(stacked: bool) -> None:
    net = small_net()
    module = swap_batch_norm(net).train()
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    given = expand(buffers, len(SIZES)) if stacked else buffers
    in_dims = (None, 0 if stacked else None, 0, 0, 0)
    losses, new = vmap(client_loss_of(module), in_dims=in_dims)(params, given, *batches())
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    pooled = torch.autograd.grad(losses @ weights, list(params.values()))
    expected = [loop(net, own_state(net)[0], i) for i in range(len(SIZES))]
    for i, answer in enumerate(expected):
        assert torch.allclose(losses[i], answer["loss"], rtol=CLOSE, atol=CLOSE)
        assert_equal(pick(new, i), answer["buffers"])
    total = {n: sum(weights[i] * e["gradient"][n] for i, e in enumerate(expected)) for n in params}
    assert_equal(dict(zip(params, pooled, strict=True)), total)
    assert not any(b.requires_grad for b in new.values())
    assert_equal(dict(module.named_buffers()), dict(net.named_buffers()))  # nothing in place


def test_recipe_b_parameters_of_their_own() -> None:
    net = small_net()
    module = swap_batch_norm(net).train()
    params, buffers = own_state(module)
    clients = client_params(params)
    step = vmap(grad_and_value(client_loss_of(module), has_aux=True))
    gradients, (losses, new) = step(stack(clients), expand(buffers, len(SIZES)), *batches())
    for i, client in enumerate(clients):
        answer = loop(net, client, i)
        assert torch.allclose(losses[i], answer["loss"], rtol=CLOSE, atol=CLOSE)
        assert_equal(pick(gradients, i), answer["gradient"])
        assert_equal(pick(new, i), answer["buffers"])


def hessian_products(module: nn.Module, form: str) -> Any:
    client_loss = client_loss_of(module)

    def forward_over_reverse(params: Tree, v: Tree, *data: Any) -> Any:
        return jvp(
            lambda p: grad(client_loss, has_aux=True)(p, *data), (params,), (v,), has_aux=True
        )

    def reverse_over_forward(params: Tree, v: Tree, *data: Any) -> Any:
        def slope(p: Tree) -> tuple[Tensor, Tree]:
            _, along, new = jvp(lambda q: client_loss(q, *data), (p,), (v,), has_aux=True)
            return along, new

        product, new = grad(slope, has_aux=True)(params)
        return grad(client_loss, has_aux=True)(params, *data)[0], product, new

    def reverse_over_reverse(params: Tree, v: Tree, *data: Any) -> Any:
        def slope(p: Tree) -> tuple[Tensor, tuple[Tree, Tree]]:
            gradient, new = grad(client_loss, has_aux=True)(p, *data)
            return sum((gradient[n] * v[n]).sum() for n in v), (gradient, new)  # type: ignore[return-value]

        product, (gradient, new) = grad(slope, has_aux=True)(params)
        return gradient, product, new

    return {
        "forward over reverse": forward_over_reverse,
        "reverse over forward": reverse_over_forward,
        "reverse over reverse": reverse_over_reverse,
    }[form]


@pytest.mark.parametrize(
    "form", ["forward over reverse", "reverse over forward", "reverse over reverse"]
)
def test_recipe_c_hessian_vector_products(form: str) -> None:
    net = small_net()
    module = swap_batch_norm(net).train()
    params, buffers = own_state(module)
    clients = client_params(params)
    directions = [tree_map(torch.randn_like, params) for _ in SIZES]
    gradients, products, new = vmap(hessian_products(module, form))(
        stack(clients), stack(directions), expand(buffers, len(SIZES)), *batches()
    )
    for i, client in enumerate(clients):
        answer = loop(net, client, i, directions[i])
        assert_equal(pick(gradients, i), answer["gradient"])
        assert_equal(pick(products, i), answer["product"])
        assert_equal(pick(new, i), answer["buffers"])  # one update, though there were two passes


def test_padding_gives_and_gets_no_gradient() -> None:
    module = swap_batch_norm(small_net()).train()
    params, buffers = own_state(module)
    x, y, real = batches()
    both = vmap(
        grad(client_loss_of(module), argnums=(0, 2), has_aux=True), in_dims=(None, None, 0, 0, 0)
    )
    (to_params, to_x), _ = both(params, buffers, x, y, real)
    assert torch.equal(to_x * (1 - real)[:, :, None, None, None], torch.zeros_like(x))
    (other, _), _ = both(params, buffers, *batches(padding=0.0))
    assert_equal(to_params, other)


@pytest.mark.parametrize("padding", [0.0, 1e30])
def test_a_layer_never_makes_nan_of_padding(padding: float) -> None:
    layer = PlainBatchNorm(3).double().train()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    x[2:] = padding
    for real in ([1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]):
        layer.sample_weight = torch.tensor(real, dtype=torch.float64)
        x.requires_grad_()
        outputs = layer(x)
        (gradient,) = torch.autograd.grad((outputs**2).sum(), x)
        assert torch.isfinite(outputs).all()
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(layer.running_var).all()


def test_padding_remains_a_copy_of_a_sample() -> None:
    """Zeros in its place would be NaN in a later layer that divides by a sample's norm."""
    layer = PlainBatchNorm(3).double().train()
    layer.sample_weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    x[3] = x[0]
    outputs = layer(x)
    assert torch.equal(outputs[3], outputs[0])
    torch.testing.assert_close(outputs[:3], nn.BatchNorm2d(3).double()(x[:3]))


def test_a_batch_without_two_real_values_leaves_the_statistics() -> None:
    layer = PlainBatchNorm(3).train()
    before = {n: b.clone() for n, b in layer.state_dict().items()}
    for real in ([1.0, 0.0], [0.0, 0.0]):
        layer.sample_weight = torch.tensor(real)
        layer(torch.randn(2, 3))
        assert all(torch.equal(before[n], b) for n, b in layer.state_dict().items())
    layer.sample_weight = None
    with pytest.raises(BadInput, match="more than one value"):
        layer(torch.randn(1, 3))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (6, 3)),
        (nn.BatchNorm1d, (6, 3, 5)),
        (nn.BatchNorm2d, (6, 3, 4, 5)),
        (nn.BatchNorm3d, (6, 3, 2, 3, 2)),
    ],
)
def test_alone_it_is_torchs_layer(
    kind: type[nn.Module], shape: tuple[int, ...], affine: bool, track: bool
) -> None:
    layer = kind(3, affine=affine, track_running_stats=track).double()
    plain = swap_batch_norm(layer)
    assert isinstance(plain, PlainBatchNorm)
    for step in range(3):
        x = torch.randn(shape, dtype=torch.float64) * 3 + step
        assert torch.allclose(plain(x), layer(x), rtol=0, atol=1e-12)
    for mine, theirs in zip(plain.state_dict().values(), layer.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(plain.train(False)(x), layer.train(False)(x), rtol=0, atol=1e-12)


def test_evaluation_ignores_the_batch_and_its_weights() -> None:
    net = small_net()
    for _ in range(3):
        net(torch.randn(8, 2, 10, 10, dtype=torch.float64) + 1)
    module = swap_batch_norm(net).train(False)
    params, buffers = own_state(module)
    x, _, real = batches(padding=0.0)
    outputs, new = vmap(lambda x, real: call(module, params, buffers, x, real))(x, real)
    assert torch.allclose(outputs[0], net.train(False)(x[0]), rtol=0, atol=1e-12)
    assert_equal(pick(new, 2), buffers)


def test_state_dicts_are_interchangeable_and_names_are_given() -> None:
    net = build("lenet5", (3, 32, 32), 10)
    module = swap_batch_norm(net)
    assert list(module.state_dict()) == list(net.state_dict())
    assert dict(module.named_buffers()).keys() == dict(net.named_buffers()).keys()
    net.load_state_dict(module.state_dict())
    module.load_state_dict(net.state_dict())
    assert sample_weight_names(module) == ["1.sample_weight", "5.sample_weight"]
    assert sample_weight_names(net) == []
    assert sample_weight_names(PlainBatchNorm(2)) == ["sample_weight"]


def test_swapping_copies_and_keeps_flags_sharing_and_mode() -> None:
    shared = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared).train(False)
    shared.weight.requires_grad_(False)
    module = swap_batch_norm(net)
    assert isinstance(net[1], nn.BatchNorm1d)
    assert module[1] is module[3]  # type: ignore[index]
    assert not module[1].training  # type: ignore[index]
    assert not module[1].weight.requires_grad  # type: ignore[index]
    assert module[1].weight is not shared.weight  # type: ignore[index]
    before = {**dict(module.train().named_parameters()), **dict(module.named_buffers())}
    call(module, *own_state(module), torch.randn(5, 4), torch.ones(5))
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items())  # nothing stays behind
    assert module[1].sample_weight is None  # type: ignore[index]


def test_tied_weights_are_one_parameter_in_the_call() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)).double()
    net[2].weight = net[0].weight
    x = torch.randn(5, 4, dtype=torch.float64)
    params = {n: (2 * p.detach()).requires_grad_() for n, p in net.named_parameters()}
    outputs, _ = call(net, params, {}, x)
    w, b = params["0.weight"], params["0.bias"]
    assert torch.allclose(outputs, torch.tanh(x @ w.T + b) @ w.T)
    assert net[2].weight is net[0].weight


def test_half_precision_keeps_its_type_and_statistics_in_float32() -> None:
    layer = PlainBatchNorm(3)
    x = (torch.randn(64, 3) + 100).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert layer.running_var is not None
    assert layer.running_var.dtype == torch.float32
    reference = nn.BatchNorm1d(3)(x.float())
    assert torch.allclose(y.float(), reference, atol=0.02)


def test_misuse_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match="momentum"):
        swap_batch_norm(nn.BatchNorm2d(3, momentum=None))
    layer = PlainBatchNorm(3)
    with pytest.raises(BadInput, match="3 channels, got 1"):
        layer(torch.zeros(4, 1))
    layer.sample_weight = torch.ones(2)
    with pytest.raises(BadInput, match="fold"):
        layer(torch.zeros(4, 3))


def test_mobilenet_vectorised_equals_the_loop() -> None:
    net = build("mobilenet_v2", (3, 32, 32), 5).double()
    module = swap_batch_norm(net).train()
    params, buffers = own_state(module)
    torch.manual_seed(3)
    x, y = torch.randn(2, 4, 3, 32, 32, dtype=torch.float64), torch.randint(0, 5, (2, 4))
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.float64)
    step = vmap(grad_and_value(client_loss_of(module), has_aux=True), in_dims=(None, None, 0, 0, 0))
    gradients, (losses, new) = step(params, buffers, x, y, real)
    for i, size in enumerate((4, 3)):
        copies = {n: b.clone() for n, b in net.named_buffers()}
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        outputs = functional_call(net.train(), {**leaves, **copies}, (x[i, :size],))
        loss = cross_entropy(outputs, y[i, :size])
        assert torch.allclose(losses[i], loss, rtol=1e-8, atol=1e-10)
        expected = torch.autograd.grad(loss, list(leaves.values()))
        largest = max(g.norm() for g in expected)  # some are zero but for rounding
        for name, g in zip(leaves, expected, strict=True):
            assert (gradients[name][i] - g).norm() < 1e-8 * largest, name
        for name, b in copies.items():
            assert torch.allclose(new[name][i].to(b.dtype), b, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize("clients", range(1, 60))
def test_the_mean_of_equal_counts_is_that_count(clients: int) -> None:
    """Shares may add up to 0.9999999999999999, on one machine or version of torch and not on
    another: batch norm's counter then was 0 for ever."""
    below = torch.full((clients,), 1 / clients, dtype=torch.float64) * (1 - 1e-15)
    counts = {"n": torch.ones(clients, dtype=torch.int64), "x": torch.ones(clients)}
    mean = weighted_sum(below, {k: v.double() for k, v in counts.items()})
    found = typed_as(mean, {k: v[0] for k, v in counts.items()})
    assert found["n"].dtype == torch.int64
    assert int(found["n"]) == 1
    assert found["x"].dtype == torch.float32
    large = {"n": torch.tensor(2**62 + 1)}
    assert torch.equal(typed_as(large, large)["n"], large["n"])  # what was no mean stays
