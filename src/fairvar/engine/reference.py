"""The reference: client after client, a module, autograd and plain sums. The oracle of the tests.

Slow on purpose, and without the engine's tricks: own forward passes, torch's own batch norm,
Hessian-vector products by differentiating twice, the methods exactly as their papers' boxes.
"""

from __future__ import annotations

import torch

from fairvar.engine import client
from fairvar.engine.aggregate import Answers, aggregate
from fairvar.engine.run import Run
from fairvar.engine.state import Outcome, State
from fairvar.engine.vmapped import Observer, Trained
from fairvar.tree import stack, weighted_sum


def reference_round(run: Run, state: State, t: int, observe: Observer | None = None) -> Outcome:
    method, ids = run.method.at_round(t), run.participation.of_round(t)
    share = run.method.share(run.federation.sizes[ids]).to(run.device)
    sent = client.load(run, state.x, state.buffers)

    # Before training: f_i and ∇f_i at x^t, on the first batch (exact methods average them now).
    first = [client.probe(run, method, sent, t, i) for i in ids.tolist()]
    loss, gradient = torch.stack([f.loss for f in first]), stack([f.gradient for f in first])
    mean_loss, mean_gradient = share @ loss, weighted_sum(share, gradient)
    a, g = (mean_loss, mean_gradient) if method.probes else (state.mean_loss, state.mean_gradient)

    # Local steps.
    trained = [
        client.train(run, method, sent, t, i, f, a, g)
        for i, f in zip(ids.tolist(), loss, strict=True)
    ]
    params = [client.params_of(run, module) for module, _ in trained]
    buffers = [client.buffers_of(run, module) for module, _ in trained]
    own = torch.stack([factor for _, factor in trained]).double()
    ids = ids.to(run.device)
    if observe is not None:
        after = stack(buffers) if state.buffers else {}
        observe(Trained(ids, stack(params), after, loss, gradient, own))

    # Server.
    kept = mean_gradient if run.method.reports_gradient else None
    answers = Answers(ids, share, loss, params, buffers, mean_loss, kept, own)
    return aggregate(method, state, answers, run.clients, run.lr)
