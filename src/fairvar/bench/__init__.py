"""Speed of the engine beside what it replaces: `fairvar bench`."""

from fairvar.bench.cases import BenchSettings, Case
from fairvar.bench.run import BenchResult, run_bench

__all__ = ["BenchResult", "BenchSettings", "Case", "run_bench"]
