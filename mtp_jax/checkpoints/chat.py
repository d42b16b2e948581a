"""Chat templates: jinja2 source that turns messages into the text a model was trained on.

The template comes with the weights, so it is rendered in jinja2's sandbox, with the settings and helpers that
transformers gives it (whitespace handling changes the text, and so the tokens).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mtp_jax.checkpoints import errors


class ChatTemplate:
    """A compiled template.

    Raises:
      CheckpointError: the source isn't a jinja2 template.
    """

    def __init__(self, source: str, names: Mapping[str, str], where: str) -> None:
        """
        Args:
          source: jinja2 template.
          names: its variables besides the messages, such as bos_token.
          where: file or folder, for messages.
        """
        import jinja2
        from jinja2 import sandbox

        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise errors.CheckpointError(f"{where}: the chat template can't be compiled: {error}") from error
        self._names = dict(names)
        self._where = where

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = True) -> str:
        """Text of a conversation, ending where the assistant's answer begins, or with its last message when `answer_next` is False.

        Raises:
          CheckpointError: a message lacks "role" or "content", or the template refuses the messages.
        """
        for message in messages:
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise errors.CheckpointError(f"message {dict(message)!r}: field {key!r} must be a string")
        try:
            return self._template.render(messages=messages, add_generation_prompt=answer_next, **self._names)
        except Exception as error:  # a template may fail in any way that its expressions can
            raise errors.CheckpointError(f"{self._where}: the chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which would end up in the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


__all__ = ["ChatTemplate"]
