"""Writing files so that nothing a user made is ever half-written: a temporary name first, then a rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
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


def write_folder(path: str | Path, contents: Mapping[str, bytes]) -> None:
    """Make the folder `path` with these files, whole or not at all. FileExistsError when something is there already."""
    path = Path(path)
    if path.exists() or path.is_symlink():
        raise FileExistsError(errno.EEXIST, "exists already; choose another folder", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        for name, data in contents.items():
            with open(temporary / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def whole_lines(path: str | Path) -> list[str]:
    """Lines of a file that was appended to, without a last one that was cut off by a crash."""
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return text[: text.rfind("\n") + 1].splitlines()
