"""Nothing is sent to Flower's makers by what fairvar starts or tells users to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from spy import spied, spy

import fairvar as fv
from fairvar.cli import main
from fairvar.deploy.flower import launch, run_app

ROOT = Path(__file__).parents[2]
# As Flower's programs do: they import telemetry first, then the app, and send when they start.
PROGRAM = """#!{python}
import sys
from flwr.supercore import telemetry
from flwr.supercore.update_check import warn_if_flwr_update_available
import fairvar.deploy.flower
fairvar.deploy.flower.require_flower()
telemetry.event(telemetry.EventType.PING).result()
warn_if_flwr_update_available("flwr")
if sys.argv[1] == "run":
    print("Successfully started run 7")
    print(*sys.argv[1:])
else:  # flwr list
    import json
    told = dict(status="{status}", **{{"status-details": "no" + chr(10) + "column"}})
    print(json.dumps(dict(runs=[told])))
"""


@pytest.fixture
def flwr(tmp_path: Path) -> Path:
    """A stand-in for Flower's command that sends what Flower's programs send."""
    program = tmp_path / "flwr"
    program.write_text(PROGRAM.format(python=sys.executable, status="finished:completed"))
    program.chmod(0o755)
    return program


def test_flower_run_sends_nothing(
    flwr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in launch.QUIET:
        monkeypatch.delenv(name, raising=False)
    for name, value in spy(tmp_path / "spy").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    subprocess.run([str(flwr), "run"], check=True)
    assert "telemetry.flower.ai" in spied(tmp_path / "spy")  # the app alone is too late
    (tmp_path / "spy" / "seen.txt").unlink()
    monkeypatch.setattr(launch, "_program", lambda name: str(flwr))
    app = ROOT / "examples" / "flower_app"
    main(["flower", "run", str(app), "supergrid", "--stream", "-c", 'rounds=2 out="x"'])
    assert (
        capfd.readouterr().out.splitlines()[-1]
        == f'run {app} supergrid --stream -c rounds=2 out="x"'
    )
    assert spied(tmp_path / "spy") == ""


def test_the_home_of_flower_is_private(
    flwr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in spy(tmp_path / "spy").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "_program", lambda name: str(flwr))
    run_app(ROOT / "examples" / "flower_app", ["supergrid"])
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fv.BadInput, match="is not a Flower app"):
        run_app(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    for program, why in (("false", "flwr run ended with 1"), ("true", "has not started a run")):
        monkeypatch.setattr(launch, "_program", lambda name, program=program: program)
        with pytest.raises(fv.RunFailed, match=why):
            run_app(tmp_path, ["supergrid"])


def test_a_run_that_failed_is_told_so(
    flwr: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Flower itself ends with 0; its list of runs has the status."""
    for name, value in spy(tmp_path / "spy").items():
        monkeypatch.setenv(name, value)
    for name, value in launch.QUIET.items():
        monkeypatch.setenv(name, value)
    flwr.write_text(PROGRAM.format(python=sys.executable, status="finished:failed"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "_program", lambda name: str(flwr))
    with pytest.raises(SystemExit) as ended:
        main(["flower", "run", str(ROOT / "examples" / "flower_app"), "supergrid"])
    assert ended.value.code == 3
    wanted = "fairvar: the run ended as finished:failed: no column\n"
    assert capfd.readouterr().err.endswith(wanted)


def test_no_page_tells_to_start_flower_without_the_switch() -> None:
    """A command that starts Flower's programs comes after the switch, or is ours."""
    folders = (ROOT / "docs", ROOT / "examples", ROOT / "src" / "fairvar" / "deploy")
    places = [ROOT / "README.md", *(p for folder in folders for p in folder.rglob("*.*"))]
    commands = ("flwr run ", "flower-superlink -", "flower-supernode -", "flower-simulation ")
    for place in places:
        if place.suffix not in (".md", ".py", ".txt", ".toml"):
            continue
        ready = False
        for line in place.read_text().splitlines():
            ready |= "FLWR_TELEMETRY_ENABLED=0" in line
            starts = any(line.strip().startswith(c) for c in commands)
            assert ready or not starts, f"{place}: {line}"
