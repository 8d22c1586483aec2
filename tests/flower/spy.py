"""Records the connections to other machines of all Python processes that get its environment."""

from __future__ import annotations

import os
from pathlib import Path

# Python imports a module of this name when it starts.
CODE = """
import socket

look_up = socket.getaddrinfo


def watched(host, *rest, **more):
    name = host.decode() if isinstance(host, bytes) else str(host)
    if name not in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "None", ""):
        with open("SEEN", "a") as file:
            file.write(name + "\\n")
        raise OSError("no network in this test")
    return look_up(host, *rest, **more)


socket.getaddrinfo = watched
"""


def spy(folder: Path) -> dict[str, str]:
    """Set up in this folder; the environment for those to be watched."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CODE.replace("SEEN", str(folder / "seen.txt")))
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([before] if before else [])])}


def spied(folder: Path) -> str:
    """The names that were looked up."""
    seen = folder / "seen.txt"
    return seen.read_text() if seen.exists() else ""
