"""Layers in plain operations are torch's: values, gradients, curvature, for each client."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fairvar.models import MobileNetV2, call, swap_batch_norm
from fairvar.models.plain import (
    PlainConv2d,
    PlainGroupNorm,
    TwiceConv2d,
    plain_layers,
    twice_layers,
)

LAYERS = {
    "1x1": nn.Conv2d(4, 6, 1),
    "1x1, no bias, stride": nn.Conv2d(4, 6, 1, stride=(2, 3), bias=False),
    "1x1, padded": nn.Conv2d(4, 2, 1, padding=1),
    "5x5": nn.Conv2d(3, 4, 5),
    "3x3, padded, stride": nn.Conv2d(2, 5, 3, stride=2, padding=1),
    "same, dilated": nn.Conv2d(2, 3, (3, 4), padding="same", dilation=(2, 1)),
    "oblong": nn.Conv2d(1, 2, (2, 4), padding=(1, 0), stride=(1, 2)),
    "groups": nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "groups, dilated": nn.Conv2d(6, 3, 2, groups=3, dilation=2, bias=False),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False),
    "depthwise, stride": nn.Conv2d(4, 4, 3, groups=4, padding=1, stride=2),
    "depthwise, 1x1, stride": nn.Conv2d(4, 4, 1, groups=4, stride=2),
    "depthwise, larger stride": nn.Conv2d(3, 3, 2, groups=3, stride=3),
    "depthwise, dilated": nn.Conv2d(3, 3, 3, groups=3, dilation=2, padding=1),
    "depthwise, oblong": nn.Conv2d(3, 3, (3, 2), groups=3, dilation=(1, 3), padding=(2, 0)),
    "depthwise, twice the channels": nn.Conv2d(3, 6, 3, groups=3, stride=(1, 2)),
    "one channel": nn.Conv2d(1, 1, 3, groups=1),
}  # fmt: skip

# torch's own first use of forward-mode differentiation
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script.*deprecated"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("side", [(8, 9), (7, 12)])
@pytest.mark.parametrize("kind", [PlainConv2d, TwiceConv2d])
def test_values_gradients_curvature_of_clients(
    name: str, side: tuple[int, int], kind: type[nn.Conv2d]
) -> None:
    layer = LAYERS[name].double()
    clients_agree(layer, kind.like(layer), (layer.in_channels, *side))


def test_layers_for_two_derivatives_share_parameters_and_leave_others() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Conv1d(3, 3, 1))
    circular = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    made = [type(m) for m in twice_layers(nn.Sequential(*net, circular))]
    assert made == [TwiceConv2d, nn.GroupNorm, nn.Conv1d, nn.Conv2d]
    assert net.state_dict().keys() == twice_layers(net).state_dict().keys()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 4, 3), (6, 2, 3, 2)])
def test_group_norm(affine: bool, shape: tuple[int, ...]) -> None:
    layer = nn.GroupNorm(3, 6, affine=affine).double()
    clients_agree(layer, PlainGroupNorm.like(layer), shape)


def clients_agree(layer: nn.Module, plain: nn.Module, shape: tuple[int, ...]) -> None:
    """Outputs, gradients and Hessian-vector products in three orders of modes, under vmap."""
    params = {k: drawn(3, *p.shape) for k, p in layer.named_parameters()}
    x = drawn(3, 2, *shape, seed=2)

    def all_of(module: nn.Module):
        def loss(at: tuple[dict[str, Tensor], Tensor]) -> Tensor:
            return functional_call(module, at[0], (at[1],)).tanh().square().sum()

        def one(p: dict[str, Tensor], inputs: Tensor):
            # Through the inputs too: a later layer of a network needs them.
            at = (p, inputs)
            first = grad(loss)(at)
            forward_over_reverse = jvp(grad(loss), (at,), (first,))[1]
            reverse_over_reverse = vjp(grad(loss), at)[1](first)[0]
            reverse_over_forward = grad(lambda a: jvp(loss, (a,), (first,))[1])(at)
            found = functional_call(module, p, (inputs,)), first
            return *found, forward_over_reverse, reverse_over_reverse, reverse_over_forward

        return vmap(one)(params, x)

    torch.testing.assert_close(all_of(plain), all_of(layer), rtol=1e-10, atol=1e-10)


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.down = None
        if stride != 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + (x if self.down is None else self.down(x)))


def resnet18(norm, width: int = 4) -> nn.Module:
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), norm(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage in range(4):
        for number in range(2):
            outputs, stride = width * 2**stage, 2 if stage and not number else 1
            layers.append(Residual(inputs, outputs, stride, norm))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 5))


def short_mobilenet() -> nn.Module:
    net = MobileNetV2(5)
    net.features = nn.Sequential(*net.features[:4])
    net.classifier[1] = nn.Linear(24, 5)
    return net


NETWORKS = {
    "MobileNetV2": short_mobilenet,
    "ResNet-18, batch norm": lambda: resnet18(nn.BatchNorm2d),
    "ResNet-18, group norm": lambda: resnet18(lambda channels: nn.GroupNorm(2, channels)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("masked", [False, True])
def test_networks_of_clients(name: str, masked: bool) -> None:
    """Own weights, padded samples left out of batch norm, gradients and Hessian-vector products."""
    torch.manual_seed(0)
    net = swap_batch_norm(NETWORKS[name]().double().train())
    clients, samples = 2, 4
    params = {k: torch.stack([p.detach(), p.detach() * 1.1]) for k, p in net.named_parameters()}
    buffers = {k: torch.stack([b] * clients) for k, b in net.named_buffers()}
    x, y = drawn(clients, samples, 3, 32, 32, seed=2), torch.arange(clients * samples) % 5
    real = torch.ones(clients, samples)
    if masked:
        real[1, 3] = 0

    def all_of(module: nn.Module):
        def one(p, b, inputs, targets, mask):
            def loss(at):
                outputs, after = call(module, at, b, inputs, mask if masked else None)
                found = nn.functional.cross_entropy(outputs, targets, reduction="none")
                return (found * mask).sum() / mask.sum(), after

            gradient, after = grad(loss, has_aux=True)(p)
            away = {k: leaf + 0.01 for k, leaf in gradient.items()}
            product = jvp(lambda at: grad(loss, has_aux=True)(at)[0], (p,), (away,))[1]
            return gradient, product, after

        return vmap(one)(params, buffers, x, y.reshape(clients, samples), real)

    rewritten = plain_layers(net, largest=None)
    kinds = {type(m) for m in rewritten.modules() if isinstance(m, nn.Conv2d)}
    assert kinds == {PlainConv2d}
    for found, expected in zip(all_of(rewritten), all_of(net), strict=True):
        # Relative to the largest entry of all: a bias before a batch norm has a slope of zero.
        largest = max((float(leaf.abs().max()) for leaf in expected.values()), default=0)
        for key, leaf in expected.items():
            assert float((found[key] - leaf).abs().max()) <= 1e-10 * max(1.0, largest), key


def test_a_step_traces_into_plain_operations() -> None:
    """No transform and no autograd function is left for a compiler to meet."""
    net = plain_layers(swap_batch_norm(short_mobilenet().train()))
    params = {k: torch.stack([p.detach()] * 2) for k, p in net.named_parameters()}
    buffers = dict(net.named_buffers())
    x = torch.randn(2, 2, 3, 16, 16)

    def step(p, inputs):
        def one(at, sample):
            return call(net, at, buffers, sample)[0].square().sum()

        return vmap(grad(one))(p, inputs)

    traced = make_fx(step)(params, x)
    assert all(n.op != "call_function" or "aten" in str(n.target) or "getitem" in str(n.target)
               for n in traced.graph.nodes)  # fmt: skip
    for key, leaf in step(params, x).items():
        torch.testing.assert_close(traced(params, x)[key], leaf)


def test_rewritten_network_shares_names_and_leaves_the_rest() -> None:
    class Own(nn.Conv2d):
        pass

    hooked = nn.Conv2d(4, 4, 1)
    hooked.register_forward_hook(lambda *_: None)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), Own(4, 4, 1),
        hooked, nn.Sequential(nn.Conv2d(4, 2, 5)),
    )  # fmt: skip
    rewritten = plain_layers(net)
    kinds = [type(m) for m in rewritten.modules() if isinstance(m, nn.Conv2d)]
    assert kinds == [PlainConv2d, nn.Conv2d, Own, nn.Conv2d, nn.Conv2d]
    assert not any(isinstance(m, PlainConv2d) for m in net.modules())
    assert rewritten.state_dict().keys() == net.state_dict().keys()
    x = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(rewritten(x), net(x))


def test_a_layer_used_twice_stays_one_layer() -> None:
    shared = nn.Conv2d(2, 2, 3, padding=1)
    rewritten = plain_layers(nn.Sequential(shared, nn.ReLU(), shared))
    assert rewritten[0] is rewritten[2]
    assert isinstance(rewritten[0], PlainConv2d)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("groups", [1, 3])
def test_half_precision_by_autocast(groups: int) -> None:
    layer = nn.Conv2d(3, 6, 5, groups=groups)
    x = torch.randn(2, 3, 12, 12)
    # Without oneDNN: its bfloat16 products fail on some virtual processors.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        made = PlainConv2d.like(layer)(x)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.float(), layer(x), rtol=0.05, atol=0.05)
