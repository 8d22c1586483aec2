"""Checks of FedMGDA+, FedFV and AdaFed, whose weights come from the products of client updates, and
of FedEBA+.

Golden numbers: full batches, η = 0.1, from (½, …, ½), computed apart from this code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import fairvar as fv
from checks import golden_federation, golden_problem_b, printed_points, run_by

PRINTED = 6e-11  # half a unit of the tenth decimal, and a little
Points = list[tuple[float, ...]]
GOLDEN: dict[str, Points] = {
    "FedMGDA+ A": [
        (0.4870053407, 0.4906339795),
        (0.4753949078, 0.4822498755),
        (0.4650462314, 0.4747640637),
    ],
    "AdaFed A": [
        (0.4831261316, 0.4877610139),
        (0.4687187063, 0.4772942579),
        (0.4564384476, 0.4683603375),
    ],
    "AdaFed A 0": [
        (0.4817073171, 0.4853658537),
        (0.4664017193, 0.4732745817),
        (0.4536056569, 0.4632747726),
    ],
    "FedFV A": [
        (0.4545109161, 0.5324922028),
        (0.4185300866, 0.5604820439),
        (0.3899798010, 0.5844542822),
    ],
    "FedFV A official": [
        (0.4500000000, 0.4750000000),
        (0.4073689703, 0.4503188775),
        (0.3696036672, 0.4254688307),
    ],
    "FedMGDA+ B 0": [
        (0.4625564389, 0.4965811661, 0.4845290123),
        (0.4269185848, 0.4945991301, 0.4690608794),
        (0.3930146358, 0.4939920990, 0.4535993198),
    ],
    "FedMGDA+ B .05": [
        (0.4690574452, 0.4921270361, 0.4888001362),
        (0.4398596978, 0.4856424373, 0.4776906940),
        (0.4123144237, 0.4804800422, 0.4666653690),
    ],
    "FedMGDA+ B .1": [
        (0.4755584515, 0.4876729061, 0.4930712601),
        (0.4527932524, 0.4766794065, 0.4863203523),
        (0.4316024692, 0.4669545830, 0.4797336971),
    ],
    "FedMGDA+ B 1": [
        (0.4884323071, 0.4911552784, 0.4990923429),
        (0.4780053633, 0.4831539988, 0.4982589305),
        (0.4686224867, 0.4759287647, 0.4974944818),
    ],
    "FedMGDA+ B 5:3:2": [
        (0.4859087988, 0.4855025511, 0.4988965923),
        (0.4732336220, 0.4721035777, 0.4980022959),
        (0.4618726811, 0.4597379925, 0.4973033141),
    ],
    "FedMGDA+ B mean": [
        (0.4435126586, 0.4715106119, 0.4839868535),
        (0.3976154220, 0.4509704787, 0.4693825362),
        (0.3598866382, 0.4366985521, 0.4558505627),
    ],
    "AdaFed B": [
        (0.4980743180, 0.5006418940, 0.5035429215),
        (0.4964416753, 0.5012100870, 0.5065862237),
        (0.4950553970, 0.5017103143, 0.5091996603),
    ],
    "AdaFed B normalised": [
        (0.4982551834, 0.5003408112, 0.5026797561),
        (0.4967409041, 0.5006720418, 0.5050743868),
        (0.4954240520, 0.5009884392, 0.5072120348),
    ],
    "FedFV B": [
        (0.3607441670, 0.4878907971, 0.4424812864),
        (0.2506747232, 0.4952108787, 0.3864816447),
        (0.1664478370, 0.5164075275, 0.3342114996),
    ],
    "FedFV B official": [
        (0.3751106833, 0.4213026223, 0.4674945614),
        (0.2798682532, 0.3363782783, 0.4448812324),
        (0.2093282331, 0.2461372930, 0.4270254020),
    ],
    "FedEBA+ A unfair": [
        (0.3880003132, 0.6024996085),
        (0.3384810610, 0.6442444094),
        (0.3160076472, 0.6551404696),
    ],
    "FedEBA+ A fair": [
        (0.4190001566, 0.5637498042),
        (0.3674218474, 0.6039855102),
        (0.3348760325, 0.6269888357),
    ],
    "FedEBA+ A unfair, two steps": [
        (0.2922115775, 0.6998623633),
        (0.3030461386, 0.6490260232),
        (0.2869926589, 0.6522599410),
    ],
    "FedEBA+ A fair, two steps": [
        (0.3807502741, 0.6108246359),
        (0.3318486901, 0.6519281808),
        (0.3111942960, 0.6615353670),
    ],
}


def golden_data(name: str) -> fv.Federation:
    """Problem A, or B with three clients in three dimensions. Copies of its samples give a client
    the same loss and another size."""
    if len(GOLDEN[name][0]) == 2:
        return golden_federation()
    data = golden_problem_b()
    copies = (5, 3, 2) if name.endswith("5:3:2") else (1, 1, 1)
    pairs = [data.train.of(i) for i in range(3)]
    return fv.Federation.from_arrays(
        [(x.repeat(k, 1), y.repeat(k, 1)) for (x, y), k in zip(pairs, copies, strict=True)]
    )


def follows(name: str, engine: str = "auto", **train: object) -> Callable[[fv.Method], None]:
    """x¹, x², x³ are the printed ones, to every printed digit."""
    data = golden_data(name)
    train = {"local_steps": 2, **train} if name.endswith("two steps") else train

    def check(method: fv.Method) -> None:
        for rounds, expected in printed_points(GOLDEN[name], engine):
            start = (0.5,) * len(expected)
            history = run_by(engine, data, method, start, rounds, **train)
            found = history.state.params["weight"][0]
            gap = float((found - torch.tensor(expected, dtype=torch.float64)).abs().max())
            assert gap <= PRINTED, f"x^{rounds} = {found.tolist()}, expected {expected}"

    return check
