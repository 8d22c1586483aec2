"""Write requirements.lock: every package that constraints.txt pins, with its SHA-256.

    .venv/bin/python tools/lock.py

pip resolves the project with its extras as `make` does and reports the files that it would install.
The lock is for CPython 3.11 on Linux x86-64 with torch's CPU build.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEAD = """\
# Made by tools/lock.py from constraints.txt: CPython 3.11, Linux x86-64, torch's CPU build.
#   pip install --require-hashes --only-binary :all: -r requirements.lock
#   pip install --no-deps --no-build-isolation .
"""


def resolve() -> list[dict[str, Any]]:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    torch = next(line for line in constraints if line.startswith("torch=="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    backend = project["build-system"]["requires"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-",
               "--ignore-installed", "--only-binary", ":all:", "-c", str(ROOT / "constraints.txt"),
               torch, *backend, f"{ROOT}[all,dev]"]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["install"]


def line(package: dict[str, Any]) -> str:
    name, version = package["metadata"]["name"], package["metadata"]["version"].partition("+")[0]
    digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


def main() -> None:
    found = [p for p in resolve() if p["metadata"]["name"] != "fairvar"]
    lines = sorted(map(line, found), key=str.lower)
    (ROOT / "requirements.lock").write_text(HEAD + "".join(lines))
    print(f"{len(lines)} packages in requirements.lock")


if __name__ == "__main__":
    main()
