"""Data sets that need no files: two small real ones inside the package, and synthetic federations
whose optimum or law is known, against which theory and engine are checked.

`embedded/README.md` says where the real ones come from; `tools/make_embedded.py` rebuilds them.
"""

from __future__ import annotations

import hashlib
import io
from importlib import resources

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, UInt8

from fairvar.common import rng
from fairvar.data.dataset import Dataset
from fairvar.data.federation import SPLITS, Federation, Split
from fairvar.data.partition import Assignment, statistics_of
from fairvar.errors import BadInput, IntegrityError

Matrices = Float64[np.ndarray, "n d d"]
Centres = Float64[np.ndarray, "n d"]
CLIENTS_AT_ONCE = 1000  # whose samples are computed together
MOST_CLIENTS = 200_000  # of a synthetic federation: about 2 GB of samples
SHA256 = {
    "mnist_1000.npz": "b4e692f921685e2ee207398b88076216efe68ac802ac7c6a7d77c21a1017e030",
    "digits.npz": "35ca2870ddda628aecd42364588fe5012bdb3df9ce91b9b943752b82b02f04c9",
}
MNIST_MEAN, MNIST_SD_OVER_PIXELS = 0.1307, 0.3015  # FL-bench's constants, on [0, 1] pixels


def mnist_1000() -> Dataset:
    """1,000 MNIST training images, 100 per class; pool: 4,000 test images, 400 per class."""
    arrays = _read("mnist_1000.npz")
    return Dataset(
        name="mnist_1000",
        x=_mnist_pixels(arrays["x"]),
        y=arrays["y"].astype(np.int64),
        classes=10,
        pool_x=_mnist_pixels(arrays["pool_x"]),
        pool_y=arrays["pool_y"].astype(np.int64),
        sha256=SHA256["mnist_1000.npz"],
        provenance="stratified sample of the original MNIST train and t10k files",
    )


def digits() -> Dataset:
    """1,797 handwritten digits of 8 × 8 pixels (the UCI optdigits test set, as in scikit-learn)."""
    arrays = _read("digits.npz")
    return Dataset(
        name="digits",
        x=(arrays["x"] / np.float32(16)).astype(np.float32)[:, None],
        y=arrays["y"].astype(np.int64),
        classes=10,
        sha256=SHA256["digits.npz"],
        provenance="UCI optdigits test set as packaged by scikit-learn",
    )


def _mnist_pixels(raw: UInt8[np.ndarray, "N 28 28"]) -> Float32[np.ndarray, "N 1 28 28"]:
    pixels = (raw / 255.0 - MNIST_MEAN) / MNIST_SD_OVER_PIXELS
    return pixels.astype(np.float32)[:, None]


def _read(file: str) -> dict[str, np.ndarray]:
    """The arrays of one file, after its checksum was found right."""
    path = resources.files("fairvar.data") / "embedded" / file
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"{file} is missing from the package; install fairvar again") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[file]:
        raise IntegrityError(f"{file} is damaged (sha256 {found[:12]}…, expected "
                             f"{SHA256[file][:12]}…); install fairvar again")  # fmt: skip
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def quadratics(
    A: Float[np.ndarray, "n d d"], m: Float[np.ndarray, "n d"], c: Float[np.ndarray, " n"]
) -> Federation:
    """Data on which client i's loss is f_i(w) = ½ (w − m_i)ᵀ A_i (w − m_i) + c_i, exactly.

    For the mean over samples of ½ (prediction − y)² and a Linear(d, 1) without bias. With N = d + 1
    samples: d rows √N A^½ with targets √N A^½ m, and a zero row whose target √(2 N c) carries c.
    """
    clients, dim = m.shape
    if not np.allclose(A, A.transpose(0, 2, 1), rtol=1e-10, atol=1e-12):
        raise BadInput("A holds a matrix that is not symmetric; use (A + Aᵀ) / 2")
    if (c < 0).any():
        raise BadInput(f"c[{int(np.argmin(c))}] = {c.min():g} is negative; a loss cannot be, add a "
                       "constant to all c")  # fmt: skip
    eigenvalue, vector = np.linalg.eigh(A.astype(np.float64))
    if (eigenvalue <= 0).any():
        client = int(np.argwhere(eigenvalue <= 0)[0, 0])
        raise BadInput(
            f"A[{client}] is not positive definite (its smallest eigenvalue is "
            f"{eigenvalue[client].min():g}); add a multiple of the identity"
        )
    samples = dim + 1
    x, y = np.zeros((clients, samples, dim)), np.empty((clients, samples))
    x[:, :dim] = np.einsum("nij,nj,nkj->nik", vector, np.sqrt(samples * eigenvalue), vector)
    y[:, dim] = np.sqrt(2 * samples * c)
    for i in range(clients):
        y[i, :dim] = x[i, :dim] @ m[i]
    train = _split(x.reshape(-1, dim), y.reshape(-1, 1), np.full(clients, samples))
    return Federation.from_splits(
        {"train": train}, None, "quadratic", provenance={"dataset": "quadratic"}
    )


