"""Write docs/configuration.md from the settings themselves: `python docs/config_reference.py`, or with --check.

With --check nothing is written; the exit code is 1 when the page does not say what the code says.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from freshper.training.config import TrainConfig

PAGE = Path(__file__).with_name("configuration.md")

_HEAD = """\
# Settings

<!-- Written by `python docs/config_reference.py` from the code: change the sentences there. -->

Every setting of a run. A TOML file has a table per section, the command line a dotted flag per setting:

```
freshper train sokoban --replay.freshness.tau 30 --run.seed 1
```

```toml
[replay.freshness]
tau = 30.0
```

Flags win over the file, the file over the defaults below. An unknown name, a value out of range and settings that
contradict each other are errors before anything is loaded. The resolved settings of a run lie in its folder as
`config.toml`, which repeats it: `freshper train runs/…/config.toml`. `freshper doctor TARGET` tells whether and how
fast a config runs on a machine.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_section(TrainConfig, ""))


def _section(section: type[BaseModel], path: str) -> list[str]:
    """A heading, the section's sentence, and a table of its fields; then the sections within it."""
    own = {name: field for name, field in section.model_fields.items() if not _is_section(field)}
    parts = [f"\n## {path}\n\n{' '.join((section.__doc__ or '').split())}\n"] if path else []
    if own:
        parts.append("\n| setting | type | default | |\n|---|---|---|---|\n")
        for name, field in own.items():
            sentence = _cell(field.description or "")
            parts.append(f"| `{path}.{name}` | {_cell(_type(field))} | `{_toml(field.default)}` | {sentence} |\n")
    for name, field in section.model_fields.items():
        if _is_section(field):
            inner: Any = field.annotation
            parts += _section(inner, f"{path}.{name}" if path else name)
    return parts


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _type(field: FieldInfo) -> str:
    """The type with its bounds: "int >= 1", "float in [0, 1)", or the choices."""
    if get_origin(field.annotation) is Literal:
        return " | ".join(f"`{choice}`" for choice in get_args(field.annotation))
    if get_origin(field.annotation) is dict:
        return "table"
    names = {str: "text", bool: "true, false", int: "int", float: "float"}
    name = names[field.annotation]  # type: ignore[index]
    bounds = {
        kind: getattr(one, kind) for one in field.metadata for kind in ("ge", "gt", "le", "lt") if hasattr(one, kind)
    }
    low = next((f"{sign}{_short(bounds[kind])}" for kind, sign in (("ge", "["), ("gt", "(")) if kind in bounds), "")
    high = next((f"{_short(bounds[kind])}{sign}" for kind, sign in (("le", "]"), ("lt", ")")) if kind in bounds), "")
    if low and high:
        return f"{name} in {low}, {high}"
    if low:
        return f"{name} {'>=' if low[0] == '[' else '>'} {low[1:]}"
    return name


def _short(bound: float) -> str:
    """A number as people write it: 2^63, 1e-09, 1."""
    return "2^63" if bound == 2**63 else f"{bound:g}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    """A line break or a bar would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def main(words: list[str]) -> int:
    """Write or check the page; returns the exit code."""
    if words not in ([], ["--check"]):
        print("python docs/config_reference.py [--check]", file=sys.stderr)
        return 2
    text = page()
    if not words:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    there = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    difference = list(difflib.unified_diff(there.splitlines(), text.splitlines(), str(PAGE), "the code", lineterm=""))
    if difference:
        print("\n".join(difference))
        print(f"{PAGE} is stale: run `python docs/config_reference.py`")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
