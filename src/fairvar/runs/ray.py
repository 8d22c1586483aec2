"""The missing groups of a sweep on a Ray cluster, for those who outgrow one machine.

Workers need no shared disk: a task sends its files back and the caller stores them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fairvar.errors import BadInput
from fairvar.runs.batch import arrange, parts_to_do, run_group
from fairvar.runs.config import Config
from fairvar.runs.runner import Interrupted, Watch, missing
from fairvar.runs.store import LOCKS, MANIFEST, save_files
from fairvar.system.progress import Report
from fairvar.system.signals import stop_signals


def compute_files(group: Sequence[str]) -> dict[str, bytes]:
    """Runs that train together, given as TOML, in a temporary folder: the files that they would
    leave in the output folder."""
    with TemporaryDirectory() as name:
        out = Path(name)
        run_group(tuple(Config.from_toml(text) for text in group), out, Watch())
        kept = [f for f in sorted(out.glob("*/*")) if f.parent.name != LOCKS]
        return {str(f.relative_to(out)): f.read_bytes() for f in kept}


def save_new(out: Path, files: Mapping[str, bytes]) -> None:
    """Files by folder and name; runs that are stored already trained along for the others."""
    done = {path.parent.name for path in out.glob(f"*/{MANIFEST}")}
    save_files(out, {n: f for n, f in files.items() if n.partition("/")[0] not in done}, depth=2)


def run_on_ray(
    cells: Sequence[Config], out: Path, address: str, report: Report, batch: bool = True
) -> None:
    ray = _import_ray()
    todo = [part for group in arrange(cells, batch) for part in parts_to_do(group, out)]
    ray.init(address=address, log_to_driver=False)
    try:
        with stop_signals() as asked:  # after ray.init, which takes SIGTERM
            task = ray.remote(max_retries=3)(compute_files)
            pending = [task.remote([cell.to_toml() for cell in part]) for part in todo]
            while pending:
                if asked():
                    raise Interrupted("interrupted; the same command continues")
                ready, _ = ray.wait(pending, num_returns=1, timeout=1.0)
                for reference in ready:
                    pending.remove(reference)
                    save_new(out, ray.get(reference))
                done = len(cells) - len(missing(cells, out))
                report(done, len(cells), f"runs, on Ray at {address}")
    finally:
        ray.shutdown()


def _import_ray() -> Any:
    # Ray listens on every network interface unless told otherwise, and sends usage statistics.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise BadInput('--ray needs Ray: pip install "fairvar[ray]"') from None
    return ray
