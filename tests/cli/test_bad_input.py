"""Bad input of every kind to every command: exit code 2, one line on stderr, nothing on stdout and
no file or folder left behind, with and without --json."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import call
from fairvar import METHODS, cli
from fairvar.errors import plain

CONFIGS = Path(__file__).parents[2] / "configs"
QUICK, MNIST = str(CONFIGS / "quick.toml"), str(CONFIGS / "paper" / "mnist.toml")
PLUGIN = """
import fairvar as fv

@fv.register
class Mine(fv.Method, frozen=True, tag="mine_bad_input"):
    {body}
"""
FILES = {
    "syntax.py": "def f(:\n",
    "raises.py": "import os\n\n1 / 0\n",
    "exits.py": "import sys\nsys.exit(0)\n",
    "nothing.py": "x = 1\n",
    "twice.py": PLUGIN.format(body="pass") + PLUGIN.format(body="pass").replace("Mine", "Other"),
    "taken.py": PLUGIN.format(body="pass").replace("mine_bad_input", "fedavg"),
    "untagged.py": PLUGIN.format(body="pass").replace('"mine_bad_input"', "False"),
    "escape.py": PLUGIN.format(body='title = "\\x1b[31m"'),
    "json.py": "raise ValueError('two\\nlines \\x1b[31m')\n",
    "latin.py": b"x = '\xff\xfe'\n",
    "nul.py": b"x = 1\x00\n",
    "folder.py/inner": "",
    "deep.toml": "a = " + "[" * 3000 + "]" * 3000,
    "digits.toml": "[train]\nlr = " + "9" * 5000,
    "hex.toml": "[train]\nrounds = 0x" + "f" * 5000,
    "escape.toml": '"\\u001b[31m" = 1',
    "longkey.toml": "k" * 10_000 + " = 1",
    "nul.toml": '[data]\nname = "image_folder"\nroot = "a\\u0000b"\n',
    "surrogate.toml": b'name = "\xed\xa0\x80"\n',
    "binary.toml": bytes(range(256)),
    "twolevels.toml": "[a.b.c.d.e.f.g]\nx = 1",
    "empty/x": "",
    "none.toml": "[sweep]",
    "grid.toml": '[sweep]\nmethods = ["fedavg", "gifair"]\nstrength = [1.0]',
    "more/grid/run/manifest.json": "{}",
    "function.py": "import fairvar as fv\n\n@fv.register\nclass Mine:\n    pass\n",
}
# Arguments, and a word that the line must have.
BAD: dict[str, tuple[list[str], str]] = {
    # arguments
    "unused token": (["theory", "T9"], "'T9'"),
    "several unused tokens": (["methods", *"abcdefgh"], "--help"),
    "unknown command": (["parttion"], "did you mean 'partition'"),
    "unknown subcommand": (["data", "lst"], "did you mean 'list'"),
    "missing positional": (["report"], "FOLDER"),
    "missing keyword": (["flower", "keys", "k"], "--nodes"),
    "option without value": (["run", QUICK, "--out"], "--out"),
    "flag with a value": (["theory", "--json=maybe"], "--json"),
    "option twice": (["demo", "--seeds", "1", "--seeds", "2"], "--seeds"),
    "unknown option": (["run", QUICK, "--dri"], "--dry"),
    "NUL byte": (["run", "a\0b"], "NUL"),
    "NUL byte in an override": (["run", QUICK, "name=a\0b"], "NUL"),
    "escape in a command": (["\x1b[31m"], "\\x1b[31m"),
    "empty argument": (["run", ""], "cannot be read"),
    "very long path": (["run", "x" * 5000], "File name too long"),
    "names of options for arguments": (["run", "--config", QUICK], "--config"),
    "seal of no archive": (["seal", "empty"], "empty/runs.tar.xz does not exist"),
    "scale of a file without": (["sweep", "none.toml", "--scale", "small"], "there is none"),
    "schedule": (["run", QUICK, "train.schedule.name=cos"], "known are constant, cosine, step"),
    "option of another method": (["run", QUICK, "method.q=1"], "unknown key method.q: known are"),
    "unknown example": (["example", "quik"], "did you mean 'quick'"),
    # numbers
    **{
        f"{flag} {value} of {command[0]}": ([*command, flag, value], flag)
        for command, flags in {
            ("demo",): ("--workers", "--seeds", "--rounds", "--alpha"),
            ("sweep", MNIST): ("--workers", "--save-every"),
            ("verify", "empty"): ("--rerun", "--evaluations", "--seed"),
            ("report", "empty"): ("--m",),
            ("condense", "empty", "--out", "o"): ("--m",),
            ("flower", "keys", "k", "--host", "h"): ("--nodes",),
            ("flower", "keys", "k", "--host", "h", "--nodes", "1"): ("--days",),
        }.items()
        for flag in flags
        for value in ("-1", "x", "nan", "1e99", "9" * 5000)
    },
    **{
        f"{flag} 0": ([*command, flag, "0"], flag)
        for command, flags in [(["demo"], ["--workers", "--seeds", "--rounds", "--alpha"]),
                               (["sweep", MNIST], ["--workers", "--save-every"])]
        for flag in flags
    },
    "half a seed": (["demo", "--seeds", "1.5"], "whole number"),
    "a million workers": (["sweep", MNIST, "--workers", "1000000"], "1024"),
    "t": (["report", "empty", "--t", "nan"], "t"),
    # keys
    "key of one section": (["run", QUICK, "lr=0.1"], "did you mean train.lr?"),
    "key of two sections": (["run", QUICK, "seed=1"], "data.seed or train.seed"),
    "option of a method": (["run", QUICK, "strength=0.1"], "method.strength"),
    "option of a partition": (["run", QUICK, "alpha=0.1"], "partition.alpha"),
    "key of another section": (["run", QUICK, "data.rounds=1"], "train.rounds"),
    "unlike any key": (["run", QUICK, "version=2"], "known are data"),
    "sweep.q": (["sweep", MNIST, "sweep.q=[1]"], "sweep.strength"),
    "option in a sweep": (["sweep", MNIST, "sweep.losses='full'"], "sweep.method.NAME.losses"),
    "sweep.rounds": (["sweep", MNIST, "sweep.rounds=3"], "train.rounds"),
    "sweep.seeds": (["sweep", MNIST, "sweep.seeds=0"], "sweep.seeds = 0: must be a whole number"),
    "sweep.seeds text": (["sweep", MNIST, "sweep.seeds=x"], "whole number or a list"),
    "sweep.lr entry": (["sweep", MNIST, "sweep.lr=[0.1, -1]"], "sweep.lr[1] = -1"),
    "sweep.lr twice": (["sweep", MNIST, "sweep.lr=[0.1, 0.1]"], "twice"),
    "train.lr in a sweep": (["sweep", MNIST, "train.lr=0.1"], "sweep.lr"),
    "train.seed in a sweep": (["sweep", MNIST, "train.seed=1"], "sweep.seeds"),
    "choice": (["run", QUICK, 'evaluate.splits=["valdi"]'], "known are test, train, valid"),
    "device meta": (["run", QUICK, "train.device=meta"], "train.device"),
    "device unknown": (["run", QUICK, "train.device=tpu"], "cuda"),
    "threads": (["run", QUICK, "train.threads=1000000000"], "train.threads"),
    "override of bytes": (["run", QUICK, "data.clients=\udcff"], "UTF-8"),
    "override of bytes in a sweep": (["sweep", MNIST, "sweep.seeds=\udcff"], "UTF-8"),
    # which method a value does not fit, and names of partitions with other options
    "strength of one method": (
        ["sweep", "grid.toml"], "gifair: method.strength = 1.0: must be a number < 1; "
        "sweep.method.gifair has lists for this method alone"),
    "option of one method": (["sweep", "grid.toml", "sweep.method.gifair.q=1"],
                             "gifair: unknown key method.q"),
    "names of partitions": (
        ["sweep", "none.toml", "sweep.grid.partition.name=['iid','dirichlet']"],
        "needs alpha; with options, give whole sections: sweep.grid.partition = [{"),
    "partition of made clients": (["run", QUICK, "data.name=clinics"],
                                  'set partition.name = "natural"'),
    "own data without a colon": (["run", QUICK, "data.name=own.load"], "package.module:function"),
    "own data of a file": (["run", QUICK, "data.name=own.py:load"], "without .py"),
    # folders
    **{f"a single run for {command}": ([command, "more/grid/run"],
                                       "is a single run; give the folder that it is in: more/grid")
       for command in ("report", "verify")},
    "the folder above": (["report", "more"], "give a folder in it, such as more/grid"),
    # sizes
    "digits": (["run", QUICK, "train.lr=" + "9" * 5000], "too long"),
    "hexadecimal digits": (["run", QUICK, "train.rounds=0x" + "f" * 5000], "train.rounds"),
    "brackets": (["run", QUICK, "train.lr=" + "[" * 5000], "nested"),
    "dots": (["run", QUICK, "a." * 5000 + "b=1"], "levels"),
    "long value": (["run", QUICK, "data.name=" + "x" * 50_000], "data.name"),
    "too many runs": (["sweep", MNIST, "sweep.seeds=100000000", "--dry"], "97,500,000,000 runs"),
    # names
    "name of two parts": (["run", QUICK, "name='../..'"], "name = '../..'"),
    "absolute name": (["sweep", MNIST, "name='/tmp/x'", "--dry"], "name = '/tmp/x'"),
    "name is dots": (["sweep", MNIST, "name='..'", "--dry"], "name = '..'"),
    "empty name": (["sweep", MNIST, "name=''", "--dry"], "name = ''"),
    "name with escapes": (["run", QUICK, 'name="\\u001b]0;x\\u0007"'], "\\x1b]0;x"),
    "name with a NUL": (["run", QUICK, 'name="a\\u0000"'], "\\x00"),
    # files
    **{f"file {name}": (["run", name], word) for name, word in {
        "deep.toml": "nested", "digits.toml": "4300", "hex.toml": "train.rounds", "nul.toml": "",
        "escape.toml": "\\x1b[31m", "longkey.toml": "unknown key", "surrogate.toml": "text",
        "binary.toml": "text", "twolevels.toml": "unknown key a", "empty": "read"}.items()},
    # plugins
    **{f"plugin {name}": (["run", QUICK, "--plugin", name], word) for name, word in {
        "syntax.py": "line 1", "raises.py": "line 3: ZeroDivisionError", "exits.py": "SystemExit",
        "escape.py": "control characters", "nothing.py": "registers no method",
        "twice.py": "mine_bad_input", "taken.py": '"fedavg"',
        "untagged.py": "untagged.py", "function.py": "Mine'> is no method",
        "json.py": "two lines \\x1b", "latin.py": "latin.py", "nul.py": "nul.py",
        "folder.py": "not a Python file", "nowhere.py": "nowhere.py",
        "digits.toml": "digits.toml"}.items()},
}  # fmt: skip
NO_JSON = ("flower", "example", "data")  # commands that print no JSON


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with damaged files, in which the command runs."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    METHODS.pop("mine_bad_input", None)


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.stat().st_size if p.is_file() else -1) for p in folder.rglob("*"))


@pytest.mark.parametrize("json_too", [False, True], ids=["", "json"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, json_too: bool, folder: Path, capsys) -> None:
    arguments, mentioned = BAD[case]
    if json_too and not arguments[0].startswith(NO_JSON) and "--json" not in str(arguments):
        arguments = [*arguments[:1], "--json", *arguments[1:]]
    before = tree(folder)
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, ""), err
    (line,) = err.splitlines()
    assert line.startswith("fairvar: ")
    assert mentioned in line
    assert plain(line) == line
    assert len(line) < 1300
    assert "Traceback" not in line
    assert "internal error" not in line
    assert tree(folder) == before


def process(*arguments: str, path: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with these sources, wherever it starts."""
    source = str(Path(cli.__file__).parents[2])
    places = os.pathsep.join(filter(None, [path, source]))
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    environment |= options.pop("environment", {})
    command = [sys.executable, "-m", "fairvar", *arguments]
    return subprocess.run(command, check=False, env=environment, **options)


