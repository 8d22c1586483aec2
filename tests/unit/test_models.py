"""The zoo: sizes, shapes, seeds, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fairvar.errors import BadInput
from fairvar.models import MODELS, MobileNetV2, build

torch.set_num_threads(1)

MNIST, CIFAR, TINY = (1, 28, 28), (3, 32, 32), (3, 64, 64)
IMAGE_MODELS = [name for name in MODELS if name not in ("lstm", "transformer")]


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("multinomial", MNIST, 10, 7_850),
        ("linear", (5,), 1, 5),
        ("2nn", MNIST, 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
        ("avgcnn", CIFAR, 10, 878_538),
        ("lenet5", CIFAR, 10, 62_050),
        ("mobilenet_v2", CIFAR, 100, 2_351_972),
        ("mobilenet_v2", TINY, 200, 2_480_072),
    ],
)
def test_parameter_counts_are_those_of_the_specification(
    name: str, shape: tuple[int, ...], classes: int, count: int
) -> None:
    assert trainable(build(name, shape, classes)) == count


def test_batch_norm_statistics_are_counted_apart() -> None:
    for name, count in (("lenet5", 44), ("mobilenet_v2", 34_112)):
        buffers = build(name, CIFAR, 10).named_buffers()
        assert sum(b.numel() for n, b in buffers if "running" in n) == count


@pytest.mark.parametrize("name", IMAGE_MODELS)
@pytest.mark.parametrize("shape", [MNIST, CIFAR, TINY])
def test_every_model_takes_every_image_size(name: str, shape: tuple[int, ...]) -> None:
    model = build(name, shape, 7).train(False)
    outputs = model(torch.zeros(2, *shape))
    assert outputs.shape == (2, 1 if name == "linear" else 7)


@pytest.mark.parametrize(
    ("name", "shape", "features"),
    [
        ("avgcnn", MNIST, 1024),
        ("avgcnn", CIFAR, 1600),
        ("avgcnn", TINY, 10_816),
        ("lenet5", MNIST, 256),
        ("lenet5", CIFAR, 400),
    ],
)
def test_flatten_sizes(name: str, shape: tuple[int, ...], features: int) -> None:
    linear = next(m for m in build(name, shape, 10).modules() if isinstance(m, nn.Linear))
    assert linear.in_features == features


def test_the_smallest_image_works_and_one_pixel_less_is_refused() -> None:
    for name in ("avgcnn", "lenet5"):
        assert build(name, (1, 16, 16), 10)(torch.zeros(2, 1, 16, 16)).shape == (2, 10)
        with pytest.raises(BadInput, match="at least 16x16, not 15x16") as error:
            build(name, (1, 15, 16), 10)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "words"),
    [
        ("avgcnn", (1, 8, 8), 10, "use multinomial or 2nn"),
        ("lenet5", (784,), 10, r"\(channels, height, width\)"),
        ("multinomial", (), 10, r"must be positive.*one number, give x\[:, None\]"),
        ("multinomial", (0, 3), 10, "must be positive"),
        ("multinomial", (3,), 0, "classes = 0"),
        ("lenet", MNIST, 10, "did you mean 'lenet5'"),
    ],
)
def test_refusals(name: str, shape: tuple[int, ...], classes: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        build(name, shape, classes)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_parameters_depend_on_the_seed_and_the_name_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(name, CIFAR, 10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        again = build(name, CIFAR, 10, seed=3).state_dict()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    other = build(name, CIFAR, 10, seed=4)
    assert all(torch.equal(first[n], again[n]) and first[n].dtype == again[n].dtype for n in first)
    assert any(not torch.equal(first[n], p) for n, p in other.named_parameters())


def test_models_of_one_seed_do_not_share_numbers() -> None:
    a = next(build("multinomial", CIFAR, 200).parameters())
    b = next(build("2nn", CIFAR, 10).parameters())
    assert not torch.allclose(a, b)


def test_mobilenet_has_no_dropout_unless_asked() -> None:
    assert [m.p for m in MobileNetV2().modules() if isinstance(m, nn.Dropout)] == [0.0]
    assert [m.p for m in MobileNetV2(dropout=0.2).modules() if isinstance(m, nn.Dropout)] == [0.2]
