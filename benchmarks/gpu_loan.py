"""Everything that heavy models need from a GPU that is lent for minutes, in four parts.

    python benchmarks/gpu_loan.py 1 --out OUT --keep KEPT          # then 2, 3 and 4
    python benchmarks/gpu_loan.py 1 --out OUT --keep KEPT --smoke  # the same, tiny, on a CPU

The commands of a part run at the same time, because compiling takes processors and not the GPU;
`heavy_rounds.py` keeps their timings apart by a lock. (With --smoke they run one after another.)
Every command writes OUT/<name>.txt as it goes, and keeps what was compiled in KEPT/<name>.cache:
with the same KEPT nothing is compiled again, on another machine neither. What is not ready within
--seconds is stopped: its file has the lines until then.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Name, then the arguments of heavy_rounds.py. The forms of a row keep their memory until it ends,
# so rows of 64×64 images have few forms, and a part has one of them at a time.
ROWS = {
    "32-step-fedavg": "--case mobilenet32 --work step --methods fedavg",
    "32-step-qffl": "--case mobilenet32 --work step --methods qffl",
    "32-step-fairgrad": "--case mobilenet32 --work step --methods fairgrad "
    "--forms compiled,first,plain",
    "32-step-fairgrad-own": "--case mobilenet32 --work step --methods fairgrad --forms own",
    "32-epoch-fedavg": "--case mobilenet32 --work epoch --methods fedavg --forms compiled,first",
    # Its graph is the one of 32-step-fairgrad-own: whole batches, and weights of their own.
    "32-epoch-fairgrad-whole": "--case mobilenet32 --work epoch --methods fairgrad "
    "--forms compiled --drop-last",
    "32-epoch-fairgrad": "--case mobilenet32 --work epoch --methods fairgrad --forms compiled",
    "64-step-fedavg": "--case mobilenet64 --work step --methods fedavg --forms compiled,first",
    "64-step-qffl": "--case mobilenet64 --work step --methods qffl --forms compiled,first",
    "64-step-fairgrad": "--case mobilenet64 --work step --methods fairgrad --forms compiled",
    "64-epoch-fedavg": "--case mobilenet64 --work epoch --methods fedavg --forms compiled",
    "avgcnn-epoch": "--case avgcnn --work epoch --forms first,plain",
    "avgcnn-epoch-groups": "--case avgcnn --work epoch --methods fedavg --forms compiled --group 8",
    "aaggff": "--case multinomial --methods aaggff",
}
CHECKS = {"check-compiled": "--compiled", "check-all": "", "curvature": "--curvature"}
PARTS = {
    1: ["check-compiled", "32-step-fedavg", "32-step-qffl", "32-epoch-fedavg"],
    2: ["32-step-fairgrad", "32-step-fairgrad-own", "64-step-fedavg", "aaggff", "curvature"],
    3: [
        "32-epoch-fairgrad-whole",
        "64-step-qffl",
        "64-epoch-fedavg",
        "avgcnn-epoch",
        "avgcnn-epoch-groups",
        "check-all",
    ],
    4: ["32-epoch-fairgrad", "64-step-fairgrad"],
}


def command(name: str, kept: Path, given: argparse.Namespace) -> list[str]:
    if name in CHECKS:
        more = ["--device", "cpu", "--backend", "eager"] if given.smoke else []
        return [str(HERE / "gpu_check.py"), *CHECKS[name].split(), *more]
    flags = ["--table", *ROWS[name].split(), "--turns", "1" if given.smoke else "3"]
    flags += ["--first", given.first, "--lock", str(kept / "lock")]
    flags += ["--cache", str(kept / f"{name}.cache")]
    flags += ["--smoke", "--backend", "eager", "--rounds", "7"] if given.smoke else []
    return [str(HERE / "heavy_rounds.py"), *flags]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", type=int, choices=list(PARTS))
    parser.add_argument("--out", required=True, help="folder for the output")
    parser.add_argument("--keep", required=True, help="folder for what was compiled")
    parser.add_argument("--first", default="", help="folder of a checkout of the first version")
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    out, kept, started = Path(given.out), Path(given.keep), time.monotonic()
    for folder in (out, kept):
        folder.mkdir(parents=True, exist_ok=True)
    running, ends = {}, {}
    for name in PARTS[given.part]:
        if given.smoke and name == "check-all":  # the tests do the same on a CPU
            continue
        with (out / f"{name}.txt").open("w") as file:
            running[name] = subprocess.Popen(  # noqa: S603
                [sys.executable, *command(name, kept, given)], stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        if given.smoke:
            ends[name] = wait(running.pop(name), started + given.seconds)
    ends |= {name: wait(process, started + given.seconds) for name, process in running.items()}
    for name, end in ends.items():
        print(f"== {name}: {end}\n{(out / f'{name}.txt').read_text()}", flush=True)
    return 0 if set(ends.values()) == {"finished"} else 1


def wait(process: subprocess.Popen[bytes], until: float) -> str:
    """Stops the command and its workers when the time is up."""
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "stopped, time was up"
    return f"exit code {code}" if code else "finished"


if __name__ == "__main__":
    sys.exit(main())
