"""Wrong configurations of every kind: one line that names the key, and never another exception."""

from __future__ import annotations

import random
import string
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import tomli_w

from fairvar.data import Partition
from fairvar.engine.keys import fingerprint
from fairvar.errors import BadInput
from fairvar.methods import METHODS
from fairvar.runs.config import Config
from fairvar.runs.plan import Plan, SweepSettings

BASE: dict[str, Any] = {
    "name": "fuzz",
    "protocol": "boxes",
    "data": {"name": "digits", "clients": 10, "seed": 3, "split": [0.6, 0.2, 0.2], "fraction": 0.5},
    "partition": {"name": "dirichlet", "alpha": 0.3, "min_samples": 2, "on_failure": "repair"},
    "model": {"name": "multinomial", "loss": "cross_entropy"},
    "method": {"name": "fairloss", "strength": 0.2, "exact": True, "losses": "full"},
    "train": {"rounds": 5, "lr": 0.1, "batch_size": 8, "dtype": "float64", "engine": "auto"},
    "evaluate": {"every": 2, "splits": ["valid", "test"], "local": False},
    "select": {"t": 1.0, "m": 3, "unit": "mixed", "model": "global"},
}
SWEEP: dict[str, Any] = {
    "methods": ["fedavg", "qffl", "fairgrad*"],
    "seeds": 2,
    "lr": [0.1, 0.2],
    "strength": [0.1],
    "step": [0.1],
    "cdf": ["normal"],
    "alpha": [0.1],
}


def sweep_base() -> dict[str, Any]:
    """The same as a sweep, which has its own methods and learning rates."""
    train = {key: value for key, value in BASE["train"].items() if key != "lr"}
    rest = {key: value for key, value in BASE.items() if key not in ("method", "train")}
    return rest | {"train": train, "sweep": SWEEP}


SECTIONS = [name for name, value in BASE.items() if isinstance(value, dict)]
METHOD_TAGS = list(METHODS)
# What no key accepts, by the kind of value that it has.
WRONG: dict[type, list[str]] = {
    bool: ["1", "0.5", '"yes"', "[true]", "{ a = 1 }", "1979-05-27", "nan"],
    int: ["-1", "1.5", '"five"', "true", "[1]", "{ a = 1 }", "07:32:00", "nan", "inf",
          "10000000000000000000000000000000", "-9223372036854775809"],
    float: ["-1", "-0.5", '"fast"', "true", "[0.1]", "{ a = 1 }", "1979-05-27", "nan", "inf",
            "-inf", "1e10", "1e400", "10000000000000000000000000000000"],
    str: ["1", "0.5", "true", '["a"]', "{ a = 1 }", "1979-05-27", "nan"],
    list: ["1.5", "true", '"one"', "{ a = 1 }", '[["deep"]]', "[nan]", "[-1]", "[{ a = 1 }]",
           "[true, false]"],
}  # fmt: skip
LETTERS = string.ascii_lowercase + "_"


def typo(word: str, draw: random.Random) -> str:
    """One letter lost, added, changed, or two swapped."""
    at = draw.randrange(len(word))
    return draw.choice(
        [
            word[:at] + word[at + 1 :],
            word[:at] + draw.choice(LETTERS) + word[at:],
            word[:at] + draw.choice(LETTERS) + word[at + 1 :],
            word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
        ]
    )


def known_keys(section: str, method: str = "fairloss") -> set[str]:
    kinds = {f.name: f.type for f in msgspec.structs.fields(Config)}
    if section == "sweep":
        kind: Any = SweepSettings
    elif section == "method":
        kind = METHODS[method]
    elif section == "partition":
        kind = next(k for k in get_args(Partition) if k.__struct_config__.tag == "dirichlet")
    else:
        kind = kinds[section]
    extra = {"name"} if section in ("method", "partition") else set()
    return extra | {f.name for f in msgspec.structs.fields(kind)}


