"""`fairvar.load`: a history, a state, a model or a stored run from its path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fairvar.engine.history import History
from fairvar.engine.state import State
from fairvar.errors import BadInput, IntegrityError, shown
from fairvar.files import MOST_TENSORS, read_bytes, unpack_files
from fairvar.methods import METHODS, Method
from fairvar.models.weights import read_tensors
from fairvar.runs.serialize import Saved, unpack_saved, unpack_state
from fairvar.runs.store import is_complete
from fairvar.runs.stored import StoredRun
from fairvar.tree import Tree

SEALED = b"{\n"  # how files of `History.save` and `State.save` begin


def load(path: str | Path) -> History | State | Tree:
    """Read what fairvar wrote; every file is checked against its SHA-256 first.

    - the file of `history.save`: that History, bit by bit;
    - the file of `state.save`: that State;
    - the folder of a run that `fairvar.run` or `fairvar.sweep` stored: its History, at evaluated
      rounds;
    - .safetensors, .pth or .pt: a model as a state dict for `module.load_state_dict`.
    """
    path = Path(path)
    if path.is_dir():
        return _run(path)
    try:
        content = read_bytes(path, MOST_TENSORS)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None
    if not content.startswith(SEALED):
        tensors = read_tensors(path)
        stored = tensors.keys() >= {"round", "mean_loss"}  # the state of a stored run
        return unpack_state(content) if stored else tensors
    found = unpack_files(content)
    try:
        if "history.safetensors" in found:
            return unpack_saved(found["history.safetensors"], _method)
        if "state.safetensors" in found:
            return unpack_state(found["state.safetensors"])
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}") from None
    raise IntegrityError(f"{path} is damaged, or no file of History.save or State.save")


def _run(folder: Path) -> History:
    if is_complete(folder):
        return StoredRun.open(folder).history()
    runs = sum(is_complete(inner) for inner in folder.iterdir() if inner.is_dir())
    if runs:
        raise BadInput(f"{folder} holds {runs} runs: give the folder of one of them, or compare "
                       "them all with fairvar.compare")  # fmt: skip
    raise BadInput(f"{folder} holds no finished run; give the folder of one, or a file")


def _method(saved: Saved) -> Method:
    """The method of a saved history. Its class must be known here: files hold no code."""
    tag = saved.method.get("name")
    kinds = {kind.__struct_config__.tag: kind for kind in _subclasses(Method)} | METHODS
    if tag not in kinds:
        raise BadInput(
            f"the history was made by {shown(saved.kind)}, which is not known here: import the "
            "module that defines it, or run its cell, and load again"
        )
    try:
        return msgspec.convert(saved.method, kinds[tag])
    except (msgspec.ValidationError, BadInput) as error:
        made = f"the history was made by another version of {shown(saved.kind)}"
        raise BadInput(f"{made}: {error}") from None


def _subclasses(kind: type[Method]) -> Iterator[type[Method]]:
    """Methods need not be registered to train."""
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
