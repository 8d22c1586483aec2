"""Results in slices: on a bare GPU machine that is lent for minutes, and gone afterwards.

    python benchmarks/gpu_slice.py parts FOLDER .parts          # at home: the data in parts
    python benchmarks/gpu_slice.py take .parts STORE            # there, once per part that arrives
    python benchmarks/gpu_slice.py run SLICE.toml STORE OUT     # there: compute, bring back
                                          # (--only NAME: one sweep of it; --budget 5min)
    python benchmarks/gpu_slice.py bring FOLDER results/second  # at home: unpack what came back

A slice is a TOML file with a list of sweeps. Each is `fairvar sweep` with a budget: cells that were
finished in earlier calls, or come along in `earlier` archives, are not computed again; checkpoints
stay in STORE while the machine is there. OUT gets, for every sweep, an archive that `fairvar
condense` and `fairvar report` read, and slice.json: the commit, the device, wall times, cells done.

    budget = "9min"                         # of the whole call
    condensing = "90s"                      # of it, kept back to condense what was computed
    mps = true                              # let processes share the GPU at once, if it can
    [[sweep]]
    name = "boxes"                          # runs go to STORE/runs/NAME, the archive to OUT/NAME
    config = "configs/paper/mnist.toml"
    overrides = ["train.device=cuda"]
    workers = 8
    keep = "chosen"                         # or "all": the histories of all runs
    earlier = ["results/mnist"]             # condensed results whose runs are there already
    [[study]]                               # tuning and final runs by second_edition.py, instead
    name = "cifar10-boxes"                  # runs go to STORE/runs/NAME, archives to OUT/NAME
    workers = 4
    earlier = "results/second"              # archives of earlier calls

Nothing but the standard library is used here; fairvar itself runs as a process of its own, with the
folder .carry beside the checkout for packages that the machine lacks (benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INDEX = "parts.json"
UNITS = {"s": 1, "min": 60, "h": 3600}


def parts(folder: Path, out: Path, megabytes: int) -> None:
    """Cut the files below a folder into parts of at most so many megabytes."""
    shutil.rmtree(out, ignore_errors=True)
    limit, number, room, index = megabytes * 1_000_000, 0, 0, []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content, pieces, start = path.read_bytes(), list[str](), 0
        while start < len(content) or not pieces:
            if not room:
                number, room = number + 1, limit
            piece = content[start : start + room]
            name = f"{number}/{path.relative_to(folder).as_posix().replace('/', '+')}.{start}"
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(piece)
            room, start = room - len(piece), start + len(piece)
            pieces.append(name)
        digest = sha256(content).hexdigest()
        index.append({"file": f"{folder.name}/{path.relative_to(folder).as_posix()}",
                      "sha256": digest, "pieces": pieces})  # fmt: skip
    for part in range(1, number + 1):
        (out / str(part) / INDEX).write_text(json.dumps(index))
    print(f"{len(index)} files in {number} parts below {out}; carry them one by one")


def take(arrived: Path, store: Path) -> None:
    """Copy what arrived out of the working tree; join the files when all parts are there."""
    for piece in sorted(arrived.rglob("*")):
        if piece.is_file():
            target = store / "parts" / piece.relative_to(arrived)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(piece, target)
    indices = sorted((store / "parts").glob(f"*/{INDEX}"))
    for entry in json.loads(indices[0].read_text()) if indices else []:
        pieces = [store / "parts" / name for name in entry["pieces"]]
        target = store / "data" / entry["file"]
        if target.exists() or not all(piece.exists() for piece in pieces):
            continue
        content = b"".join(piece.read_bytes() for piece in pieces)
        if sha256(content).hexdigest() != entry["sha256"]:
            sys.exit(f"{entry['file']} arrived damaged; carry its parts again")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        print(f"{target} is complete")


def bring(arrived: Path, results: Path) -> None:
    """Unpack the parts of an archive of OUT, `out.tar.*`, and add its slice.json to slices.json.
    Archives that are there already are replaced by those with the same runs and more."""
    parts = sorted(arrived.glob("out.tar.*"))
    if not parts:
        sys.exit(f"{arrived} has no files out.tar.*")
    with tempfile.TemporaryDirectory() as folder:
        whole, new = Path(folder) / "out.tar", Path(folder) / "out"
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        with tarfile.open(whole) as content:
            content.extractall(new, filter="data")
        for path in sorted(new.rglob("runs.json")):
            lost = _runs_in(results / path.relative_to(new)) - _runs_in(path)
            if lost:
                sys.exit(f"{path.relative_to(new).parent} in {arrived} lacks {len(lost)} of the "
                         f"runs in {results}, so nothing was unpacked: its machine was another "
                         "one, which must get these results with the checkout")  # fmt: skip
        shutil.copytree(new, results, dirs_exist_ok=True)
    told = json.loads((results / "slice.json").read_text())
    kept = results / "slices.json"
    known = json.loads(kept.read_text()) if kept.exists() else []
    known += [{"commit": told["commit"], "mps": told["mps"], **one} for one in told["sweeps"]]
    kept.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n")
    (results / "slice.json").unlink()
    print(*(f"{one['name']}: exit code {one['exit']}" for one in told["sweeps"]), sep="\n")


def _runs_in(listed: Path) -> set[str]:
    """The names of the runs in the list of an archive; none if there is no archive."""
    files = json.loads(listed.read_text())["files"] if listed.exists() else {}
    return {name.partition("/")[0] for name in files if name.endswith("/manifest.json")}


def seconds(text: str) -> float:
    for unit, factor in sorted(UNITS.items(), key=lambda pair: -len(pair[0])):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    sys.exit(f"{text!r} must look like 9min or 540s")


def run(slice_file: Path, store: Path, out: Path, only: str | None, budget: str | None) -> None:
    """Compute the sweeps of a slice, one after the other, within its budget."""
    plan = tomllib.loads(slice_file.read_text())
    whole, kept_back = seconds(budget or plan["budget"]), seconds(plan.get("condensing", "90s"))
    end = time.monotonic() + whole - kept_back
    told: dict[str, Any] = {"slice": slice_file.name, "commit": _commit(), "sweeps": []}
    told["mps"] = bool(plan.get("mps")) and _start_mps()
    for study in [s for s in plan.get("study", []) if only in (None, s["name"])]:
        left = end - time.monotonic()
        if left < 10:
            print(f"no time left for {study['name']}", flush=True)
            continue
        told["sweeps"].append(_study(study, store, out, left))
        out.mkdir(parents=True, exist_ok=True)
        (out / "slice.json").write_text(json.dumps(told, indent=2) + "\n")
    for sweep in [s for s in plan.get("sweep", []) if only in (None, s["name"])]:
        left = end - time.monotonic()
        if left < 10:
            print(f"no time left for {sweep['name']}", flush=True)
            continue
        runs = store / "runs" / sweep["name"]
        for folder in sweep.get("earlier", []):
            _unpack(ROOT / folder / "runs.tar.xz", runs)
        started = time.monotonic()
        command = ["sweep", sweep["config"], *sweep.get("overrides", []), "--no-estimate",
                   "--workers", str(sweep.get("workers", 1))]  # fmt: skip
        code = _fairvar([*command, "--out", str(runs), "--budget", f"{left:.0f}s"], store)
        spent = time.monotonic() - started
        target = out / sweep["name"]
        keep = ["--all"] if sweep.get("keep", "chosen") == "all" else []
        kept = _fairvar(["condense", str(runs), "--out", str(target), *keep], store)
        told["sweeps"].append(
            {"name": sweep["name"], "command": " ".join(["fairvar", *command]), "exit": code,
             "condense_exit": kept, "seconds": round(spent, 1), **_counts(runs)}
        )  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)
        (out / "slice.json").write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2))


def _study(study: dict[str, Any], store: Path, out: Path, left: float) -> dict[str, Any]:
    """A study of the second edition, which condenses its runs itself; exit code 3: to continue."""
    started, runs = time.monotonic(), store / "runs"
    command = ["benchmarks/second_edition.py", "run", study["name"], str(runs), str(out),
               "--workers", str(study.get("workers", 1)), "--device", study.get("device", "cuda"),
               "--earlier", study.get("earlier", str(out)), *study.get("options", [])]  # fmt: skip
    code = _python([*command, "--budget", f"{left:.0f}"], store)
    spent = round(time.monotonic() - started, 1)
    told = " ".join(["python", *command]).replace(str(runs), "STORE").replace(str(out), "OUT")
    return {"name": study["name"], "command": told, "exit": code, "seconds": spent,
            **_counts(runs / study["name"], "*/*")}  # fmt: skip


def _fairvar(arguments: list[str], store: Path) -> int:
    """The command line."""
    return _python(["-m", "fairvar", *arguments], store)


def _python(arguments: list[str], store: Path) -> int:
    """A process of its own, which finds the data in the store."""
    carried = [] if find_spec("msgspec") else [str(ROOT / ".carry")]
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), *carried, before]))
    data = os.environ.get("FAIRVAR_DATA", str(store / "data"))
    environment = {**os.environ, "PYTHONPATH": path, "FAIRVAR_DATA": data, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode  # noqa: S603


def _start_mps() -> bool:
    """NVIDIA's multi-process service, which runs small kernels of several processes side by side;
    whether it is there and a process can work with it."""
    if not shutil.which("nvidia-cuda-mps-control"):
        return False
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    ours = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = {**os.environ, **ours}
    probe = [sys.executable, "-c", "import torch; print(torch.ones(3, device='cuda').sum().item())"]
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)  # noqa: S607
        subprocess.run(probe, env=environment, check=True, timeout=60)  # noqa: S603
    except (subprocess.SubprocessError, OSError) as error:
        print(f"without MPS: {error}", flush=True)
        return False
    os.environ.update(ours)
    return True


def _unpack(archive: Path, runs: Path) -> None:
    """Runs of earlier slices count as finished."""
    runs.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:xz") as content:
        content.extractall(runs, filter="data")


def _counts(runs: Path, below: str = "*") -> dict[str, Any]:
    made = list(_manifests(runs, below))
    devices = sorted({str(m["birth"]["device"]) for m in made})
    torch = sorted({str(m["birth"]["torch"]) for m in made})
    return {"runs": len(made), "device": devices, "torch": torch}


def _manifests(runs: Path, below: str) -> Iterator[dict[str, Any]]:
    for path in sorted(runs.glob(f"{below}/manifest.json")):
        yield json.loads(path.read_text())


def _commit() -> str:
    """Of the checkout; the machine may have got the files without their history."""
    told = os.environ.get("FAIRVAR_COMMIT")
    if told:
        return told
    git = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout.strip() or "unknown"


def main() -> None:
    described = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=described)
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("parts", help="cut a data folder into parts")
    one.add_argument("folder", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--megabytes", type=int, default=44)
    two = commands.add_parser("take", help="store parts that arrived")
    two.add_argument("arrived", type=Path)
    two.add_argument("store", type=Path)
    four = commands.add_parser("bring", help="unpack what came back into a folder of results")
    four.add_argument("arrived", type=Path)
    four.add_argument("results", type=Path)
    three = commands.add_parser("run", help="compute a slice")
    three.add_argument("slice", type=Path)
    three.add_argument("store", type=Path)
    three.add_argument("out", type=Path)
    three.add_argument("--only", help="name of one sweep of the slice")
    three.add_argument("--budget", help="of this call, instead of the slice file's: 5min, 300s")
    a = parser.parse_args()
    if a.command == "parts":
        parts(a.folder, a.out, a.megabytes)
    elif a.command == "take":
        take(a.arrived, a.store)
    elif a.command == "bring":
        bring(a.arrived, a.results)
    else:
        run(a.slice, a.store, a.out, a.only, a.budget)


if __name__ == "__main__":
    main()
