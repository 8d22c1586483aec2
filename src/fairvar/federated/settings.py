"""How patient and how wary the server of a federation is."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from fairvar.checked import Checked, Count, Positive


class FederationSettings(Checked, frozen=True, kw_only=True):
    """Who is asked in a round stands in `train.participation` and `train.participants`."""

    __where__: ClassVar[str | None] = "federation"

    deadline: Positive = 600.0  # seconds for one exchange; what comes later is left out
    patience: Positive = 600.0  # seconds to wait for enough clients to be there
    min_replies: Count = 1  # a round with fewer good replies is repeated …
    repeats: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3  # … so often, and then the run stops
    # A loss counts at most as so many times the largest median loss of any round, or the loss of
    # guessing among the classes. Honest clients are far from that.
    loss_cap: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 100.0
    # No client gets a larger part of the sum of weights (in small rounds: twice its fair part).
    weight_cap: Annotated[float, msgspec.Meta(ge=0.5, le=1)] = 0.5
    largest: Positive = 1e9  # norms, losses and numbers of samples above this are not believed
    # Clients that may come back with another key than the one they are bound to, such as [2].
    rebind: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