def _split(x: np.ndarray, y: np.ndarray, counts: Int64[np.ndarray, " n"]) -> Split:
    return Split(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(counts))


def random_quadratics(
    clients: int, dim: int, seed: int
) -> tuple[Federation, Matrices, Centres, Float64[np.ndarray, " n"]]:
    """Random (federation, A, m, c): eigenvalues in [½, 2], m ~ N(0, I), c in [0, 1]."""
    _check_clients(clients)
    normal, exponent = np.empty((clients, dim, dim)), np.empty((clients, dim))
    m, c = np.empty((clients, dim)), np.empty(clients)
    for i in range(clients):
        matrix = rng.stream(seed, "quadratic matrix", i)
        normal[i], exponent[i] = matrix.standard_normal((dim, dim)), matrix.uniform(-1, 1, dim)
        draw = rng.stream(seed, "quadratic centre", i)
        m[i], c[i] = draw.standard_normal(dim), draw.uniform()
    rotation, _ = np.linalg.qr(normal)
    product = rotation * np.exp2(exponent)[:, None] @ rotation.transpose(0, 2, 1)
    A = (product + product.transpose(0, 2, 1)) / 2  # symmetric to the last bit
    return quadratics(A, m, c), A, m, c


def logistic(
    clients: int,
    dim: int = 10,
    samples: int = 60,
    heterogeneity: float = 1.0,
    seed: int = 0,
    classes: int = 2,
) -> Federation:
    """Multinomial-logistic clients: x ~ N(v_i, I), y ~ softmax(W_i x), natural grouping.

    v_i = h·N(0, I) shifts the inputs, W_i = W + h·N(0, 1) the concept (both scaled by 1/√dim);
    h = `heterogeneity`. Client i trains on samples/2 … 3·samples/2 draws and validates and tests
    on samples/2 each of the same law. A client's data do not depend on how many clients there are.
    """
    if min(clients, dim) < 1 or samples < 2 or classes < 2 or heterogeneity < 0:
        raise BadInput("logistic needs clients ≥ 1, dim ≥ 1, samples ≥ 2, classes ≥ 2 and "
                       "heterogeneity ≥ 0")  # fmt: skip
    _check_clients(clients)
    held_out = samples // 2
    # One array for each part of the data, of the most rows that it may have: copies cost more.
    most = {"train": samples + held_out, "valid": held_out, "test": held_out}
    made = {
        part: (
            np.empty((clients * rows, dim)),
            np.empty(clients * rows, dtype=np.int64),
            np.full(clients, held_out),
        )
        for part, rows in most.items()
    }
    end = dict.fromkeys(SPLITS, 0)
    for start in range(0, clients, CLIENTS_AT_ONCE):
        ids = range(start, min(start + CLIENTS_AT_ONCE, clients))
        end = _logistic(made, end, ids, seed, (dim, samples, classes), heterogeneity)
    splits = {part: _split(x[: end[part]], y[: end[part]], n) for part, (x, y, n) in made.items()}
    facts: dict[str, object] = {"seed": seed, "heterogeneity": heterogeneity}
    return _dealt("logistic", splits, classes, facts)


def _logistic(
    made: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    start: dict[str, int],
    ids: range,
    seed: int,
    shape: tuple[int, int, int],
    heterogeneity: float,
) -> dict[str, int]:
    """Inputs, labels and sizes of some clients, written into the arrays of all; returns where they
    end. Each client draws from a stream of its own, one by one; the rest is computed for all."""
    dim, samples, classes = shape
    held_out = samples // 2
    inputs = [made[part][0][start[part] :] for part in SPLITS]
    sizes = [made[part][2][ids.start : ids.stop] for part in SPLITS]
    most = (samples + held_out, held_out, held_out)
    uniform = [np.empty((len(ids) * rows, classes)) for rows in most]
    ends = [0, 0, 0]
    shift = np.empty((len(ids), 1 + classes, dim))  # of the inputs, and of the concept
    for row, draw in enumerate(rng.streams(seed, "logistic", of=ids)):
        sizes[0][row] = count = int(draw.integers(samples - held_out, samples + held_out + 1))
        draw.standard_normal(out=shift[row])
        for k in range(3):
            some = slice(ends[k], ends[k] + count)
            draw.standard_normal(out=inputs[k][some])
            draw.random(out=uniform[k][some])
            ends[k], count = some.stop, held_out
    shift = heterogeneity * shift / np.sqrt(dim)
    common = rng.stream(seed, "logistic", "common").standard_normal((classes, dim))
    weight = (common + shift[:, 1:]).transpose(0, 2, 1)
    after = dict(start)
    for part, x, u, counts, end in zip(SPLITS, inputs, uniform, sizes, ends, strict=True):
        x[:end] += np.repeat(shift[:, 0], counts, axis=0)
        after[part] += end
        made[part][1][start[part] : after[part]] = _labels(x[:end], u[:end], weight, counts)
    return after


