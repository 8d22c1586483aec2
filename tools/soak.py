"""The long tests: kills, damage, forgeries, mutated files and hostile replies, with counts.

`make soak` runs all of them in about 20 minutes on two cores. Every case follows from `--seed`.
Exit code 1 if something was not as promised in docs/reliability.md.

    .venv/bin/python tools/soak.py --only kills --count 20 --seed 7
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SHOWN = 3  # wrong cases of a row that are printed; the JSON has all
MOST_SECONDS = 10.0  # for one file, whatever is in it
MOST_MEGABYTES = 500.0  # that a process may grow while it reads
HOURS = 3600.0  # a campaign that takes longer hangs


@dataclass
class Row:
    """One line of the table: `tried` cases of a kind, of which `wrong` were not as promised."""

    campaign: str
    what: str
    tried: int
    wrong: list[str] = field(default_factory=list)
    slowest: float | None = None  # seconds of one case
    megabytes: float | None = None  # by which the process grew
    note: str = ""


# --- campaigns, each in a process of its own ------------------------------------------------------
def kills(seed: int, count: int, folder: Path, part: str) -> Iterator[Row]:
    """Signals at random moments, checkpoints damaged in between: the same bytes."""
    import kills as campaign
    from nursery import nursery

    (folder / "words").mkdir()
    with nursery(folder / "words") as children:
        each = -(-count // len(campaign.MODES))
        found = campaign.campaign(part, seed, each, folder, children)
    sent = ", ".join(f"{name[3:]} {times}" for name, times in sorted(found.signals.items()))
    note = f"{found.damaged} checkpoints damaged, {found.compared} sweeps compared; {sent}"
    yield Row("kills", part, found.tried, found.wrong, found.slowest, note=note)


def flips(seed: int, count: int, folder: Path, part: str) -> Iterator[Row]:
    """One bit of a stored file: found, by every reader that checks it."""
    import damage

    found = [reader for reader in _stored(folder) if reader.sealed]
    for reader in found:
        tally = reader.mutate(seed, -(-count // len(found)), damage.flips)
        yield _row("flips", reader.name, tally)


def forged(seed: int, count: int, folder: Path, part: str) -> Iterator[Row]:
    """Records that lie, with a right seal: refused in one line, or they change no table."""
    import damage

    runs = _runs(folder)
    records = [next(runs.glob("*/manifest.json")), next(runs.glob("federations/*.json"))]
    for path in records:
        tally = damage.forge_records(runs, path, seed, -(-count // len(records)))
        yield _row("forged", path.relative_to(runs).parts[-1], tally)


def mutations(seed: int, count: int, folder: Path, part: str) -> Iterator[Row]:
    """Whatever a file holds: no traceback, no more than 500 MB, no hang over 10 s."""
    for reader in _stored(folder):
        yield _row("mutations", reader.name, reader.mutate(seed, count))


def replies(seed: int, count: int, folder: Path, part: str) -> Iterator[Row]:
    """Replies that are made to break the server: left out by name, and the model is the same."""
    command = [sys.executable, str(TESTS / "federated/hostile.py"), "--json"]
    done = subprocess.run([*command, "--seed", str(seed), "--count", str(count)],
                          capture_output=True, text=True)  # fmt: skip
    if not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    for one in json.loads(done.stdout)["campaigns"]:
        what = f"{one['method']}, {one['exchange']}"
        yield Row("replies", what, one["replies"], one["came_through"])


@dataclass(frozen=True)
class Campaign:
    run: Callable[[int, int, Path, str], Iterator[Row]]
    count: int
    parts: tuple[str, ...] = ("",)  # that run side by side


CAMPAIGNS = {
    "kills": Campaign(kills, 200, ("two workers", "single", "batched")),
    "mutations": Campaign(mutations, 5000),
    "replies": Campaign(replies, 200),
    "flips": Campaign(flips, 2000),
    "forged": Campaign(forged, 1000),
}


def _runs(folder: Path) -> Path:
    """A small sweep to damage."""
    from nursery import write_plan

    from fairvar.runs.plan import Plan
    from fairvar.runs.runner import arrange
    from fairvar.runs.sweep import run_sweep

    digits = ("data.name=digits", "partition.name=dirichlet", "partition.alpha=1.0")
    plan = Plan.load(write_plan(folder, 9), digits)
    run_sweep(arrange(plan.cells), folder / "out", lambda done, total, what: None)
    return folder / "out"


def _stored(folder: Path) -> list[Any]:
    """A reader of every kind of file, each limited in time."""
    import damage

    from fairvar.runs.archive import condense
    from fairvar.runs.results import gather

    runs = _runs(folder)
    condense(gather(runs), folder / "condensed")
    run = next(p.parent for p in sorted(runs.glob("*/manifest.json")))
    found = damage.readers(folder / "files", run)
    found += damage.archive_readers(folder / "archive", folder / "condensed")
    for reader in found:
        reader.read = _limited(reader.read)
    return found


def _limited(read: Callable[[], Any]) -> Callable[[], Any]:
    """Reading that hangs ends in an error."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it took longer than {MOST_SECONDS:g} s")

    def limited() -> Any:
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            return read()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    return limited


