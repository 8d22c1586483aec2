"""Convolutions as products are the same convolutions: values, gradients, curvature, per client."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from fairvar.models import build
from fairvar.models.plain import ProductConv2d, swap_convolutions

LAYERS = {
    "5x5": nn.Conv2d(3, 4, 5),
    "3x3, padded": nn.Conv2d(2, 5, 3, padding=1),
    "same": nn.Conv2d(2, 3, (3, 5), padding="same"),
    "1x1, no bias": nn.Conv2d(4, 6, 1, bias=False),
    "oblong": nn.Conv2d(1, 2, (2, 4), padding=(1, 0)),
}

# torch's own first use of forward-mode differentiation
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated")


def _stacked(layer: nn.Module, clients: int = 3) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(clients, *p.shape, generator=draw, dtype=torch.float64)
        for name, p in layer.named_parameters()
    }


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("side", [(8, 9), (7, 12)])
def test_own_convolutions_values_gradients_curvature(name: str, side: tuple[int, int]) -> None:
    layer = LAYERS[name].double()
    product = ProductConv2d.like(layer)
    params = _stacked(layer)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(3, 2, layer.in_channels, *side, generator=draw, dtype=torch.float64)

    def loss(module, p, inputs):
        return functional_call(module, p, (inputs,)).tanh().square().sum()

    def all_of(module):
        def one(p, inputs):
            # Through the inputs too: a later layer of a network needs them.
            both = grad(lambda a: loss(module, *a))
            at = (p, inputs)
            first = both(at)
            forward = jvp(both, (at,), (first,))[1]
            backward = vjp(both, at)[1](first)[0]
            return functional_call(module, p, (inputs,)), first, forward, backward

        return vmap(one)(params, x)

    torch.testing.assert_close(all_of(product), all_of(layer), rtol=1e-11, atol=1e-11)


def test_swapped_network_shares_names_and_leaves_the_rest() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 4, 1, groups=4),
        nn.Sequential(nn.Conv2d(4, 2, 1)),
    )  # fmt: skip
    swapped = swap_convolutions(net)
    kinds = [type(m) for m in swapped.modules() if isinstance(m, nn.Conv2d)]
    assert kinds == [ProductConv2d, nn.Conv2d, nn.Conv2d, ProductConv2d]
    assert not any(isinstance(m, ProductConv2d) for m in net.modules())
    assert swapped.state_dict().keys() == net.state_dict().keys()
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(swapped(x), net(x))


def test_a_layer_used_twice_stays_one_layer() -> None:
    shared = nn.Conv2d(2, 2, 3, padding=1)
    swapped = swap_convolutions(nn.Sequential(shared, nn.ReLU(), shared))
    assert swapped[0] is swapped[2]
    assert isinstance(swapped[0], ProductConv2d)


def test_group_norm_behind_products_can_be_differentiated_twice() -> None:
    """torch's own group norm refuses the strides that products leave, in forward mode."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3),
    ).double()  # fmt: skip
    params = _stacked(net)
    x = torch.randn(3, 5, 2, 6, 6, dtype=torch.float64)

    def products(module):
        def one(p, inputs):
            def loss(at):
                return functional_call(module, at, (inputs,)).square().sum()

            return jvp(grad(loss), (p,), (p,))[1], grad(lambda at: jvp(loss, (at,), (p,))[1])(p)

        return vmap(one)(params, x)

    torch.testing.assert_close(products(swap_convolutions(net)), products(net))


def test_nothing_to_swap_is_the_same_module() -> None:
    net = build("multinomial", (1, 8, 8), 10)
    assert swap_convolutions(net) is net


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_half_precision_by_autocast() -> None:
    layer = nn.Conv2d(3, 4, 5)
    x = torch.randn(2, 3, 12, 12)
    # Without oneDNN: its bfloat16 products fail on some virtual processors.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        made = ProductConv2d.like(layer)(x)
    torch.testing.assert_close(made.float(), layer(x), rtol=0.05, atol=0.05)
