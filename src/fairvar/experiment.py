"""From a `Config` to a stored run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairvar.config import Config
from fairvar.data import load_federation
from fairvar.engine.train import run_rounds
from fairvar.federation import Federation
from fairvar.history import History
from fairvar.progress import Report
from fairvar.store import read_manifest, save_run

SCORES = ("mean", "variance_over_clients", "noise_floor", "corrected_variance",
          "worst_10_percent", "smallest")  # fmt: skip


def federation_of(config: Config) -> Federation:
    data = config.data
    return load_federation(
        data.name,
        data.clients,
        config.partition,
        data.seed,
        split=data.split,
        holdout=data.holdout,
        pool_samples=data.pool_samples,
    )


def run_config(config: Config, out: Path, report: Report) -> tuple[Path, dict[str, Any]]:
    """Train and store; a finished run is never touched again. Returns its folder and manifest."""
    folder = out / f"{config.name}-{config.fingerprint[:12]}"
    manifest = read_manifest(folder)
    if manifest is None:
        federation = federation_of(config)
        history = run_rounds(
            config.model.name,
            federation,
            config.method,
            config.model.loss,
            config.train,
            config.evaluate,
            progress=lambda done, total: report(done, total, config.method.label),
        )
        manifest = save_run(folder, config.to_toml(), history, _facts(config, federation, history))
    return folder, manifest


def _facts(config: Config, federation: Federation, history: History) -> dict[str, Any]:
    return {
        "name": config.name,
        "fingerprint": config.fingerprint,
        "method": config.method.label,
        "protocol": config.protocol,
        "passport": dict(federation.passport),
        "exchanges_per_client": history.exchanges,
        "bytes_down_per_client": history.bytes_down,
        "bytes_up_per_client": history.bytes_up,
        "result": final_scores(history),
    }


def final_scores(history: History) -> dict[str, dict[str, float]]:
    """The main fairness numbers of every evaluated split and model after the last round."""
    found: dict[str, dict[str, float]] = {}
    for split, model in history.accuracy:
        if len(history.evaluated):
            scores = history.fairness(split, model)
            found[f"{split}/{model}"] = {name: float(scores[name]) for name in SCORES}
    return found
