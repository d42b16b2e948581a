"""A journal beside a result: JSON lines, one for each group of prompts that is done, so that a run that was stopped goes on where it was.

The first line holds what the run depends on; only a run with the same continues it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtp_jax import files


class JournalError(ValueError):
    """A journal does not belong to this run."""


def beside(out: Path | None) -> Path | None:
    """Where the journal of a result file is, in a folder that exists from now on; None without one."""
    if out is None:
        return None
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.with_name(out.name + ".partial.jsonl")


def begin(path: Path | None, settings: dict[str, Any]) -> list[Any]:
    """What the run that this one continues has written; a new journal is begun with its settings. Without a path: nothing, and none.

    Raises:
      JournalError: the journal is of a run with other settings.
    """
    if path is None:
        return []
    lines = files.whole_lines(path)
    if not lines:
        files.write_text(path, json.dumps(settings) + "\n")
        return []
    before = json.loads(lines[0])
    for name, value in settings.items():
        if before.get(name) != value:
            raise JournalError(f"{path}: is of a run with {name}={before.get(name)!r}, this one has {value!r}; delete it or choose another --out")
    files.write_text(path, "".join(line + "\n" for line in lines))  # drops a line that a crash cut off
    return [json.loads(line) for line in lines[1:]]


def add(path: Path | None, record: Any) -> None:
    """Append one record."""
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
