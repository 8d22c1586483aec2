"""Plays as text: the characters of every speaking role, cut into windows of next characters.

The public file is one text. Speeches are separated by an empty line, and each begins with a line
that names who speaks:

    First Citizen:
    Before we proceed any further, hear me speak.

A role's characters are its speeches in the order of the file, each followed by a line break. A
sample is a window of them, x, and the characters that follow each of its positions, y. Windows do
not overlap. The last one of a role is shorter: it is filled with 0, and its targets with `IGNORED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from fairvar.data.dataset import IGNORED
from fairvar.data.readers import FileLayout, Samples, read_compressed, refused

NAMES = ("input.txt", "tinyshakespeare.txt", "tinyshakespeare.txt.gz")
ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WINDOW = 64  # characters that a sample predicts
LEAST = 2000  # characters of a role that becomes a client
MOST_BYTES = 16 << 20


def roles_of(path: Path, text: str) -> dict[str, str]:
    """What each role says in all, by name."""
    found: dict[str, str] = {}
    for block in text.split("\n\n"):
        name, _, speech = block.strip("\n").partition("\n")
        if not name:
            continue
        if not name.endswith(":"):
            raise refused(path, f"a speech begins with {name[:40]!r} instead of a name and a colon")
        role = name.removesuffix(":")
        found[role] = found.get(role, "") + speech + "\n"
    return found


def windows(
    codes: Int64[np.ndarray, " c"],
) -> tuple[Int64[np.ndarray, "n w"], Int64[np.ndarray, "n w"]]:
    """x and y of all windows of one role."""
    number = -(-(len(codes) - 1) // WINDOW)
    x = np.zeros(number * WINDOW, np.int64)
    y = np.full(number * WINDOW, IGNORED, np.int64)
    x[: len(codes) - 1], y[: len(codes) - 1] = codes[:-1], codes[1:]
    return x.reshape(number, WINDOW), y.reshape(number, WINDOW)


def _read(paths: Sequence[Path]) -> Samples:
    (path,) = paths
    try:
        text = read_compressed(path, MOST_BYTES).decode("ascii")
    except UnicodeDecodeError as error:
        raise refused(path, f"byte {error.start} is no ASCII character") from None
    text = text.replace("\r\n", "\n")
    if unknown := sorted(set(text) - set(ALPHABET)):
        raise refused(path, f"{unknown[0]!r} is none of its {len(ALPHABET)} characters")
    roles = {k: v for k, v in roles_of(path, text).items() if len(v) >= LEAST}
    if not roles:
        raise refused(path, f"no role speaks {LEAST} characters")
    code = np.zeros(128, np.int64)
    code[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    parts = [windows(code[np.frombuffer(v.encode(), np.uint8)]) for v in roles.values()]
    x, y = (np.concatenate(of) for of in zip(*parts, strict=True))
    groups = np.repeat(list(roles), [len(part[0]) for part in parts])
    note = f"{len(roles)} roles that speak {LEAST} characters or more, windows of {WINDOW}"
    return Samples(x, y, len(y), len(ALPHABET), groups, note)


def _match(folder: Path) -> list[Path]:
    if folder.is_file() and folder.name in NAMES:
        return [folder]
    return [folder / name for name in NAMES if (folder / name).is_file()][:1]


TEXT_LAYOUTS = (FileLayout(_match, _read),)
