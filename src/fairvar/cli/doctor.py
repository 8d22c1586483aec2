"""Facts about the installation, for bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from typing import Any

import torch

from fairvar._version import __version__
from fairvar.data import load_federation
from fairvar.engine.train import train
from fairvar.methods import FairGrad

PACKAGES = ("torch", "numpy", "msgspec", "safetensors", "matplotlib", "flwr", "ray")


def examine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "fairvar": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    facts |= {
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "two runs give identical bytes": _repeats(),
        "engine agrees with the reference": _agrees(),
        "free disk here": f"{shutil.disk_usage('.').free / 2**30:.1f} GiB",
        "telemetry": "none",
    }
    return facts


def _small_run(engine: str, dtype: torch.dtype) -> torch.Tensor:
    federation = load_federation("logistic", clients=10)
    history = train(
        "multinomial", federation, FairGrad(strength=0.1), 3, engine=engine, dtype=dtype
    )
    return torch.cat([leaf.flatten() for leaf in history.state.params.values()])


def _repeats() -> bool:
    first, second = (_small_run("auto", torch.float32) for _ in range(2))
    return torch.equal(first, second)


def _agrees() -> str:
    engine, reference = (_small_run(name, torch.float64) for name in ("auto", "reference"))
    difference = float((engine - reference).abs().max())
    return f"{'yes' if difference < 1e-10 else 'NO'}, largest difference {difference:.1e}"
