"""Deadlines, repeats and limits on replies of the server of a federation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from fairvar.validation import Checked, Count, Positive

OFF = 1e9  # a bound of so many times the usual does not act at all
Factor = Annotated[float, msgspec.Meta(ge=1, le=OFF)]


class FederationSettings(Checked, frozen=True, kw_only=True):
    """Who is asked in a round stands in `train.participation` and `train.participants`."""

    __where__: ClassVar[str | None] = "federation"

    deadline: Positive = 600.0  # seconds for one exchange; what comes later is left out
    patience: Positive = 600.0  # seconds to wait for enough clients to be there
    min_replies: Count = 1  # a round with fewer good replies is repeated …
    repeats: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3  # … so often, and then the run stops
    # A loss counts at most as so many times the largest median loss of any round, or the loss of
    # guessing among the classes. Honest clients are far from that.
    loss_cap: Factor = 100.0
    # No client gets a larger part of the sum of weights (in small rounds: twice its fair part).
    weight_cap: Annotated[float, msgspec.Meta(ge=0.5, le=1)] = 0.5
    largest: Positive = 1e9  # norms, losses and numbers of samples above this are not believed
    # Clients that may come back with another key than the one they are bound to, such as [2].
    rebind: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    # Clients that lie: what each of these holds and costs is measured in docs/robustness.md.
    # An update, a gradient or a change of buffers that is more than so many times as long as the
    # largest median of the past rounds is shortened to that median.
    norm_bound: Factor = 10.0
    # In FairLoss's mean loss no client counts as more than so many times the largest loss of the
    # others, `liars` left aside.
    mean_loss_bound: Factor = 5.0
    # What the updates and gradients of the clients become: their mean, or, coordinate by
    # coordinate, the mean without the `liars` largest and smallest, or the median.
    average: Literal["mean", "trimmed", "median"] = "mean"
    liars: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2  # the part of clients that may lie
