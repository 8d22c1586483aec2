"""What `fairvar flower run` checks and sets before it starts anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.superlink.grid import InMemoryGrid

import fairvar as fv
from fairvar.cli import main
from fairvar.deploy.flower import launch, new_app, run_app
from fairvar.deploy.flower.transport import GridTransport

Started = list[tuple[str, list[str]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What would be started: the SuperLink's name and the arguments of `flwr run`."""
    found: Started = []

    @contextmanager
    def superlink(environment: dict[str, str]) -> Iterator[dict[str, str]]:
        yield environment

    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "find_spec", lambda name: name)  # ray need not be installed here
    monkeypatch.setattr(launch, "simulating_superlink", superlink)
    monkeypatch.setattr(
        launch, "_run", lambda app, link, arguments, environment: found.append((link, arguments))
    )
    return found


@pytest.fixture
def app(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A name of its own for each test: modules are imported once in a process."""
    folder = tmp_path / f"app_{abs(hash(request.node.name)) % 10**9}"
    new_app(folder)
    return folder


def test_as_many_nodes_as_the_app_has_clients(app: Path, started: Started, tmp_path: Path) -> None:
    (tmp_path / "sites" / "lyon").mkdir(parents=True)
    (tmp_path / "sites" / "st anna.csv").touch()
    (tmp_path / "sites" / ".hidden").touch()
    main(["flower", "run", str(app)])
    main(["flower", "run", str(app), "local", "-c", "clients=7 rounds=2"])
    more = ["--data", str(tmp_path / "sites"), "-c", 'input-shape="3"']
    main(["flower", "run", str(app), *more])
    own = f'data="own" sites="lyon \'st anna\'" folder="{tmp_path}/sites"'
    one = "client-resources-num-cpus=1"
    wanted = [
        ["--federation-config", f"num-supernodes=5 {one}"],
        ["-c", "clients=7 rounds=2", "--federation-config", f"num-supernodes=7 {one}"],
        ["-c", 'input-shape="3"', "-c", own, "--federation-config", f"num-supernodes=2 {one}"],
    ]
    assert started == [(launch.HERE, arguments) for arguments in wanted]


def test_a_superlink_by_name(app: Path, started: Started, tmp_path: Path) -> None:
    """One that Flower would start by itself is none of the user's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(
        '[superlink.site]\naddress = "127.0.0.1:8000"\n[superlink.mine]\naddress = ":local:"\n'
    )
    for name in ("site", "mine"):
        run_app(app, [name])
    assert [link for link, _ in started] == ["site", launch.HERE]
    with pytest.raises(fv.BadInput, match="--data is for simulations"):
        run_app(app, ["site"], tmp_path)
    with pytest.raises(fv.BadInput, match=r"SuperLink 'sight' is not in .* known: mine, site"):
        run_app(app, ["sight"])
    (tmp_path / "home" / "config.toml").unlink()
    with pytest.raises(fv.BadInput, match="known: local, supergrid"):
        run_app(app, ["site"])
    assert list((tmp_path / "home").iterdir()) == []


def test_what_is_wrong_is_told_before_anything_starts(
    app: Path, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str, data: Path | None = None, app: Path = app) -> str:
        with pytest.raises(fv.BadInput) as error:
            run_app(app, arguments, data)
        return str(error.value)

    assert "did you mean 'fairgrad'" in refused("-c", 'method="fairgrod"')
    assert "invalid format" in refused("-c", "rounds=abc")
    assert "'rounds 3' is not KEY=VALUE" in refused("-c", "rounds 3")
    assert "'7' is not KEY=VALUE" in refused("site", "-c", 'rounds=2 sites="a b" 7')
    assert "nowhere.toml" in refused("-c", "nowhere.toml")
    assert "give a folder with a file or a folder for each" in refused(data=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "needs one file or folder for each site" in refused(data=tmp_path / "empty")
    broken = tmp_path / "broken_for_tests"
    new_app(broken)
    (broken / broken.name / "data.py").write_text("from nowhere import table\n")
    why = "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"
    assert why in refused(app=broken)
    (app / "pyproject.toml").write_text("[tool]\n")
    assert "its configuration cannot be read" in refused()
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert 'pip install "fairvar[simulation]"' in refused()
    assert started == []


def test_a_superlink_that_is_not_there(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flwr run` prints why it failed in a box; the last line of the command says it again."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text('[superlink.site]\naddress = "nobody:8000"\n')
    program = tmp_path / "flwr"
    box = ("╭─ Error ───────────╮", "│ Connection to the │", "│ SuperLink failed. │")
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in box), "exit 1"]))
    program.chmod(0o755)
    monkeypatch.setattr(launch, "_program", lambda name: str(program))
    with pytest.raises(fv.RunFailed) as failed:
        run_app(app, ["site"])
    assert str(failed.value) == "flwr run ended with 1: Connection to the SuperLink failed."


def test_an_interrupted_command_says_that_the_run_goes_on(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('[superlink.site]\naddress = "nobody:8000"\n')
    program = tmp_path / "flwr"
    program.write_text("#!/bin/sh\necho Successfully started run 7\necho now\n")
    program.chmod(0o755)
    monkeypatch.setattr(launch, "_program", lambda name: str(program))

    def show(text: str, **_: object) -> None:
        if text == "now\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "print", show, raising=False)
    with pytest.raises(KeyboardInterrupt):
        run_app(app, ["site"])
    told = capsys.readouterr().err
    assert told == "the run goes on at site; to end it: flwr stop 7 site\n"


@pytest.mark.skipif(shutil.which("ps") is None, reason="ps is not installed")
def test_processes_in_groups_of_their_own_are_ended() -> None:
    """As the simulation of a SuperLink after Ctrl-C."""
    start = "subprocess.Popen(['sleep', '99'], start_new_session=True).pid"
    code = f"import subprocess, time; print({start}, flush=True); time.sleep(99)"
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                             start_new_session=True)  # fmt: skip
    assert first.stdout is not None
    with first.stdout as told:
        second = int(told.readline())
        launch._end(first)
    gone = time.monotonic() + 10
    while Path(f"/proc/{second}/cmdline").is_file() and time.monotonic() < gone:
        if not Path(f"/proc/{second}/cmdline").read_bytes():  # a zombie
            break
        time.sleep(0.05)
    assert time.monotonic() < gone


def test_too_few_simulated_nodes_stop_the_run_at_once() -> None:
    """As plain `flwr run` simulates them: two."""

    class Two(InMemoryGrid):
        def __init__(self) -> None:
            pass

        def get_node_ids(self) -> list[int]:
            return [1, 2]

    with pytest.raises(fv.BadInput, match="2 nodes are simulated, but the run has 5 clients"):
        GridTransport(Two(), 5).present(5, 600.0)
