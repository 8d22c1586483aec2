"""The data of a node. Put yours here: a function that reads what this node has."""

from flwr.app import Context

import fairvar as fv
from fairvar.deploy.flower import embedded_part


def data(context: Context) -> fv.ClientData:
    """The digits that come with fairvar: node i holds part i. Instead, for example

    a CSV file with a header (or a folder with train.csv, valid.csv and test.csv), on a scale that
    all sites have agreed on:

        columns, labels = ["age", "pressure"], ["no", "yes"]  # in this order at every site
        found = fv.ClientData.from_csv(place_of(context), "ill", columns=columns, labels=labels)
        return found.scaled(mean=[50.0, 120.0], sd=[20.0, 15.0])

    or NumPy arrays, split into train, valid and test here:

        with np.load(place_of(context)) as arrays:
            return fv.ClientData.from_arrays(arrays["x"], arrays["y"], name=site_of(context))

    with `from fairvar.deploy.flower import place_of, site_of`. A node's configuration says where
    its data are and what the site is called: --node-config 'site="berlin" data="/data/ward.csv"'.
    In pyproject.toml set data = "own", input-shape, classes and sites = "berlin lyon turin". To
    simulate the sites on one machine: fairvar flower run . --data FOLDER, with a file for each.
    """
    return embedded_part(context)
