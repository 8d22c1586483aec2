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
from fairvar.engine.optimiser import ServerOptimiser
from fairvar.engine.settings import LrSchedule
from fairvar.engine.state import State
from fairvar.engine.train import train
from fairvar.errors import BadInput, FairvarError, IntegrityError, RunFailed
from fairvar.methods import (
    AFL,
    GIFAIR,
    METHODS,
    QFFL,
    TERM,
    AAggFF,
    AdaFed,
    Ditto,
    FairGrad,
    FairLoss,
    FedAvg,
    FedEBA,
    FedFV,
    FedMGDA,
    FedProx,
    Method,
    PropFair,
    SemiVRed,
    Superquantile,
    register,
)  # fmt: skip
from fairvar.metrics import Fairness, fairness
from fairvar.models import MODELS, check_model

__all__ = [
    "AFL", "GIFAIR", "IID", "METHODS", "MODELS", "QFFL", "TERM", "AAggFF", "AdaFed", "BadInput",
    "Dataset", "Dirichlet", "Ditto", "FairGrad", "FairLoss", "Fairness", "FairvarError", "FedAvg",
    "FedEBA", "FedFV", "FedMGDA", "FedProx", "Federation", "History", "IntegrityError",
    "LrSchedule", "Method", "Natural", "PropFair", "RunFailed", "SemiVRed", "ServerOptimiser",
    "Shards", "State", "Superquantile", "__version__", "build_federation", "check_model",
    "fairness", "load_federation", "metrics", "objectives", "register", "theory", "train",
]  # fmt: skip
