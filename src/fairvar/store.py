"""Results on disk: files that are either whole or not there, with a checksum each.

A run is a folder: config.toml, history.safetensors, history.csv, state.safetensors, and
manifest.json, which is written last. A folder without a manifest is not a result.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors

from fairvar.engine.state import State
from fairvar.errors import BadInput, IntegrityError
from fairvar.history import History
from fairvar.tree import Tree

MANIFEST = "manifest.json"


def write_bytes(path: Path, content: bytes) -> None:
    """All or nothing: a temporary file beside the target, synced, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def check_writable(folder: Path) -> None:
    """Refuse an output folder that cannot be written before any work is done."""
    try:
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; choose another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(
            f"cannot write into {folder}: {error.strerror}; choose another --out"
        ) from None


def state_tensors(state: State) -> Tree:
    """A state as one flat dict, the form that is saved and sent."""
    flat: Tree = {"round": torch.tensor(state.round), "mean_loss": state.mean_loss}
    groups: dict[str, Tree | None] = {
        "params": state.params,
        "buffers": state.buffers,
        "memory": state.memory,
        "mean_gradient": state.mean_gradient,
        "iterate": state.iterate,
    }
    for group, tree in groups.items():
        for name, leaf in (tree or {}).items():
            flat[f"{group}/{name}"] = leaf
    return {name: leaf.detach().cpu().contiguous() for name, leaf in flat.items()}


def history_tensors(history: History) -> Tree:
    flat: Tree = {
        "loss": history.loss,
        "weights": history.weights,
        "ascended": history.ascended,
        "evaluated": history.evaluated,
        "gradient_variance": history.gradient_variance,
        "update_norm": history.update_norm,
    }
    for quantity in ("accuracy", "evaluated_loss"):
        for (split, model), table in getattr(history, quantity).items():
            flat[f"{quantity}/{split}/{model}"] = table
    for split, counts in history.samples.items():
        flat[f"samples/{split}"] = counts
    return {name: leaf.contiguous() for name, leaf in flat.items()}


def save_run(
    folder: Path, config_toml: str, history: History, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a finished run; `facts` go into the manifest beside the checksums."""
    files = {
        "config.toml": config_toml.encode(),
        "history.safetensors": to_safetensors(history_tensors(history)),
        "history.csv": history.to_frame().to_csv().encode(),
        "state.safetensors": to_safetensors(state_tensors(history.state)),
    }
    for name, content in files.items():
        write_bytes(folder / name, content)
    manifest = {
        **facts,
        "rounds": history.rounds,
        "diverged_at": history.diverged_at,
        "birth": dict(history.birth),
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished run, after checking every file against it; None if unfinished."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        for name, digest in manifest["sha256"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                raise IntegrityError(f"{folder / name} was changed after it was written; delete "
                                     f"{folder} and run again")  # fmt: skip
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise IntegrityError(f"{folder} is damaged ({error}); delete it and run again") from None
    return manifest