def text_of(values: dict[str, Any], replaced: dict[tuple[str, str], str]) -> str:
    """TOML in which some values are written as given, valid or not."""
    lines = [f'{k} = "{v}"' for k, v in values.items() if not isinstance(v, dict)]
    for section, keys in values.items():
        if isinstance(keys, dict):
            lines.append(f"[{section}]")
            for key, value in keys.items():
                plain = tomli_w.dumps({key: value}, multiline_strings=False).strip()
                raw = replaced.get((section, key))
                lines.append(plain if raw is None else f"{key} = {raw}")
    return "\n".join(lines) + "\n"


def broken(kind: str, draw: random.Random, base: dict[str, Any]) -> tuple[str, str]:
    """(TOML text, what the error must name)."""
    section = draw.choice([name for name, value in base.items() if isinstance(value, dict)])
    keys = base[section]
    key = draw.choice([k for k in keys if (section, k) != ("method", "name")])
    whole = text_of(base, {})
    if kind == "typo":
        wrong = typo(key, draw)
        while wrong in known_keys(section) or not wrong:
            wrong = typo(key, draw)
        return whole.replace(f"[{section}]\n", f"[{section}]\n{wrong} = 1\n"), f"{section}.{wrong}"
    if kind in ("wrong value", "huge"):
        options = WRONG[type(keys[key])]
        if (section, key) in (("partition", "name"), ("data", "name")):
            options = [*options, '"nothing"', '"a\\nb"', '""']
        raw = "9" * 5000 if kind == "huge" else draw.choice(options)
        named = "not valid TOML" if kind == "huge" else key
        return text_of(base, {(section, key): raw}), named
    if kind == "choice":
        chosen = [("train", "dtype"), ("train", "engine"), ("select", "unit"), ("select", "model"),
                  ("partition", "on_failure"), ("data", "name"), ("model", "name")]  # fmt: skip
        section, key = draw.choice(chosen)
        raw = draw.choice(['"nothing"', '"a\\nb"', '"å b"', '""', '"\\u0000"', '"🜁"'])
        return text_of(base, {(section, key): raw}), f"{section}.{key}"
    if kind == "no header":
        section = draw.choice(["train", "evaluate", "select", "model"])
        return whole.replace(f"[{section}]\n", ""), "unknown key|line"
    if kind == "section is a value":
        rest = {k: v for k, v in base.items() if k != section}
        raw = draw.choice(["1", '"x"', "[1, 2]", "true", "[{a = 1}]"])
        return f"{section} = {raw}\n" + text_of(rest, {}), section
    if kind == "strange key":
        strange = draw.choice(['"a\\nb"', '"ключ"', '"\\u0000"', '"🜁"', '""', '"a.b"', '"\\t"'])
        return whole.replace(f"[{section}]\n", f"[{section}]\n{strange} = 1\n"), section
    if kind == "deep":
        depth = draw.choice([50, 500, 3000, 20000])
        raw = "[" * depth + "]" * depth
        named = f"{key}|not valid TOML|nested too deeply"
        return text_of(base, {(section, key): raw}), named
    if kind == "duplicate":
        return whole.replace(f"[{section}]\n", f"[{section}]\n{key} = 1\n"), "line "
    if kind == "two sections":
        return whole + f"[{section}]\n{key} = 1\n", "line |not valid TOML"
    syntax = ["= 1", "a = ", "a = 'x", "[a", "a b = 1", "a = 01", '"', "a = 1 b = 2", "\x00", "]"]
    lines = whole.splitlines()
    lines.insert(draw.randrange(len(lines)), draw.choice(syntax))
    return "\n".join(lines), "(at "


KINDS = ("typo", "wrong value", "huge", "choice", "no header", "strange key",
         "section is a value", "deep", "duplicate", "two sections", "syntax")  # fmt: skip
EACH = 46  # times eleven kinds: 506


