"""The text task: reader, models by name, sweep file, example."""

from __future__ import annotations

import gzip
import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import fairvar as fv
from checks import distance
from fairvar.data import sources
from fairvar.data.readers import text
from fairvar.data.sources import SOURCES
from fairvar.errors import IntegrityError
from fairvar.models import LSTM, Transformer, build, check_model
from fairvar.runs.plan import Plan
from fairvar.runs.runner import Watch, run_cell, run_folder
from fairvar.runs.stored import StoredRun

ROOT = Path(__file__).parents[2]
WORDS = ("sun", "moon", "king", "rose", "sword", "night", "day", "crown")


@pytest.fixture
def real() -> Path:
    """The folder of the real text, where it is."""
    folder = Path(os.environ.get("FAIRVAR_DATA", ROOT.parent / "shared" / "data")) / "shakespeare"
    if not folder.is_dir():
        pytest.skip("../shared/data/shakespeare is not there")
    return folder


def speech(role: str, characters: int, seed: int) -> str:
    """Made-up lines of this length, with the line break that the reader puts at their end."""
    draw, said = np.random.default_rng(seed), ""
    while len(said) < characters:
        said += str(draw.choice(WORDS)) + str(draw.choice([" ", ", ", ";\n"]))
    return f"{role}:\n{said[: characters - 2]}."


@pytest.fixture
def play(tmp_path: Path) -> Path:
    """Two roles that speak enough, one of them twice, and one that does not."""
    blocks = [speech("QUEEN", 1500, 0), speech("FOOL", 90, 1), speech("KING", 2000, 2),
              speech("QUEEN", 1500, 3)]  # fmt: skip
    (tmp_path / "input.txt").write_text("\n\n".join(blocks) + "\n")
    return tmp_path


def decoded(codes: np.ndarray) -> str:
    return "".join(text.ALPHABET[c] for c in codes.ravel())


