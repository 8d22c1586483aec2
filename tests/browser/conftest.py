"""A headless Chromium for the tests of this folder; found, or installed where Debian allows it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
)


def programs() -> tuple[str, str] | None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def install() -> str:
    """Debian's packages, by the first of the test processes; returns why it could not be done."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "chromium and chromedriver are not installed, and only root on Debian could"
    with (Path(tempfile.gettempdir()) / "fairvar-install-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if programs() is not None:
            return ""
        packages = ["chromium", "chromium-driver"]
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            try:
                subprocess.run(
                    ["apt-get", "-q", *command],
                    env=quiet, check=True, capture_output=True, timeout=300,
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as error:
                return f"chromium could not be installed: {error}"
    return ""


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    reason = "" if programs() else install()
    found = programs()
    if found is None:
        pytest.skip(reason or "chromium was installed but is not on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()
