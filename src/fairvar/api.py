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
from fairvar.data.client_data import ClientData
from fairvar.data.federation import Federation
from fairvar.engine.callbacks import Callback, EarlyStopping, ProgressBar, TensorBoard, Training
from fairvar.engine.history import History
from fairvar.engine.new_clients import NewClients, new_clients
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
from fairvar.report.in_python import Comparison, Report, compare, write_report
from fairvar.runs.experiments import Sweep, run, sweep
from fairvar.runs.stored import load
from fairvar.scores import METRICS, Metric

__all__ = [
    "AFL", "GIFAIR", "IID", "METHODS", "METRICS", "MODELS", "QFFL", "TERM", "AAggFF", "AdaFed",
    "BadInput", "Callback", "ClientData", "Comparison", "Dataset", "Dirichlet", "Ditto",
    "EarlyStopping", "FairGrad", "FairLoss", "Fairness", "FairvarError", "FedAvg", "FedEBA",
    "FedFV", "FedMGDA", "FedProx", "Federation", "History", "IntegrityError", "LrSchedule",
    "Method", "Metric", "Natural", "NewClients", "ProgressBar", "PropFair", "Report", "RunFailed",
    "SemiVRed", "ServerOptimiser", "Shards", "State", "Superquantile", "Sweep", "TensorBoard",
    "Training", "__version__", "build_federation", "check_model", "compare", "fairness", "load",
    "load_federation", "metrics", "new_clients", "objectives", "register", "run", "sweep",
    "theory", "train", "write_report",
]  # fmt: skip
