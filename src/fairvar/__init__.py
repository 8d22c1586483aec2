"""fairvar: fair federated learning. Train models whose quality is even across clients."""

# ruff: noqa: F405
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairvar._version import __version__

if TYPE_CHECKING:
    from fairvar.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Importing torch takes seconds, in which a command could not be interrupted cleanly: it is
        imported with the first name that needs it."""
        if name in __all__:
            api = import_module("fairvar.api")
            globals().update({known: getattr(api, known) for known in __all__})
            return globals()[name]
        try:
            return import_module(f"fairvar.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module 'fairvar' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AFL", "IID", "METHODS", "MODELS", "QFFL", "AAggFF", "BadInput", "Dataset", "Dirichlet",
    "FairGrad", "FairLoss", "Fairness", "FairvarError", "FedAvg", "Federation", "History",
    "IntegrityError", "Method", "Natural", "RunFailed", "Shards", "State", "__version__",
    "build_federation", "check_model", "fairness", "load_federation", "metrics", "objectives",
    "register", "theory", "train",
]  # fmt: skip