def _row(campaign: str, what: str, tally: Any) -> Row:
    wrong = list(tally.wrong)
    if tally.megabytes > MOST_MEGABYTES:
        wrong.append(f"grew by {tally.megabytes:.0f} MB")
    told = (("refused", tally.refused), ("same result", tally.same), ("other result", tally.other))
    note = ", ".join(f"{number} {name}" for name, number in told if number)
    return Row(campaign, what, tally.tried, wrong, tally.slowest, tally.megabytes, note)


# --- running them --------------------------------------------------------------------------------
def run_part(name: str, part: str, seed: int, count: int) -> list[Row]:
    """One part of a campaign in this process."""
    sys.path[:0] = [str(TESTS), str(TESTS / "fault"), str(TESTS / "federated")]
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return list(CAMPAIGNS[name].run(seed, count, Path(folder), part))


def start_part(name: str, part: str, seed: int, count: int) -> list[Row]:
    """One part of a campaign in a process of its own; that it fails is a result, too."""
    command = [sys.executable, __file__, "--part", name, part, "--seed", str(seed)]
    paths = [str(ROOT / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
                   "FLWR_TELEMETRY_ENABLED": "0"}  # fmt: skip
    try:
        done = subprocess.run([*command, "--count", str(count)], env=environment, text=True,
                              capture_output=True, timeout=HOURS)  # fmt: skip
        return [Row(**row) for row in json.loads(done.stdout)]
    except subprocess.TimeoutExpired:
        return [Row(name, part, 0, ["it did not end"])]
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Row(name, part, 0, [f"the campaign itself failed: {last[:500]}"])]


def table(rows: Sequence[Row], title: str) -> Table:
    made = Table(title=title, title_justify="left", caption_justify="left")
    for heading in ("campaign", "what", "tried", "wrong", "slowest s", "MB more", "of which"):
        number = heading not in ("campaign", "what", "of which")
        made.add_column(heading, justify="right" if number else "left")
    for row in rows:
        made.add_row(row.campaign, row.what, str(row.tried), str(len(row.wrong)),
                     "" if row.slowest is None else f"{row.slowest:.1f}",
                     "" if row.megabytes is None else f"{row.megabytes:.0f}", row.note)  # fmt: skip
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The totals by campaign, for docs/reliability.md."""
    lines = [
        "| campaign | cases | not as promised | slowest s | MB more |",
        "|:--|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(row.campaign for row in rows):
        mine = [row for row in rows if row.campaign == name]
        tried, wrong = sum(row.tried for row in mine), sum(len(row.wrong) for row in mine)
        slowest, grown = most(row.slowest for row in mine), most(row.megabytes for row in mine)
        lines.append(f"| {name} | {tried:,} | {wrong} | {slowest} | {grown} |")
    return "\n".join(lines)


def most(numbers: Iterable[float | None]) -> str:
    known = [number for number in numbers if number is not None]
    return f"{max(known):.1f}" if known else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other cases")
    parser.add_argument("--only", nargs="+", choices=CAMPAIGNS, default=list(CAMPAIGNS))
    parser.add_argument(
        "--count", type=int, help="cases of each campaign, instead of its own number"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write all results into this file")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count is not None and options.count < 1:
        parser.error("--count must be at least 1")
    if options.part:
        rows = run_part(*options.part, options.seed, options.count)
        return print(json.dumps([asdict(row) for row in rows]))
    sys.exit(soak(options))


def soak(options: argparse.Namespace) -> int:
    started, console = time.monotonic(), Console()
    todo = [(name, part) for name in options.only for part in CAMPAIGNS[name].parts]

    def start(name: str, part: str) -> list[Row]:
        count = options.count or CAMPAIGNS[name].count
        rows = start_part(name, part, options.seed, count)
        spent = time.monotonic() - started
        print(f"{name} {part}: done after {spent:.0f} s", file=sys.stderr)
        return rows

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = [row for rows in pool.map(lambda each: start(*each), todo) for row in rows]
    seconds = time.monotonic() - started
    title = f"seed {options.seed}, {seconds / 60:.1f} min, {options.jobs} processes"
    console.print(table(rows, title))
    print(markdown(rows))
    for row in rows:
        for case in row.wrong[:SHOWN]:
            console.print(f"{row.campaign}, {row.what}: {case}", markup=False, highlight=False)
    if options.json:
        facts = {"seed": options.seed, "seconds": seconds, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    wrong = sum(len(row.wrong) for row in rows)
    print(f"{sum(row.tried for row in rows):,} cases, {wrong} not as promised")
    return int(wrong > 0)


if __name__ == "__main__":
    main()
