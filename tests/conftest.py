"""Set-up of all tests: shape checks, one thread, small helpers shared by the folders."""

from __future__ import annotations

import os
import signal
from zlib import crc32

from jaxtyping import config as checks
from jaxtyping import install_import_hook

# SHAPES=1 runs an eighth of the tests and checks the types and shapes of all annotated functions in
# them; SHAPES=all does so in all tests. The checks triple the time of a test.
SHAPES = os.environ.get("SHAPES", "")
if SHAPES:
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With SHAPES=1, choose an eighth of the tests by their names."""
    if SHAPES != "1":
        return
    others = [item for item in items if crc32(item.nodeid.encode()) % 8]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % 8 == 0]


@pytest.fixture(autouse=True)
def alone() -> None:
    """No test depends on the ones before: on their random numbers, or on types that they switched
    off."""
    torch.manual_seed(0)
    checks.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """xdist starts a process per core; more threads would only fight over them."""
    torch.set_num_threads(1)


@pytest.fixture
def without_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports draw PNG files only: PDFs take a quarter of their time, and are not published."""
    monkeypatch.delitem(style.KINDS, "pdf")
