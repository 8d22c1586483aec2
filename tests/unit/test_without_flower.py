"""Flower is an extra: without it everything else works, and the message says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fairvar as fv

PROGRAM = """
import sys
sys.modules["flwr"] = None  # as if it were not installed
import fairvar, fairvar.cli, fairvar.deploy.run, fairvar.deploy.flower
try:
    fairvar.deploy.flower.{function}()
except fairvar.BadInput as error:
    print(error)
"""


@pytest.mark.parametrize("function", ["client_app", "server_app"])
def test_the_message_says_what_to_install(function: str) -> None:
    program = PROGRAM.format(function=function)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == 'Flower is not installed; run: pip install "fairvar[flower]"\n'
    assert done.stderr == ""


def test_the_core_does_not_import_it() -> None:
    program = "import sys, fairvar, fairvar.cli; print('flwr' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"
    assert fv.BadInput.exit_code == 2
