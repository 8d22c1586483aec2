"""What a notebook shows: short, well-formed and escaped."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import fairvar as fv
from fairvar.common import display

EVIL = '<script>alert("x")</script>&'


def arrays(clients: int, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(clients)
    return [(torch.randn(4 + i % 3, 4, generator=draw), torch.arange(4 + i % 3) % classes)
            for i in range(clients)]  # fmt: skip


DATA = fv.Federation.from_arrays(arrays(6), test=arrays(6), name=EVIL)
HISTORY = fv.train("multinomial", DATA, fv.FedAvg(), 4, evaluate_every=1)
REGRESSION = fv.Federation.from_arrays([(x, x[:, :1]) for x, _ in arrays(3)])


class Evil(fv.Method, frozen=True):
    title = EVIL


def parsed(thing: object) -> ElementTree.Element:
    """Its HTML, which must be well-formed: every value escaped, every tag closed."""
    text = thing._repr_html_()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    assert "<script>" not in text
    return ElementTree.fromstring(text)


THINGS = {
    "federation": DATA,
    "regression": REGRESSION,
    "split": DATA.train,
    "history": HISTORY,
    "history without evaluations": fv.train("linear", REGRESSION, fv.FedAvg(), 1, loss="mse"),
    "history of a method": fv.train("multinomial", DATA, Evil(), 1),
    "state": HISTORY.state,
    "fairness": HISTORY.fairness(),
    "comparison": fv.compare({EVIL: HISTORY, "FedAvg": HISTORY}),
}


@pytest.mark.parametrize("name", THINGS)
def test_reprs_are_short_and_html_is_well_formed(name: str) -> None:
    thing = THINGS[name]
    assert len(repr(thing)) < 300
    assert "tensor(" not in repr(thing)
    assert "\n" not in repr(thing)
    parsed(thing)


def test_other_reprs_are_short() -> None:
    dataset = fv.Dataset("d", np.ones((2000, 9), np.float32), np.zeros(2000, np.int64), 1)
    for thing in (HISTORY.accuracy, HISTORY.to_frame(), dataset, HISTORY.state.flat):
        assert "tensor(" not in repr(thing)
    assert len(repr(dataset)) + len(repr(HISTORY.accuracy)) < 400


def test_a_federation_shows_who_holds_what() -> None:
    found = parsed(DATA)
    space = "{http://www.w3.org/2000/svg}"
    bars = [title.text for title in found.iter(f"{space}title")]
    assert len(bars) == int((DATA.class_counts > 0).sum())
    assert bars[0] == "client 0: 2 training samples of class 0"
    assert DATA.class_counts.sum(1).tolist() == DATA.sizes.tolist()
    assert EVIL in "".join(found.itertext())


def test_a_large_federation_shows_its_first_clients() -> None:
    many = fv.Federation.from_arrays(arrays(300, classes=50), classes=50)
    text = many._repr_html_()
    assert "the first 80 of 300" in text
    assert text.count("<rect") <= display.MOST_PARTS


def test_a_history_shows_its_scores_and_a_curve() -> None:
    found = parsed(HISTORY)
    cells = [cell.text for cell in found.iter("td")]
    assert f"{HISTORY.fairness().mean:.4g}" in cells
    (line,) = found.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 4


def test_curves_leave_gaps_and_survive_constants() -> None:
    assert display.curves("", [], {}) == ""
    assert display.curves("", [1, 2], {"a": [float("nan")] * 2}) == ""
    text = display.curves("", [1, 2, 3], {"a": [0.5, float("nan"), 0.5], "b": [0.5] * 3})
    lines = [e.attrib["points"].split() for e in ElementTree.fromstring(text)
             if e.tag.endswith("polyline")]  # fmt: skip
    assert sorted(map(len, lines)) == [2, 3]
