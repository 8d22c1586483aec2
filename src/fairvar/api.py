"""What `import fairvar` offers. It is read when the first of these names is used."""

from fairvar import metrics, objectives, theory
from fairvar._version import __version__
from fairvar.data import (
    IID,
    Dataset,
    Dirichlet,
    Natural,
    Shards,
    build_federation,
    load_federation,
)  # fmt: skip
from fairvar.data.federation import Federation
from fairvar.engine.history import History
from fairvar.engine.state import State
from fairvar.engine.train import train
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.methods import (
    AFL,
    METHODS,
    QFFL,
    AAggFF,
    FairGrad,
    FairLoss,
    FedAvg,
    Method,
    register,
)  # fmt: skip
from fairvar.metrics import Fairness, fairness
from fairvar.models import MODELS, check_model

__all__ = [
    "AFL", "IID", "METHODS", "MODELS", "QFFL", "AAggFF", "BadInput", "Dataset", "Dirichlet",
    "FairGrad", "FairLoss", "Fairness", "FairvarError", "FedAvg", "Federation", "History",
    "IntegrityError", "Method", "Natural", "RunFailed", "Shards", "State", "__version__",
    "build_federation", "check_model", "fairness", "load_federation", "metrics", "objectives",
    "register", "theory", "train",
]  # fmt: skip
