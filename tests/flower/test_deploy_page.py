"""Every command of docs/deploy.md, in order, in an empty folder on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployment import ENVIRONMENT, free_ports, kill_all_of
from spy import spied, spy

from fairvar.runs.stored import StoredRun

pytestmark = pytest.mark.deployment
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_every_command_works(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    script = "set -euo pipefail\n" + "\n".join(blocks)
    port, *nodes = free_ports(6)
    script = script.replace("8000", str(port)).replace("910$i", "${PORTS[$i]}")
    script = f"PORTS=({' '.join(map(str, nodes))})\n{script}"
    kept = {"PATH": ENVIRONMENT["PATH"], "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    kept |= spy(tmp_path / "spy")
    with open(tmp_path / "page.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=kept,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=560)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kill_all_of(tmp_path / "flwr")
    text = (tmp_path / "page.log").read_text(errors="replace")
    assert code == 0, text[-3000:]
    folder = next(p for p in (tmp_path / "deployed").iterdir() if p.name.endswith("-flower"))
    run = StoredRun.open(folder)
    assert run.history().rounds == 2
    assert run.state().round == 52
    assert run.manifest["birth"]["refused"] == {}
    assert (tmp_path / "report" / "index.html").exists()
    assert spied(tmp_path / "spy") == ""  # no process of Flower looked for another machine
    for private in ("superlink.db", "keys/ca.key", "keys/server.key", "keys/node-0"):
        assert (tmp_path / private).stat().st_mode & 0o077 == 0, private
