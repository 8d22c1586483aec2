"""Speed of a round compared with plain client loops, as ratios.

    python benchmarks/bench.py --help

It also runs where fairvar is not installed: packages that the machine lacks are then looked for in
the folder .carry; README.md says how to fill it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    sys.path.append(str(ROOT / ".carry"))  # what is installed goes first: it fits this Python
    from fairvar.cli import main as fairvar

    fairvar(sys.argv[1:], "fairvar_bench.command")


if __name__ == "__main__":
    main()
