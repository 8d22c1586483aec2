"""fairvar: fair federated learning. Train models whose quality is even across clients.

The public names are those of `fairvar.api`. They are imported when the first of them is used, so
that the command line answers `--help` and Ctrl-C before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairvar.api import *  # noqa: F403
    from fairvar.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name != "__all__" and name.startswith("_") and name != "__version__":
        raise AttributeError(f"module 'fairvar' has no attribute {name!r}")
    api = import_module("fairvar.api")
    if name == "__all__" or name in api.__all__:
        return getattr(api, name)
    if name in globals():  # a part of the package that is loaded by now, such as fairvar.data
        return globals()[name]
    raise AttributeError(f"module 'fairvar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("fairvar.api").__all__})