def raising(error: Exception) -> Callable[..., None]:
    def function(*args: object, **kwargs: object) -> None:
        raise error

    return function


CPU = ("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
       "you tried to allocate 1099511627776 bytes. Error code 12")  # fmt: skip
UNEXPECTED = {
    "memory": (MemoryError(), 3, "out of memory"),
    "memory of torch": (RuntimeError(CPU), 3, "out of memory"),
    "memory of a GPU": (
        __import__("torch").OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
        3, "out of memory"),
    "disk": (OSError(28, "No space left on device", "x/y"), 3, "x/y: No space left"),
    "recursion": (RecursionError("maximum recursion depth exceeded"), 2, "nested too deeply"),
    "defect": (KeyError("global"), 1, "internal error in fairvar"),
    "lines and escapes": (ValueError("a\nb\x1b[31m" + "c" * 9999), 1, "a b\\x1b[31mccc"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNEXPECTED)
def test_whatever_is_raised_is_one_line(case: str, folder: Path, capsys, monkeypatch) -> None:
    error, expected, mentioned = UNEXPECTED[case]
    monkeypatch.setattr("fairvar.runs.config.Config.load", raising(error))
    code, out, err = call(capsys, "run", QUICK, "--json")
    assert (code, out) == (expected, "")
    (line,) = err.splitlines()
    assert mentioned in line
    assert plain(line) == line
    monkeypatch.setenv("FAIRVAR_TRACEBACK", "1")
    assert "Traceback" in call(capsys, "run", QUICK)[2]


def test_an_error_in_the_code_of_a_plugin_names_its_line(folder: Path, capsys) -> None:
    body = "def weigh(self, memory, replies):\n        return undefined"
    (folder / "late.py").write_text(PLUGIN.format(body=body))
    Path("c.toml").write_text('[method]\nname = "mine_bad_input"\n[train]\nrounds = 1\n')
    code, out, err = call(capsys, "run", "c.toml", "--plugin", "late.py")
    assert (code, out) == (3, "")
    assert "late.py:7: NameError" in err.splitlines()[-1]


@pytest.mark.parametrize("weights", ["replies.share[:2]", "'abc'", "1.0"])
def test_wrong_weights_of_a_plugin_are_its_fault(weights: str, folder: Path, capsys) -> None:
    body = f"def weigh(self, memory, replies):\n        return {weights}, memory"
    (folder / "late.py").write_text(PLUGIN.format(body=body))
    Path("c.toml").write_text('[method]\nname = "mine_bad_input"\n[train]\nrounds = 1\n')
    code, out, err = call(capsys, "run", "c.toml", "--plugin", "late.py")
    assert (code, out) == (2, "")
    assert "one weight for each of the 50 replies" in err.splitlines()[-1]


def test_what_own_code_prints_is_no_json(folder: Path, capsys) -> None:
    text = "import torch\nprint('hello')\ndef net(input_shape, classes):\n    print('built')\n"
    layers = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, classes))"
    (folder / "loud.py").write_text(f"{text}    return {layers}\n")
    Path("c.toml").write_text('[model]\nname = "loud:net"\n[train]\nrounds = 1\n')
    code, out, err = call(capsys, "run", "c.toml", "--json")
    assert code == 0, err
    assert json.loads(out)["rounds"] == 1
    assert "hello\nbuilt" in err


