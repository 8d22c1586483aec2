"""`fairvar condense`: the runs behind a report in one archive that is small enough to publish."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace
from safetensors.numpy import save

from fairvar.runs.archive import ARCHIVE, SUMMARIES, pack, write_list
from fairvar.runs.identity import RECORD, fingerprint
from fairvar.runs.results import Group
from fairvar.runs.serialize import condensed_history
from fairvar.runs.store import read_sealed, seal, with_manifest
from fairvar.runs.stored import StoredRun
from fairvar.runs.trials import Trial
from fairvar.system.files import write_bytes


def condense(groups: Sequence[Group], out: Path, everything: bool = False) -> Path:
    """Write `out/runs.tar.xz` and its list. `everything` keeps the histories of all runs, also of
    configurations that were not chosen."""
    files: dict[str, bytes] = {}
    for group in groups:
        chosen = {id(result.trial) for result in group.results}
        for trial in group.trials:
            runs = [run for run in trial.source if isinstance(run, StoredRun)]
            if runs and (everything or id(trial) in chosen):
                for run in runs:
                    files |= _within(run.identity.name, _run_files(run))
            else:
                files |= _summary_files(group, trial)
        if group.federation is not None:
            name = f"federations/{group.federation['sha256'][:16]}.json"
            facts = {k: v for k, v in group.federation.items() if k != "seal"}
            files[name] = seal(facts)
    path = out / ARCHIVE
    content = pack(files)
    write_bytes(path, content)
    sums = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
    write_list(out, hashlib.sha256(content).hexdigest(), len(content), sums)
    return path


def _within(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def _run_files(run: StoredRun) -> dict[str, bytes]:
    read = {name: read_sealed(run.folder, run.manifest, name)
            for name in ("config.toml", "history.safetensors")}  # fmt: skip
    if run.manifest.get("condensed"):
        return {**read, "manifest.json": seal(run.manifest)}
    facts = {k: v for k, v in run.manifest.items() if k not in ("sha256", "seal")}
    read["history.safetensors"] = condensed_history(read["history.safetensors"])
    return with_manifest(read, {**facts, "condensed": True})


def _summary_files(group: Group, trial: Trial) -> dict[str, bytes]:
    summary = trial.summary
    seed = int(summary.births[0]["seed"])
    config = replace(
        group.config, method=trial.method, train=replace(group.config.train, lr=trial.lr, seed=seed)
    )
    tensors = {"rounds": np.array(summary.rounds, dtype=np.int64)}
    for model, curve in summary.valid.items():
        tensors |= {f"{model}/mean": curve.mean, f"{model}/variance": curve.variance}
    assert trial.identity is not None  # `gather` sets it
    identity = replace(trial.identity, settings=fingerprint(config))
    facts = {
        "method": trial.method.label,
        RECORD: to_builtins(identity),
        "passport": dict(group.passport),
        "diverged": summary.diverged,
        "last": {model: list(two) for model, two in summary.last.items()},
        "births": [dict(birth) for birth in summary.births],
    }
    if group.deployed is not None:
        facts["deployed"] = to_builtins(group.deployed)
    files = {"config.toml": config.to_toml().encode(), "curves.safetensors": save(tensors)}
    return _within(f"{SUMMARIES}/{identity.name}", with_manifest(files, facts))
