"""Reading prompt files: JSON lines with `prompt` (text) and optionally `task`; and files of conversations.

A conversation is a line of one of these forms, each with or without `task`:

    {"prompt": ".."}
    {"prompt": "..", "answer": ".."}
    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}, ..]}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROLES = ("system", "user", "assistant")
T = TypeVar("T")


class PromptFileError(ValueError):
    """A line of a prompt file breaks a rule."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and the task it is counted under."""

    task: str
    text: str


class Message(NamedTuple):
    """One turn."""

    role: str  # one of ROLES
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns in order, among them at least one user's."""

    task: str
    messages: tuple[Message, ...]
    where: str = ""  # file and line, for messages to people

    @property
    def question(self) -> tuple[Message, ...]:
        """Everything up to the last user's turn: what the backbone is to answer."""
        last = max(place for place, message in enumerate(self.messages) if message.role == "user")
        return self.messages[: last + 1]


def read(paths: Sequence[str | Path], *, limit: int | None = None) -> list[Prompt]:
    """Read prompts, `limit` of each file at most.

    Raises:
      PromptFileError: naming file and line: not JSON, no `prompt`, an empty one, or one that isn't Unicode text; or a file without any.
    """
    return _read(paths, limit, _parse_prompt)


def read_conversations(paths: Sequence[str | Path], *, limit: int | None = None) -> list[Conversation]:
    """Read conversations in any of the three forms, `limit` of each file at most.

    Raises:
      PromptFileError: as `read`; besides, naming the message: no `role` or `content`, an unknown role, empty content, or no user's turn.
    """
    return _read(paths, limit, _parse_conversation)


def _read(paths: Sequence[str | Path], limit: int | None, parse: Callable[[dict[str, Any], str, str], T]) -> list[T]:
    """`parse` gets the line's object, file and line, and the task where the object names none."""
    items: list[T] = []
    for path in paths:
        path = Path(path)
        if not path.is_file():
            raise PromptFileError(f"{path}: no such file")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PromptFileError(f"{path}: not UTF-8 text: {error}") from None
        lines = [(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        found = [parse(_record(line, where), where, path.stem) for line, where in lines]
        if not found:
            raise PromptFileError(f"{path}: no prompt in it")
        items += found[:limit]
    return items


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptFileError(f"{where}: not JSON: {error}") from None
    return record if isinstance(record, dict) else {}


def _parse_prompt(record: dict[str, Any], where: str, task: str) -> Prompt:
    if not isinstance(record.get("prompt"), str):
        raise PromptFileError(f"{where}: needs an object with a text 'prompt'")
    return Prompt(task=_task(record, where, task), text=_checked(record["prompt"], f"{where}: 'prompt'"))


def _parse_conversation(record: dict[str, Any], where: str, task: str) -> Conversation:
    if "messages" in record:
        if "prompt" in record or "answer" in record:
            raise PromptFileError(f"{where}: has 'messages' and 'prompt' or 'answer': must have only one of the forms")
        messages = record["messages"]
        if not isinstance(messages, list):
            raise PromptFileError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")
        turns = tuple(_parse_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1))
        if not any(message.role == "user" for message in turns):
            raise PromptFileError(f"{where}: 'messages' must hold a user's message")
    else:
        if not isinstance(record.get("prompt"), str):
            raise PromptFileError(f"{where}: needs an object with a text 'prompt', or with 'messages'")
        turns = (Message("user", _checked(record["prompt"], f"{where}: 'prompt'")),)
        if "answer" in record:
            if not isinstance(record["answer"], str):
                raise PromptFileError(f"{where}: 'answer' must be text")
            turns += (Message("assistant", _checked(record["answer"], f"{where}: 'answer'")),)
    return Conversation(task=_task(record, where, task), messages=turns, where=where)


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise PromptFileError(f"{where}: needs an object with text 'role' and 'content'")
    if message["role"] not in ROLES:
        raise PromptFileError(f"{where}: role {message['role']!r} must be one of {', '.join(ROLES)}")
    return Message(message["role"], _checked(message["content"], f"{where}: 'content'"))


def _task(record: dict[str, Any], where: str, default: str) -> str:
    return _unicode(str(record.get("task", default)), f"{where}: 'task'")


def _checked(text: str, name: str) -> str:
    if not text.strip():
        raise PromptFileError(f"{name} is empty")
    return _unicode(text, name)


def _unicode(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise PromptFileError(f"{name} isn't Unicode text: {error}") from None
    return text


def digest(prompts: Sequence[Prompt]) -> str:
    """16 hex digits that tell lists of prompts apart: a run is only continued with the same ones."""
    return _digest([(prompt.task, prompt.text) for prompt in prompts])


def digest_conversations(conversations: Sequence[Conversation]) -> str:
    """The same for conversations; those of a single question have the digest of that prompt."""
    return _digest([(item.task, item.messages[0].content if len(item.messages) == 1 else json.dumps(item.messages)) for item in conversations])


def _digest(items: Sequence[tuple[str, str]]) -> str:
    return hashlib.sha256("\0".join(f"{task}\1{text}" for task, text in items).encode()).hexdigest()[:16]