def test_without_a_home_folder(folder: Path, capsys, monkeypatch) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FAIRVAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)
    assert call(capsys, "data", "list")[0] == 0
    for arguments in (["data", "fetch", "mnist"], ["run", QUICK, "data.name=mnist"]):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, "")
        assert "set HOME" in err


def test_an_error_in_a_worker_is_the_same_line(folder: Path) -> None:
    body = "def weigh(self, memory, replies):\n        return undefined"
    (folder / "late.py").write_text(PLUGIN.format(body=body))
    Path("s.toml").write_text(
        '[data]\nname = "digits"\nclients = 4\n[train]\nrounds = 1\n'
        '[sweep]\nmethods = ["mine_bad_input"]\nseeds = 2\n'
    )
    done = process("sweep", "s.toml", "--plugin", "late.py", "--workers", "2")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "late.py:7: NameError" in done.stderr.splitlines()[-1]


def test_names_are_text_and_not_markup(folder: Path, capsys) -> None:
    """Rich reads [red], [/x] and :smile:."""
    label = "[/x] [red]:smile:"
    (folder / "odd.py").write_text(PLUGIN.format(body=f'title = "{label}"'))
    Path("c.toml").write_text(
        'name = "[red][x]"\n[method]\nname = "mine_bad_input"\n[train]\nrounds = 1\n'
    )
    code, out, err = call(capsys, "run", "c.toml", "--plugin", "odd.py", "--out", "[o] :x:")
    assert code == 0, err
    assert label in out
    assert "[o] :x:" in " ".join(out.split())
    assert "\x1b" not in out + err
    out = call(capsys, "run", "c.toml", "--plugin", "odd.py", "--out", "[o] :x:", "--json")[1]
    assert json.loads(out)["method"] == label
    assert call(capsys, "methods")[0] == 0


