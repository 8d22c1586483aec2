"""Set-up of all tests: shape checks, one thread, small helpers shared by the folders."""

from __future__ import annotations

import os
import signal
from zlib import crc32

from jaxtyping import config, install_import_hook

install_import_hook(["fairvar", "over_pairs", "sentences"], "typecheck.checker")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from fairvar.report import style  # noqa: E402

# A suite that was started with nohup or in the background of a script ignores signals, and commands
# that tests start would inherit that.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        python = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if python else signal.SIG_DFL)

# No deadline: the machines that run the tests are noisy, and speed is for the benchmark.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a third of the time tests wait for processes they started."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def shapes(request: pytest.FixtureRequest) -> None:
    """Shapes and types are checked in every eighth test, chosen by its name: the checks double the
    time. SHAPES=all checks them in all tests."""
    checked = crc32(request.node.nodeid.encode()) % 8 == 0 or os.environ.get("SHAPES") == "all"
    config.update("jaxtyping_disable", not checked)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """xdist starts a process per core; more threads would only fight over them."""
    torch.set_num_threads(1)


@pytest.fixture
def without_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports draw PNG files only: PDFs take a quarter of their time, and are not published."""
    monkeypatch.delitem(style.KINDS, "pdf")
