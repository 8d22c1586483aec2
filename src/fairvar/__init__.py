"""fairvar: fair federated learning. Train models whose quality is even across clients."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairvar._version import __version__ as __version__

if TYPE_CHECKING:
    from fairvar.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Importing torch takes seconds, in which a command could not be interrupted cleanly: it is
        imported with the first name of `fairvar.api` that is used."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'fairvar' has no attribute {name!r}")
        try:
            return import_module(f"fairvar.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"fairvar.{name}":  # something that the module needs
                raise
        found = getattr(import_module("fairvar.api"), name, None)
        if found is None:
            raise AttributeError(f"module 'fairvar' has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("fairvar.api").__all__})
