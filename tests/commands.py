"""Run a command of fairvar in this process."""

from __future__ import annotations

import pytest

from fairvar import cli


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command."""
    try:
        cli.main([str(a) for a in arguments])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    seen = capsys.readouterr()
    return code, seen.out, seen.err
