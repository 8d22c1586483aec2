"""Speed of the engine beside what it replaces: `python benchmarks/bench.py`."""

from fairvar_bench.cases import BenchSettings, Case
from fairvar_bench.run import BenchResult, run_bench

__all__ = ["BenchResult", "BenchSettings", "Case", "run_bench"]
