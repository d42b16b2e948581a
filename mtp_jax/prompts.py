"""Reading prompt files: JSON lines with `prompt` (text) and optionally `task`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class PromptFileError(ValueError):
    """A line of a prompt file breaks a rule."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and the task it is counted under."""

    task: str
    text: str


def read(paths: Sequence[str | Path], *, limit: int | None = None) -> list[Prompt]:
    """Read prompts, `limit` of each file at most.

    Raises:
      PromptFileError: naming file and line: not JSON, no `prompt`, an empty one, or one that isn't Unicode text; or a file without any.
    """
    prompts: list[Prompt] = []
    for path in paths:
        path = Path(path)
        if not path.is_file():
            raise PromptFileError(f"{path}: no such file")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PromptFileError(f"{path}: not UTF-8 text: {error}") from None
        found = [_parse(line, f"{path}:{number}", path.stem) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if not found:
            raise PromptFileError(f"{path}: no prompt in it")
        prompts += found[:limit]
    return prompts


def _parse(line: str, where: str, task: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise PromptFileError(f"{where}: needs an object with a text 'prompt'")
    if not record["prompt"].strip():
        raise PromptFileError(f"{where}: 'prompt' is empty")
    prompt = Prompt(task=str(record.get("task", task)), text=record["prompt"])
    for name, text in (("task", prompt.task), ("prompt", prompt.text)):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
            raise PromptFileError(f"{where}: '{name}' isn't Unicode text: {error}") from None
    return prompt


def digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits that tell lists of prompts apart: a run is only continued with the same ones."""
    return hashlib.sha256("\0".join(f"{prompt.task}\1{prompt.text}" for prompt in prompts).encode()).hexdigest()[:16]
