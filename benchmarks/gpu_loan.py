"""Everything that heavy models need from a GPU that is lent for minutes, in any number of calls.

    python benchmarks/gpu_loan.py --out OUT --keep KEPT --seconds 560      # the same in every call
    python benchmarks/gpu_loan.py --out OUT --keep KEPT --smoke            # tiny, on a CPU

The first call starts a queue in a session of its own, which goes on between calls. It runs the
commands below in this order, several at a time, because compiling takes processors and not the GPU;
`heavy_rounds.py` keeps their timings apart by a lock. A call waits until the queue is empty (exit
code 0, or 1 if a command failed) or its seconds are over (exit code 3), and keeps OUT/loan.txt up
to date: the lines of every command so far, those that have ended first. The queue has a copy of the
checkout in KEPT, because the checkout may be written anew with every call. A call that finds no
queue starts one with the commands that have not finished; the graphs that they compiled are in
torch's cache on the machine's disk. --only NAME,… runs some of the commands.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MEMORY = 135  # GB of an H200


class Command(NamedTuple):
    arguments: str  # of gpu_check.py, or of heavy_rounds.py; {}: the image size, from the name
    gigabytes: int = 20  # at most, while it records and runs


# What takes longest to compile comes first. A step of FairGrad with a copy for each client is the
# graph of its epochs of whole batches; one of q-FFL is the first of the two of FairGrad's step.
# Short rounds are timed more often, because other commands may use the GPU at the same time.
STEP, EPOCH = (
    "--case mobilenet{} --work step --methods",
    "--case mobilenet{} --work epoch --methods",
)
COMMANDS = {
    "32-step-fairgrad-own": Command(f"{STEP} fairgrad --forms own --rounds 30", 30),
    "32-step-fairgrad": Command(f"{STEP} fairgrad --forms compiled,first,plain --rounds 30", 30),
    "32-step-fedavg": Command(f"{STEP} fedavg --rounds 30"),
    "32-step-qffl": Command(f"{STEP} qffl --rounds 30"),
    "32-epoch-fedavg": Command(f"{EPOCH} fedavg --forms compiled,first"),
    "check-compiled": Command("--compiled", 5),
    "aaggff": Command("--case multinomial --methods aaggff --rounds 300", 5),
    "64-step-fedavg": Command(f"{STEP} fedavg --forms compiled,first", 50),
    "64-step-qffl": Command(f"{STEP} qffl --forms compiled,first", 50),
    "avgcnn-epoch": Command("--case avgcnn --work epoch --forms first,plain"),
    "avgcnn-epoch-groups": Command("--case avgcnn --work epoch --forms compiled --group 8"),
    "64-epoch-fedavg": Command(f"{EPOCH} fedavg --forms compiled", 50),
    "32-epoch-fairgrad-whole": Command(f"{EPOCH} fairgrad --forms compiled --drop-last", 30),
    "curvature": Command("--curvature"),
    "check-all": Command("", 5),
    "32-epoch-fairgrad": Command(f"{EPOCH} fairgrad --forms compiled", 30),
    "64-step-fairgrad": Command(f"{STEP} fairgrad --forms compiled", 100),
}
CHECKS = "check-compiled", "check-all", "curvature"  # of gpu_check.py


def command(name: str, given: argparse.Namespace) -> list[str]:
    flags = [
        *COMMANDS[name].arguments.format(name[:2]).split(),
        "--lock",
        str(Path(given.keep) / "lock"),
    ]
    if name in CHECKS:
        more = ["--device", "cpu", "--backend", "eager"] if given.smoke else []
        return [str(ROOT / "benchmarks/gpu_check.py"), *flags, *more]
    flags = ["--table", *flags, "--turns", "1" if given.smoke else "3", "--first", given.first]
    flags += ["--smoke", "--backend", "eager", "--rounds", "7"] if given.smoke else []
    return [str(ROOT / "benchmarks/heavy_rounds.py"), *flags]


# -- the queue -------------------------------------------------------------------------------------
def start_queue(given: argparse.Namespace, kept: Path) -> subprocess.Popen[bytes]:
    for folder in filter(None, ("benchmarks", "src", ".carry", given.first)):
        if (ROOT / folder).is_dir():
            copy = kept / "checkout" / folder
            shutil.copytree(ROOT / folder, copy, symlinks=True, dirs_exist_ok=True)
    with (kept / "queue.txt").open("a") as file:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "benchmarks/gpu_loan.py", *sys.argv[1:], "--keep", str(kept),
             "--queue"], cwd=kept / "checkout", stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def work(given: argparse.Namespace) -> None:
    """Run the commands that have not ended. KEPT/<name>.txt gets their lines, .end how they
    ended."""
    kept, running = Path(given.keep), dict[str, tuple[subprocess.Popen[bytes], float]]()
    with (kept / "queue").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(os.getpid(), file=lock, flush=True)
        todo = [name for name in asked(given) if not finished(kept, name)]
        while todo or running:
            room = MEMORY - sum(COMMANDS[name].gigabytes for name in running)
            fitting = [name for name in todo if COMMANDS[name].gigabytes <= room]
            if fitting and len(running) < given.together:
                todo.remove(name := fitting[0])
                (kept / f"{name}.end").unlink(missing_ok=True)
                with (kept / f"{name}.txt").open("w") as file:
                    process = subprocess.Popen(  # noqa: S603
                        [sys.executable, *command(name, given)], stdout=file,
                        stderr=subprocess.STDOUT,
                    )  # fmt: skip
                running[name] = process, time.monotonic()
                continue
            time.sleep(0.2)
            for name, (process, started) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[name]
                    how = f"exit code {code}" if code else "finished"
                    after = f"after {time.monotonic() - started:.0f} s"
                    (kept / f"{name}.end").write_text(f"{how} {after}")


def asked(given: argparse.Namespace) -> list[str]:
    names = given.only.split(",") if given.only else list(COMMANDS)
    # The tests do what check-all does on a CPU.
    return [name for name in names if not (given.smoke and name == "check-all")]


def finished(kept: Path, name: str) -> bool:
    end = kept / f"{name}.end"
    return end.exists() and end.read_text().startswith("finished")


def goes_on(kept: Path) -> bool:
    """Whether the queue runs, also one that an earlier call has started."""
    with (kept / "queue").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# -- a call ----------------------------------------------------------------------------------------
def texts(given: argparse.Namespace) -> str:
    """The lines of all commands that have begun."""
    kept, found = Path(given.keep), []
    for name in asked(given):
        lines, end = kept / f"{name}.txt", kept / f"{name}.end"
        if lines.exists():
            how = end.read_text() if end.exists() else "has not ended"
            found.append((not end.exists(), f"== {name}: {how}\n{lines.read_text()}"))
    return "\n".join(text for _, text in sorted(found, key=lambda pair: pair[0])) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder for the output")
    parser.add_argument("--keep", required=True, help="folder that is kept from call to call")
    parser.add_argument("--first", default="", help="folder of a checkout of the first version")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call")
    parser.add_argument("--together", type=int, default=6, help="commands at a time")
    parser.add_argument("--only", default="", help=f"some of {', '.join(COMMANDS)}")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--queue", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.first and not (Path(given.first) / "src/fairvar").is_dir():
        parser.error(f"--first: {given.first} is no checkout, it has no src/fairvar")
    if unknown := set(asked(given)) - set(COMMANDS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is no command")
    if given.queue:
        work(given)
        return 0
    out, kept, until = Path(given.out), Path(given.keep), time.monotonic() + given.seconds
    for folder in (out, kept := kept.resolve()):
        folder.mkdir(parents=True, exist_ok=True)
    queue = None if goes_on(kept) else start_queue(given, kept)
    while queue is not None and queue.poll() is None and not goes_on(kept):
        time.sleep(0.1)
    while goes_on(kept) and time.monotonic() < until:
        time.sleep(1)
        (out / "loan.txt").write_text(texts(given))
    left = goes_on(kept)
    if left and given.smoke:  # nobody gives this machine back
        os.killpg(int((kept / "queue").read_text()), signal.SIGKILL)
    (out / "loan.txt").write_text(texts(given))
    print(texts(given) + (kept / "queue.txt").read_text(), flush=True)
    return 3 if left else int(not all(finished(kept, name) for name in asked(given)))


if __name__ == "__main__":
    sys.exit(main())