def test_json_has_no_nan(folder: Path, capsys) -> None:
    """A diverged run has no numbers: null."""
    code, out, _ = call(capsys, "run", QUICK, "train.lr=1e9", "train.rounds=60", "--json")
    assert code == 0
    json.loads(out, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("text", ["a\udcff.toml", "\u202e.toml"])
def test_names_that_cannot_be_printed(text: str, folder: Path) -> None:
    """Bytes that are no UTF-8, letters that turn the line round; also on a terminal for ASCII."""
    done = process("run", text, environment={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "does not exist" in done.stderr
    done = process("theory", environment={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr


def test_narrow_terminals(folder: Path, capsys, monkeypatch) -> None:
    """No digit is left out; a help text comes to its end."""
    monkeypatch.setenv("COLUMNS", "40")
    arguments = ("run", QUICK, "train.rounds=2")
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 40
    done = process("run", "--help", environment={"COLUMNS": "1"}, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTING = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"


@pytest.mark.parametrize("module", ["cyclopts", "torch", "matplotlib"])
def test_ctrl_c_while_importing(module: str, folder: Path) -> None:
    (folder / "modules").mkdir()
    (folder / "modules" / f"{module}.py").write_text(INTERRUPTING)
    done = process("partition", QUICK, path=str(folder / "modules"))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fairvar: interrupted\n")


def test_help_needs_no_torch(folder: Path) -> None:
    (folder / "modules").mkdir()
    (folder / "modules" / "torch.py").write_text("raise ImportError")
    for arguments in (["--help"], ["sweep", "--help"], ["--version"], []):
        done = process(*arguments, path=str(folder / "modules"))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_a_reader_that_ends_early_is_no_error(folder: Path) -> None:
    """As in `fairvar methods | head -1`; rich would end the process with exit code 1."""
    for arguments in (["--help"], ["example"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = process(*arguments, stdout=writing)
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, "")


def test_full_disk(folder: Path, capsys) -> None:
    """stdout to /dev/full; and a report in files that cannot grow beyond 2 kB."""
    with open("/dev/full", "w") as full:
        done = process("methods", stdout=full)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr
    assert call(capsys, "run", QUICK, "train.rounds=1", "--json")[0] == 0

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    done = process("report", "runs", preexec_fn=small_files)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]


def nested(depth: int) -> Path:
    """As many folders within each other, made without long paths."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.mkdir("d")
        os.chdir("d")
        for _ in range(depth):
            os.mkdir("e")
            os.chdir("e")
    finally:
        os.fchdir(here)
        os.close(here)
    return Path("d")


def test_1500_nested_folders(folder: Path, capsys) -> None:
    deep = nested(1500)
    below = str(deep / "/".join(["e"] * 1500))
    for arguments in (["run", QUICK, "data.name=image_folder", f"data.root={deep}"],
                      ["report", below], ["verify", below], ["run", below],
                      ["run", QUICK, "--out", "new/" * 1500 + "x"]):  # fmt: skip
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, ""), (arguments[:2], err[-500:])
        assert len(err.splitlines()) == 1
        assert "internal error" not in err
    assert not Path("new").exists()
    assert not Path("runs").exists()
    subprocess.run(["rm", "-rf", "d"], check=True)


def test_dry_lists_tell_runs_apart(capsys) -> None:
    code, out, _ = call(capsys, "sweep", MNIST, "--dry", "--scale", "small")
    *lines, last = out.splitlines()
    assert (code, last) == (0, f"{len(lines)} runs")
    told = [line.split("  ", 1)[1] for line in lines]
    assert len(set(told)) == len(told)
    assert "FairLoss*, strength" in out
    rows = json.loads(call(capsys, "sweep", MNIST, "--dry", "--scale", "small", "--json")[1])
    assert len(rows) == len(lines)
    assert {"run", "method", "lr", "alpha", "seed"} <= rows[0].keys()
    options = ["sweep.methods=['fairloss']", "sweep.method.fairloss.losses=['batch', 'full']"]
    out = call(capsys, "sweep", MNIST, "--dry", "--scale", "small", *options)[1]
    told = [line.split("  ", 1)[1] for line in out.splitlines()[:-1]]
    assert len(set(told)) == len(told)


def test_examples_run_and_sweep(folder: Path, capsys) -> None:
    for name, command in (("quick", "run"), ("mnist", "sweep")):
        code, out, err = call(capsys, "example", name)
        assert (code, err) == (0, "")
        Path(f"{name}.toml").write_text(out)
        assert call(capsys, command, f"{name}.toml", "--dry")[0] == 0


def test_partition_draws_every_federation_of_a_sweep(folder: Path, capsys) -> None:
    Path("s.toml").write_text(
        '[data]\nname = "digits"\nclients = 5\n[sweep]\nalpha = [0.1, 1.0]\n'
        "[scale.one]\nsweep.alpha = [0.5]\n"
    )
    code, out, err = call(capsys, "partition", "s.toml", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == 2
    drawn = {path.name for path in Path("fairvar-partition").iterdir()}
    assert {"partition-alpha-0.1.png", "partition-alpha-1.png"} <= drawn
    code, out, _ = call(capsys, "partition", "s.toml", "--scale", "one")
    assert code == 0
    assert "partition-alpha-0.5.png" in out
    assert call(capsys, "partition", "s.toml", "sweep.seeds=0")[0] == 2


WORDS = ["run", "sweep", "report", "demo", "data", "list", "fetch", "verify", "partition",
         "compare", "condense", "theory", "example", "flower", "new", "--json", "--dry",
         "--out", "--seeds", "--workers", "--t", "--m", "--unit", "--plugin", "--scale", "--shard",
         "--budget", "--", "-", "-x", "--=", "=", "=1", "", "0", "-1", "1e400", "nan", "[", "]",
         "[/x]", "\x1b[31m", "\0", "ü", "\udcff", "a" * 3000, "9" * 5000, "[" * 2000, QUICK, MNIST,
         "train.lr=0", "train.lr=", "train=1", "method.name=afl", "sweep.lr=[]", "a.b.c=1", "..",
         "name=..", "data.root=/dev/null", "train.device=meta", "partition.name=x", "runs:FedAvg",
         "runs:FedAvg@0.1", "%s", "{}", "{0.__class__}", "$(x)", "`x`", "\n", "@file"]  # fmt: skip


def test_300_random_argument_lists(folder: Path, capsys) -> None:
    """No traceback and no defect, whatever is typed; all end before anything is computed."""
    for number in range(300):
        draw = random.Random(number)
        arguments = draw.choices(WORDS, k=draw.randrange(1, 6))
        if arguments[0] in ("demo", "theory") or "flower" in arguments:
            arguments.append("--bad-option")
        if arguments[0] in ("run", "sweep"):
            arguments.append("train.rounds=0")
        code, _, err = call(capsys, *arguments)
        assert code in (0, 2), (arguments, err)
        assert "Traceback" not in err, arguments
        assert "internal error" not in err, (arguments, err)
        assert len(err.splitlines()) <= 1, (arguments, err)
        assert plain(err.rstrip("\n")) == err.rstrip("\n"), arguments