def _labels(x: np.ndarray, u: np.ndarray, weight: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """From the softmax law by the Gumbel trick: no sums that can over- or underflow."""
    score, sizes = -np.log(-np.log(1 - u)), np.unique(counts)
    of = np.repeat(counts, counts)
    for count in sizes:  # clients of one size in one product
        rows, clients = (of == count, counts == count) if len(sizes) > 1 else (..., ...)
        product = x[rows].reshape(-1, count, x.shape[1]) @ weight[clients]
        score[rows] += product.reshape(-1, u.shape[1])
    found: np.ndarray = np.argmax(score, axis=1)
    return found


CLINIC_COLUMNS = ("age", "severity", "pressure", "glucose", "lactate", "albumin", "urea", "noise")
ASSAY = slice(3, 7)  # the columns that the laboratory measures
LARGEST_CLINIC, HELD_OUT_OF_CLINIC = 400, 150


def clinics(clients: int = 30, seed: int = 0) -> Federation:
    """A table of made-up patients by clinic: was the patient readmitted, from eight columns?

    Clinics differ as real ones do. Population: the mean of the patient's state z is the clinic's
    own. Prevalence: so is the constant b_i in P(y = 1) = sigmoid(w·z + z_0 z_1 / 2 + b_i). Device:
    every fourth clinic, on average, has another assay, which halves the laboratory's columns and
    shifts them by 1. Size: 20 … 400 patients train, lognormal; 150 each validate and test. The rule
    (w) is the same everywhere, and a clinic does not depend on how many others there are.
    """
    if clients < 1:
        raise BadInput("clinics needs clients ≥ 1")
    _check_clients(clients)
    dim = len(CLINIC_COLUMNS)
    rule = rng.stream(seed, "clinics", "rule").choice([-1.0, 1.0], dim) * np.linspace(1.2, 0.4, dim)
    rule[-1] = 0.0
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {part: [] for part in SPLITS}
    for i in range(clients):
        draw = rng.stream(seed, "clinics", i)
        size = int(np.clip(np.exp(draw.normal(4.4, 0.7)), 20, LARGEST_CLINIC))
        centre, prevalence = 0.5 * draw.standard_normal(dim), 0.7 * draw.standard_normal()
        other_assay = draw.uniform() < 0.25
        for part in SPLITS:
            z = centre + draw.standard_normal((size, dim))
            logit = z @ rule + z[:, 0] * z[:, 1] / 2 + prevalence
            y = (draw.logistic(size=size) < logit).astype(np.int64)
            if other_assay:
                z[:, ASSAY] = 0.5 * z[:, ASSAY] + 1
            parts[part].append((z, y))
            size = HELD_OUT_OF_CLINIC
    splits = {
        part: _split(
            np.concatenate([x for x, _ in pairs]),
            np.concatenate([y for _, y in pairs]),
            np.array([len(y) for _, y in pairs]),
        )
        for part, pairs in parts.items()
    }
    return _dealt("clinics", splits, 2, {"seed": seed, "features": list(CLINIC_COLUMNS)})


def _dealt(
    name: str, splits: dict[str, Split], classes: int, facts: dict[str, object]
) -> Federation:
    """A federation whose clients were made one by one, with the facts of this partition."""
    labels, sizes = splits["train"].y.numpy(), splits["train"].counts.numpy()
    held = statistics_of(labels, Assignment(np.split(np.arange(len(labels)), sizes.cumsum()[:-1])))
    return Federation.from_splits(splits, classes, name, {**held, "dataset": name, **facts})


def _check_clients(clients: int) -> None:
    if clients > MOST_CLIENTS:
        raise BadInput(f"clients = {clients}; a synthetic data set has at most {MOST_CLIENTS}")