def refused_in_one_line(load: Any, path: Path, named: str) -> str:
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(BadInput) as found:
        load(path)
    message = str(found.value)
    assert message.isprintable(), repr(message)[:300]
    assert any(part in message for part in named.split("|")), (message[:300], named)
    assert sorted(path.parent.rglob("*")) == before
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_500_broken_configurations(kind: str, tmp_path: Path) -> None:
    """Each is refused by `Config.load` with one line that names the key or the place."""
    for number in range(EACH):
        text, named = broken(kind, random.Random(f"{kind} {number}"), BASE)
        path = tmp_path / "c.toml"
        path.write_text(text, encoding="utf-8")
        refused_in_one_line(Config.load, path, named)


@pytest.mark.parametrize("kind", KINDS)
def test_500_broken_sweeps(kind: str, tmp_path: Path) -> None:
    base = sweep_base()
    for number in range(EACH):
        text, named = broken(kind, random.Random(f"sweep {kind} {number}"), base)
        path = tmp_path / "p.toml"
        path.write_text(text, encoding="utf-8")
        refused_in_one_line(Plan.load, path, named)


METHOD_ERRORS = {
    '{ name = "fedavg", q = 1 }': "method.q",
    '{ name = "qffl", strength = 1 }': "method.strength",
    '{ name = "afl", step = 0 }': "step",
    '{ name = "afl", order = "first" }': "method.order",
    '{ name = "aaggff", cdf = "gauss" }': "method.cdf",
    '{ name = "fairloss" }': "strength",
    '{ name = "fairgrad", strength = -1 }': "strength",
    '{ name = "fairgrad", strength = nan }': "strength",
    '{ name = "fairgrad*", strength = 1 }': "fairgrad",
    '{ name = ["fedavg"] }': "method",
    '{ strength = 1 }': "method",
    '"fedavg"': "method",
    "[]": "method",
}  # fmt: skip


@pytest.mark.parametrize("value", METHOD_ERRORS)
def test_wrong_method_options(value: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"method = {value}\n")
    refused_in_one_line(Config.load, path, METHOD_ERRORS[value])


SWEEP_ERRORS = {
    "[sweep]\nmethods = []": "sweep.methods",
    "[sweep]\nseeds = []": "sweep.seeds",
    "[sweep]\nseeds = 0": "seeds",
    "[sweep]\nseeds = [1, -1]": "seeds",
    "[sweep]\nlr = []": "sweep.lr",
    "[sweep]\nlr = [0]": "lr",
    "[sweep]\nmethods = ['fedagv']": "fedavg",
    "[sweep]\nmethods = ['fedavg*']": "exact",
    "[sweep]\nmethods = ['aaggff']\ncdf = ['gauss']": "cdf",
    "[sweep.method.fedagv]\nlr = [0.1]": "fedavg",
    "[sweep.method.qffl]\nstrength = [0.1]": "strength",
    "[sweep.method.qffl]\nq = []": "q",
    "[sweep.method.qffl]\nq = ['a']": "q",
    "[sweep.method.qffl]\nlr = 'fast'": "lr",
    "[sweep.method.qffl]\nlr = [0.1, -1]": "lr",
    "[sweep.method.qffl]\nname = 'afl'": "name",
    "[sweep.method]\nqffl = 3": "qffl",
    "[partition]\nname = 'iid'\n[sweep]\nalpha = [0.1]": "alpha",
    "[method]\nname = 'fedavg'\n[sweep]\nseeds = 1": "[method]",
    "scale = 3": "scale",
    "[scale]\nsmall = 3": "scale",
}


