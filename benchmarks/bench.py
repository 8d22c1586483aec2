"""`fairvar bench` out of a checkout, for machines on which fairvar is not installed.

    python benchmarks/bench.py --device cuda --out bench

Packages that the machine lacks are looked for in the folder .carry; README.md says how to fill it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    sys.path.append(str(ROOT / ".carry"))  # what is installed goes first: it fits this Python
    from fairvar.cli import main as fairvar

    fairvar(["bench", *sys.argv[1:]])


if __name__ == "__main__":
    main()
