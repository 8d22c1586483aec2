"""Where a client keeps its personal model v_i between messages: in a folder, or in memory.

A run that starts anew has a new number (`TRAINING` in requests), under which v_i is kept. So a run
that continues, and a client that restarts, find the model again, and another run does not.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save

from fairvar.errors import BadInput, IntegrityError
from fairvar.files import MOST_TENSORS, read_bytes, write_bytes
from fairvar.runs.formats import load_tensors
from fairvar.tree import Tree

ROUNDS = "/rounds"  # no parameter has such a name


class PersonalModels:
    """Of one client; a file for each run if there is a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.memory = folder, dict[str, bytes]()

    def load(self, name: str, received: Tree) -> tuple[Tree, int]:
        """v_i, and how many of the first rounds it has seen. A client that is new to the run starts
        from the model that it has received."""
        content = self._read(name)
        if content is None:
            self.save(name, received, 0)
            return received, 0
        try:
            found = load_tensors(content)
            rounds = int(found.pop(ROUNDS))
        except (IntegrityError, LookupError, ValueError, RuntimeError) as error:
            raise BadInput(f"the personal model {self._place(name)} is damaged ({error}); delete "
                           "it to start again from the global model") from None  # fmt: skip
        forms = [{k: (v.shape, v.dtype) for k, v in tree.items()} for tree in (found, received)]
        if forms[0] != forms[1]:
            raise BadInput(f"the personal model {self._place(name)} is of another architecture; "
                           "delete it")  # fmt: skip
        device = next(iter(received.values())).device
        return {k: v.to(device) for k, v in found.items()}, rounds

    def save(self, name: str, model: Tree, rounds: int) -> None:
        flat = {k: leaf.detach().cpu().contiguous() for k, leaf in model.items()}
        content = save({**flat, ROUNDS: torch.tensor(rounds)})
        if self.folder is None:
            self.memory[name] = content
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # for this user only
        except OSError as error:
            why = error.strerror or error
            raise BadInput(f"the folder {self.folder} cannot be made: {why}") from None
        write_bytes(self._place(name), content)

    def _read(self, name: str) -> bytes | None:
        if self.folder is None:
            return self.memory.get(name)
        try:
            return read_bytes(self._place(name), MOST_TENSORS, follow=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            what = f"the personal model {self._place(name)} cannot be read"
            raise BadInput(f"{what}: {error.strerror or error}") from None

    def _place(self, name: str) -> Path:
        return (self.folder or Path()) / f"{name}.safetensors"