@pytest.mark.parametrize("text", SWEEP_ERRORS)
def test_wrong_sweeps(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    refused_in_one_line(Plan.load, path, SWEEP_ERRORS[text])


def random_config(draw: random.Random) -> Config:
    """Valid, with every section drawn."""
    tag = draw.choice(METHOD_TAGS)
    method: dict[str, Any] = {"name": tag}
    if tag in ("fairloss", "fairgrad"):
        method |= {"strength": draw.choice([0.0, 0.1, 1, 1e9]), "exact": draw.random() < 0.5}
    elif tag == "semivred":
        method["strength"] = draw.choice([0.0, 0.1, 1, 1e9])
    elif tag == "qffl":
        method["q"] = draw.choice([0, 1.5, 2])
    elif tag == "aaggff":
        method["cdf"] = draw.choice(["weibull", "normal", "gumbel"])
    partitions = [{"name": "iid"}, {"name": "natural"}, {"name": "shards", "per_client": 3},
                  {"name": "dirichlet", "alpha": draw.uniform(1e-3, 1e3)}]  # fmt: skip
    values: dict[str, Any] = {
        "name": draw.choice(["a", 'quo"te', "[x]", "ünï 🜁", "a.b"]),
        "protocol": draw.choice(["boxes", "tables"]),
        "partition": draw.choice(partitions),
        "method": method,
        "train": {"lr": draw.uniform(1e-6, 10), "rounds": draw.randrange(1, 10**9),
                  "seed": draw.randrange(2**63)},
    }  # fmt: skip
    if draw.random() < 0.5:
        values["data"] = {"split": [0.5, 0.25, 0.25], "samples": draw.randrange(1, 100)}
    if draw.random() < 0.5:
        values["select"] = {"t": draw.uniform(0, 5), "m": draw.randrange(1, 9)}
    return Config.from_dict(values)


def test_valid_configurations_round_trip() -> None:
    """Through TOML, and through TOML twice, with the same fingerprint; 300 drawn ones."""
    marks = set()
    for number in range(300):
        config = random_config(random.Random(number))
        again = Config.from_toml(config.to_toml())
        assert again == config
        assert fingerprint(again) == fingerprint(config)
        assert again.to_toml() == config.to_toml()
        marks.add(fingerprint(config))
    assert len(marks) == 300


def test_the_fuzzed_base_itself_is_fine(tmp_path: Path) -> None:
    """Otherwise the errors above could have any cause."""
    path = tmp_path / "c.toml"
    path.write_text(text_of(BASE, {}))
    assert Config.load(path).train.rounds == 5
    path.write_text(text_of(sweep_base(), {}))
    assert len(Plan.load(path).cells) == 12


def all_keys() -> list[tuple[str, str, str]]:
    """(section, method, key) of every key that a file can have."""
    found = [(s, "fairloss", k) for s in [*SECTIONS, "sweep"] if s != "method"
             for k in sorted(known_keys(s))]  # fmt: skip
    return found + [("method", m, k) for m in METHODS for k in sorted(known_keys("method", m))]


def test_typos_get_the_right_suggestion() -> None:
    """Five single edits of every key that has more than two letters; at least 95 % are guessed."""
    right, tried = 0, 0
    for section, method, key in all_keys():
        draw = random.Random(f"{section}.{method}.{key}")
        known = known_keys(section, method)
        for _ in range(5):
            wrong = typo(key, draw)
            if not wrong or wrong in known or key == "name" or len(key) <= 2:
                continue
            values: dict[str, Any] = {section: {wrong: 1}}
            if section == "method":
                values = {"method": {"name": method, wrong: 1}}
            elif section == "partition":
                values = {"partition": {"name": "dirichlet", "alpha": 1, wrong: 1}}
            with pytest.raises(BadInput) as found:
                (Plan if section == "sweep" else Config).from_dict(values)
            assert f"{section}.{wrong}" in str(found.value)
            tried += 1
            right += f"did you mean {key!r}?" in str(found.value)
    assert tried >= 100
    assert right >= 0.95 * tried, f"{right} of {tried}"


@pytest.mark.parametrize("kind", ["typo", "wrong value", "deep", "duplicate", "strange key"])
def test_as_a_process_exit_2_and_write_nothing(kind: str, tmp_path: Path) -> None:
    text, named = broken(kind, random.Random(7), BASE)
    (tmp_path / "c.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", "from fairvar.cli import main; main()", "run", "c.toml"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("fairvar: ")
    assert any(part in line for part in named.split("|"))
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]