def test_windows_hold_what_a_role_says(play: Path) -> None:
    data = sources.load("shakespeare", play)
    assert sorted(set(data.groups.tolist())) == ["KING", "QUEEN"]  # type: ignore[union-attr]
    rows = data.groups == "QUEEN"
    said = speech("Q", 1500, 0)[3:] + "\n" + speech("Q", 1500, 3)[3:] + "\n"
    x, y = data.x[rows], data.y[rows]
    real = y.ravel() >= 0
    assert decoded(x.ravel()[real]) == said[:-1]
    assert decoded(y.ravel()[real]) == said[1:]
    assert x.shape == (-(-2999 // 64), 64)
    assert set(y.ravel()[~real].tolist()) == {-100}
    assert "2 roles" in data.provenance
    packed = play / "packed"
    packed.mkdir()
    content = gzip.compress((play / "input.txt").read_bytes())
    (packed / "tinyshakespeare.txt.gz").write_bytes(content)
    assert sources.load("shakespeare", packed).sha256 == data.sha256


def test_other_texts_are_refused(tmp_path: Path) -> None:
    for content, words in (
        ("Once upon a time\n", "instead of a name"),
        ("KING:\n" + "é" * 2000, "no ASCII"),
        ("KING:\n" + "#" * 2000, "'#' is none of its 65"),
        ("KING:\nOh!\n", "no role speaks 2000"),
    ):
        (tmp_path / "input.txt").write_text(content)
        with pytest.raises(IntegrityError, match=words):
            sources.load("shakespeare", tmp_path)


def test_a_federation_of_roles(play: Path) -> None:
    plays = fv.load_federation("shakespeare", 2, fv.Natural(), root=play)
    assert plays.train.x.dtype == torch.int64
    assert (plays.classes, plays.input_shape) == (65, (64,))
    answers = sum(int(split.answers.sum()) for split in plays.splits.values())
    assert answers == 1999 + 2999
    assert plays.class_counts.sum() == int(plays.train.answers.sum())
    shares = plays.provenance
    assert 0 < shares["mean_total_variation"] < shares["majority_share"] < 0.3
    with pytest.raises(fv.BadInput, match="set clients to 2"):
        fv.load_federation("shakespeare", 3, fv.Natural(), root=play)
    part = fv.load_federation("shakespeare", 3, fv.IID(), root=play, samples=20)
    assert sum(len(split.y) for split in part.splits.values()) == 20


def test_models_of_text() -> None:
    tokens = torch.randint(0, 65, (3, 12))
    for model in (Transformer(12, 65, 8, 1, 2), LSTM(65, 4, 6)):
        assert check_model(model, tokens) == []
        model.eval()
        later = tokens.clone()
        later[:, 7:] = 0  # what follows changes no earlier output
        assert torch.equal(model(tokens)[:, :7], model(later)[:, :7])
    assert sum(p.numel() for p in build("transformer", (64,), 65).parameters()) == 19_041
    assert sum(p.numel() for p in build("lstm", (64,), 65).parameters()) == 51_121
    for name in ("transformer", "lstm"):
        with pytest.raises(fv.BadInput, match="needs tokens"):
            build(name, (1, 28, 28), 10)


def test_an_lstm_is_torchs() -> None:
    ours, theirs = LSTM(9, 4, 6).double(), torch.nn.LSTM(4, 6, batch_first=True).double()
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.inputs.weight)
        theirs.weight_hh_l0.copy_(ours.recurrent.weight)
        theirs.bias_ih_l0.copy_(ours.inputs.bias)
        theirs.bias_hh_l0.copy_(ours.recurrent.bias)
        theirs.bias_hh_l0[6:12] += 1  # the forget gate
        x = torch.randint(0, 9, (2, 7))
        assert torch.allclose(ours.head(theirs(ours.tokens(x))[0]), ours(x))


def test_the_sweep_on_a_tiny_text(play: Path, tmp_path: Path) -> None:
    """Every method of configs/shakespeare.toml in one small run, stored and read again."""
    small = [f"data.root={play}", "data.clients=2", "train.participants=1", "train.rounds=2",
             "train.local_steps=1", "evaluate.every=1", "sweep.seeds=1"]  # fmt: skip
    plan = Plan.load(ROOT / "configs" / "shakespeare.toml", small)
    cells = {cell.method.label: cell for cell in plan.cells}
    assert len(cells) >= 5
    for cell in cells.values():
        assert run_cell(cell, tmp_path / "runs", Watch()) is not None
        stored = StoredRun.open(run_folder(cell, tmp_path / "runs"))
        history = stored.history()
        table = history.accuracy["test", "global"]
        counts = table * history.samples["test"]
        assert torch.allclose(counts, counts.round())
        assert history.rounds == 2


def test_the_real_text(real: Path) -> None:
    data = sources.load("shakespeare", real)
    assert data.sha256 == SOURCES["shakespeare"].sha256
    names, windows = np.unique(data.groups, return_counts=True)  # type: ignore[arg-type]
    assert (len(names), windows.min(), windows.max(), windows.sum()) == (99, 32, 589, 14_387)
    assert names[windows.argmax()] == "GLOUCESTER"
    assert (data.y >= 0).sum() == 917_361
    plays = fv.load_federation("shakespeare", 99, fv.Natural(), root=real)
    assert {part: len(split.y) for part, split in plays.splits.items()} == {
        "train": 11_605, "valid": 1391, "test": 1391}  # fmt: skip


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_models_of_text_are_the_same_in_kernel_and_reference(name: str, real: Path) -> None:
    some = fv.load_federation("shakespeare", 3, fv.IID(), root=real, samples=24)
    found, expected = (
        fv.train(name, some, fv.FedAvg(), 2, 0.3, batch_size=3, local_steps=2, momentum=0.9,
                 dtype=torch.float64, engine=engine, evaluate_every=2)
        for engine in ("vmapped", "reference")
    )  # fmt: skip
    assert max(distance(found, expected).values()) <= 1e-10


@pytest.mark.slow
def test_the_example_runs(real: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["shakespeare.py", "--rounds", "1", "--root", str(real)])
    runpy.run_path(str(ROOT / "examples" / "shakespeare.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "99 clients" in said
    assert len(re.findall(r"accuracy: mean 0\.\d+, worst role 0\.\d+", said)) == 3
