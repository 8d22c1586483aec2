"""Peak memory is this process's own."""

import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 300 << 20


RAISE_AND_LOWER = f"""
import numpy as np
from fairvar.common.process import peak_bytes, reset_peak

assert reset_peak()
before = peak_bytes()
held = np.ones({SIZE}, np.uint8)
high = peak_bytes()
del held
assert reset_peak()
print(before, high, peak_bytes())
"""


def test_a_large_array_raises_the_peak_and_a_reset_lowers_it() -> None:
    # In a process of its own: the system may take pages of a large one away between two readings.
    printed = subprocess.run(
        [sys.executable, "-c", RAISE_AND_LOWER], capture_output=True, text=True, check=True
    )
    before, high, low = map(int, printed.stdout.split())
    assert high - before > 0.9 * SIZE
    assert high - low > 0.9 * SIZE


def test_a_child_does_not_report_its_parents_peak() -> None:
    held = np.ones(SIZE, np.uint8)
    code = "from fairvar.common.process import peak_bytes; print(peak_bytes())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert int(printed.stdout) < SIZE < held.nbytes + 1
