"""Writing files so that nothing a user made is ever half-written: a temporary name first, then a rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: str | Path, value: Any) -> None:
    """Replace `path` by indented JSON."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def whole_lines(path: str | Path) -> list[str]:
    """Lines of a file that was appended to, without a last one that was cut off by a crash."""
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()
