"""A module that vmap refuses is trained client by client, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fairvar as fv


class Rows(nn.Module):
    """Reads an image row by row; torch's LSTM has no vmap rule."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(8, 6, batch_first=True)
        self.answers = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answers(self.reads(x[:, 0])[0][:, -1])


def test_an_lstm_trains_with_a_warning():
    federation = fv.load_federation("digits", clients=4)
    with pytest.warns(UserWarning, match="one after another"):
        history = fv.train(Rows(), federation, fv.FairLoss(0.1), rounds=3, lr=0.5, batch_size=8)
    assert history.provenance["engine"] == "reference"
    assert history.diverged_at is None
    found = history.accuracy["test", "local"]
    assert torch.isfinite(found).all()
    assert not torch.equal(found, history.accuracy["test", "global"])


def test_asked_for_a_fast_path_it_is_refused():
    federation = fv.load_federation("digits", clients=4)
    with pytest.raises(fv.BadInput, match="LSTM"):
        fv.train(Rows(), federation, fv.FedAvg(), rounds=1, engine="vmapped")
