"""What the log of a run tells: a line for each round, and the scores at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fairvar.deploy.guard import Notes
from fairvar.engine.history import History
from fairvar.engine.train import Checkpoint
from fairvar.runs.formats import read_sealed
from fairvar.runs.identity import DEPLOYED_FILE
from fairvar.runs.stored import StoredRun

COLUMNS = {"mean": ("accuracy %", 2), "variance_over_clients": ("variance", 3),
           "noise_floor": ("noise floor", 3), "corrected_variance": ("corrected", 3),
           "worst_10_percent": ("worst 10 %", 2)}  # fmt: skip
MOST_LISTED = 30  # clients of which every one has a line


def progress(made: Checkpoint, clients: int) -> str:
    """Who made a round, and the scores after it if it was evaluated."""
    tables = made.tables or {}
    noted = Notes.reopen(tables, clients).rounds
    text = f": {len(noted[-1].clients)} of {clients} clients" if noted else ""
    if len(tables["evaluated"]) and int(tables["evaluated"][-1]) == made.state.round:
        for split in ("test", "valid"):
            loss = tables.get(f"evaluated_loss/{split}/global")
            accuracy = tables.get(f"accuracy/{split}/global")
            if loss is not None and bool(loss[-1].isfinite().any()):
                text += f", {split} loss {float(loss[-1].nanmean()):.3f}"
                if accuracy is not None and bool(accuracy[-1].isfinite().any()):
                    known = accuracy[-1][accuracy[-1].isfinite()]
                    text += f", accuracy {100 * float(known.mean()):.1f} %"
                    text += f" (lowest {100 * float(known.min()):.1f} %)"
                return text
    return text


def tell(folder: Path) -> None:
    """Print the fairness of a finished run, the scores of its sites, and who was left out."""
    run = StoredRun.open(folder)
    history, refused = run.history(), run.manifest["birth"]["refused"]
    terms = msgspec.json.decode(read_sealed(folder, run.manifest, DEPLOYED_FILE))
    names = {int(client): name for client, name in terms.get("sites", {}).items()}
    heads = [title for title, _ in COLUMNS.values()]
    rows = [[name, *(f"{100 * scores[key]:.{digits}f}" for key, (_, digits) in COLUMNS.items())]
            for name, scores in sorted(run.manifest["result"].items())]  # fmt: skip
    print(f"\n{run.manifest['method']} after {history.state.round} rounds")
    if rows:
        print(_columns([["clients' fairness", *heads], *rows]))
        print("(variance over clients in fraction² × 100)")
    split = next((s for s in ("test", "valid") if (s, "global") in history.evaluated_loss), None)
    if split is not None and history.clients <= MOST_LISTED and len(history.evaluated):
        print(_columns(_by_site(history, split, names)))
    if refused:
        print("left out: " + ", ".join(f"{n} × {why}" for why, n in refused.items())
              + "; refused.csv says which and why")  # fmt: skip
    print(f"the run is in {folder}; `fairvar report {folder.parent}` writes tables, figures and "
          "a page", flush=True)  # fmt: skip


def _by_site(history: History, split: str, names: Mapping[int, str]) -> list[list[str]]:
    loss = history.evaluated_loss[split, "global"][-1].tolist()
    accuracy = history.accuracy.get((split, "global"))
    right = [] if accuracy is None else [f"{100 * a:.2f}" for a in accuracy[-1].tolist()]
    sizes = [history.samples[part].tolist() for part in ("train", split)]
    rows = [["site", "train", split, f"{split} loss", *(["accuracy %"] if right else [])]]
    for i, value in enumerate(loss):
        counts = [str(size[i]) for size in sizes]
        rows.append([names.get(i, f"client {i}"), *counts, f"{value:.3f}", *right[i : i + 1]])
    return rows


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{w}}" for cell, w in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    return "\n".join(lines)
