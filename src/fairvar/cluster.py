"""The missing cells of a sweep on a Ray cluster, for those who outgrow one machine.

Workers need no shared disk: a task sends its files back and the caller stores them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fairvar.config import Config
from fairvar.errors import BadInput
from fairvar.experiment import Watch, run_cell
from fairvar.progress import Report
from fairvar.store import MANIFEST, write_bytes
from fairvar.sweep import missing


def compute_files(config_toml: str) -> dict[str, bytes]:
    """One run in a temporary folder, as the files that it would leave in the output folder."""
    with TemporaryDirectory() as name:
        out = Path(name)
        run_cell(Config.from_toml(config_toml), out, Watch())
        kept = [f for f in sorted(out.glob("*/*")) if f.parent.name != ".locks"]
        return {str(f.relative_to(out)): f.read_bytes() for f in kept}


def store_files(out: Path, files: dict[str, bytes]) -> None:
    """Manifest last: only then the run counts as finished."""
    for name in sorted(files, key=lambda n: n.endswith(MANIFEST)):
        write_bytes(out / name, files[name])


def run_on_ray(cells: Sequence[Config], out: Path, address: str, report: Report) -> None:
    ray = _import_ray()
    todo = missing(cells, out)
    ray.init(address=address, log_to_driver=False)
    try:
        task = ray.remote(max_retries=3)(compute_files)
        pending = [task.remote(cell.to_toml()) for cell in todo]
        while pending:
            ready, _ = ray.wait(pending, num_returns=1, timeout=5.0)
            for reference in ready:
                pending.remove(reference)
                store_files(out, ray.get(reference))
            report(len(cells) - len(pending), len(cells), f"runs, on Ray at {address}")
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
