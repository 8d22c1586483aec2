"""Peak memory is this process's own."""

import subprocess
import sys

import numpy as np
import pytest

from fairvar.common.process import peak_bytes, reset_peak

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 300 << 20


def test_a_large_array_raises_the_peak_and_a_reset_lowers_it() -> None:
    assert reset_peak()
    before = peak_bytes()
    held = np.ones(SIZE, np.uint8)
    high = peak_bytes()
    assert before is not None
    assert high is not None
    assert high - before > 0.9 * SIZE
    del held
    assert reset_peak()
    low = peak_bytes()
    assert low is not None
    assert high - low > 0.5 * SIZE


def test_a_child_does_not_report_its_parents_peak() -> None:
    held = np.ones(SIZE, np.uint8)
    code = "from fairvar.common.process import peak_bytes; print(peak_bytes())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert int(printed.stdout) < SIZE < held.nbytes + 1
