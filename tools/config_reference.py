"""The configuration reference, made from the types that check a configuration.

`python tools/config_reference.py` prints it; `make docs` makes a page of it. A key's explanation is
the comment at its field, what `fairvar.train` says of it, or the row of a method's page.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from fairvar.deploy.flower.setup import PrivacySettings, SecureSettings
from fairvar.deploy.guard import FederationSettings
from fairvar.engine.settings import TrainSettings
from fairvar.engine.train import train
from fairvar.methods import METHODS
from fairvar.runs.config import INNER, PARTITIONS, Config
from fairvar.runs.plan import SweepSettings

METHOD_PAGES = Path(__file__).parents[1] / "docs" / "methods"
OPTION = re.compile(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", re.MULTILINE)
# A paragraph of train's docstring begins with the names that it is about.
TRAIN = re.compile(
    r"^((?:[a-z_]+, )*[a-z_]+): (.*?)(?=^(?:[a-z_]+, )*[a-z_]+: |^$|\Z)", re.MULTILINE | re.DOTALL
)
INTRO = """# Configuration

A run is one TOML file; `fairvar example` writes one. Every key can be changed on the command line,
as in `fairvar run quick.toml train.lr=0.2`, and unknown keys are refused. A sweep file has lists in
`[sweep]` instead of `[method]` ([sweeps](../experiments.md#sweeps)). The sections federation,
privacy and secure are for the `options` of a Flower app ([deployment](../deploy.md#settings)). This
page is made from the types that check a configuration.
"""
MORE = {"sweep": SweepSettings, "federation": FederationSettings, "privacy": PrivacySettings,
        "secure": SecureSettings}  # fmt: skip
# The comment lines before a field of a settings class, and the comment behind it.
COMMENTS = re.compile(r"((?:^ {4}# .*\n)*)^ {4}(\w+): .*?(?:  # (.*))?$", re.MULTILINE)


def reference() -> str:
    parts = [INTRO]
    top = [f for f in msgspec.structs.fields(Config) if not isinstance(f.default, msgspec.Struct)]
    parts.append(section("", Config, only={f.name for f in top}))
    for field in msgspec.structs.fields(Config):
        if field.name == "partition":
            parts += [section(f"partition, name = {tag}", kind) for tag, kind in PARTITIONS.items()]
        elif field.name == "method":
            parts += [section(f"method, name = {tag}", kind) for tag, kind in METHODS.items()
                      if kind.__module__.startswith("fairvar.")]  # fmt: skip
        elif isinstance(field.default, msgspec.Struct):
            parts.append(section(field.name, type(field.default)))
    parts += [section(f"train.{name}", kind) for name, kind in INNER.items()]
    parts += [section(name, kind) for name, kind in MORE.items()]
    return "\n".join(parts)


def section(name: str, kind: Any, only: set[str] | None = None) -> str:
    """A heading, the first paragraph of the docstring, and a row for each key."""
    hints = get_type_hints(kind, include_extras=True)
    said = explanations(kind)
    rows = []
    for field in msgspec.structs.fields(kind):
        if only is not None and field.name not in only:
            continue
        default = "needed" if field.required else f"`{shown(default_of(field))}`"
        if field.name in INNER:
            default = f"[below](#{name}{field.name})"
        rows.append(f"| `{field.name}` | {kind_of(hints[field.name])} | {default} | "
                    f"{said.get(field.name, '')} |")  # fmt: skip
    about = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    if (tag := kind.__struct_config__.tag) and (METHOD_PAGES / f"{tag}.md").is_file():
        about += f" ([its page](../methods/{tag}.md))"
    table = ["| key | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    head = f"## [{name}]" if name else "## Top of the file"
    return "\n".join([head, "", about.replace("\n", " "), "", *table, ""])


def explanations(kind: Any) -> dict[str, str]:
    """Comments behind the fields, the description of `fairvar.train`, a method's page of docs."""
    found = {name: behind or " ".join(before.replace("# ", "").split())
             for before, name, behind in COMMENTS.findall(inspect.getsource(kind))}  # fmt: skip
    if kind is TrainSettings:
        for names, meaning in TRAIN.findall(inspect.getdoc(train) or ""):
            found |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    page = METHOD_PAGES / f"{kind.__struct_config__.tag}.md"
    if page.is_file():
        found |= dict(OPTION.findall(in_toml(page.read_text(encoding="utf-8"))))
    return {name: re.sub(r"(?<!\\)\|", r"\|", meaning) for name, meaning in found.items()}


def in_toml(page: str) -> str:
    """A method's page as the configuration shows it: TOML's words for truth values, and links from
    here."""
    page = page.replace("`True`", "`true`").replace("`False`", "`false`")
    return re.sub(r"\]\((?!\.\./|#|\w+:)", "](../methods/", page)


def default_of(field: Any) -> object:
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def shown(value: object) -> str:
    if value is None or value in ((), {}):
        return "–"
    return msgspec.json.encode(value).decode()


def kind_of(hint: Any) -> str:
    """A type in words: "number > 0", "one of …", "whole number ≥ 1 or nothing"."""
    if hasattr(hint, "__metadata__"):
        signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
        found = [(sign, getattr(meta, key, None)) for meta in hint.__metadata__
                 for key, sign in signs.items()]  # fmt: skip
        bounds = [f"{sign} {v:g}" for sign, v in found if v is not None and abs(v) < 1e9]
        return " ".join([kind_of(hint.__origin__), ", ".join(bounds)]).strip()
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(f"`{msgspec.json.encode(v).decode()}`" for v in inner)
    if get_origin(hint) is dict:
        return "section"
    if get_origin(hint) is tuple:
        each = {kind_of(part) for part in inner if part is not Ellipsis}
        return f"list of {' / '.join(sorted(each))}"
    if inner:
        return " or ".join("nothing" if part is NoneType else kind_of(part) for part in inner)
    words = {int: "whole number", float: "number", str: "text", Any: "text",
             bool: "true or false"}  # fmt: skip
    return words.get(hint, "section")


if __name__ == "__main__":
    print(reference())
