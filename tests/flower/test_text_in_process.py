"""Text with dropout over Flower's messages: the same model and scores as the reference loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

import fairvar as fv
from fairvar.deploy.flower.server import run_on
from fairvar.deploy.flower.setup import read_setup
from fairvar.runs.runner import federation_of, model_of
from fairvar.runs.stored import StoredRun
from grids import InProcessGrid

METHODS = {"fedavg": "", "fairgrad": "strength=0.1 exact=true"}


@pytest.mark.parametrize("method", METHODS)
def test_sequences_and_dropout_over_flower(method: str, tmp_path: Path) -> None:
    lines = {"ROMEO": "But soft, what light is it? ", "JULIET": "Ay me; good night, good night. "}
    text = "\n\n".join(f"{role}:\n{line * 80}" for role, line in lines.items())
    (tmp_path / "input.txt").write_text(text)
    options = (
        f"data.root={tmp_path} partition.name=natural train.dtype=float64 train.batch_size=9 "
        "train.local_epochs=1 train.local_steps=1 evaluate.every=1"
    )
    config = {
        **{"method": method, "method-options": METHODS[method], "model": "transformer"},
        **{"data": "shakespeare", "clients": 2, "rounds": 2, "lr": 0.3, "seed": 0},
        **{"options": options, "out": str(tmp_path / "runs")},
    }
    grid = InProcessGrid(config, {100: 0, 107: 1}, None)
    stored = StoredRun.open(run_on(grid, read_setup(config)))
    data = federation_of(stored.config)
    expected = fv.train(
        model_of(stored.config, data),
        data,
        stored.config.method,
        2,
        0.3,
        batch_size=9,
        local_epochs=1,
        dtype=torch.float64,
        engine="reference",
        evaluate_every=1,
    )
    found = stored.history()
    for name, leaf in expected.state.params.items():
        assert torch.allclose(found.state.params[name], leaf, rtol=1e-10, atol=1e-12)
    for key in (("test", "global"), ("test", "local"), ("valid", "global")):
        assert torch.equal(found.accuracy[key], expected.accuracy[key])
    assert int(found.samples["test"].sum()) > 10 * len(data.test.y)  # type: ignore[union-attr]
