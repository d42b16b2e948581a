"""Text <-> token ids, and chat messages -> token ids, from a transformers folder or a GGUF file.

The `tokenizers` library does the splitting and merging, jinja2 renders the chat template; this file only finds the pieces.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from mtp_jax.checkpoints import errors, token_bytes, vocabulary
from mtp_jax.checkpoints.chat import ChatTemplate
from mtp_jax.checkpoints.gguf import GGUFFile
from mtp_jax.checkpoints.hf import read_json

# Control tokens that close an assistant's turn, whatever the file calls its end of sequence.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>")


class TextError(ValueError):
    """A text can't be turned into tokens."""


class Tokenizer:
    """A model's own tokenizer and chat template. Make one with `from_hf` or `from_gguf`."""

    def __init__(
        self, tokens: Any, *, where: str, stop_tokens: tuple[int, ...], prefix: tuple[int, ...] = (), template: str | None = None, names: dict[str, str]
    ) -> None:
        """
        Args:
          tokens: a `tokenizers.Tokenizer`.
          where: file or folder, for messages.
          stop_tokens: ids that end an answer.
          prefix: ids that `encode` puts first (a GGUF file's add_bos_token; an HF tokenizer's own post-processor does it itself).
          template: jinja2 source of the chat template.
          names: variables of the template, such as bos_token.
        """
        self._tokens = tokens
        self._where = where
        self._prefix = list(prefix)
        self._chat = None if template is None else ChatTemplate(template, names, where)
        self._bytes: list[bytes] | None = None
        self.stop_tokens = stop_tokens

    @classmethod
    def from_hf(cls, folder: str | Path) -> Tokenizer:
        """Read FOLDER/tokenizer.json, and what tokenizer_config.json, chat_template.jinja and generation_config.json add.

        Raises:
          CheckpointError: tokenizer.json is absent.
          DamagedFile: a file can't be parsed.
        """
        import tokenizers

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise errors.CheckpointError(f"{path}: no such file; the tokenizer is read from it")
        try:
            tokens = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise errors.DamagedFile(f"{path}: not a tokenizer file: {error}") from error
        tokens.no_truncation()  # a limit or padding saved with it belongs to its training
        tokens.no_padding()
        settings = _optional_json(folder / "tokenizer_config.json")
        names = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _text(value)) is not None}
        stops = [tokens.token_to_id(names["eos_token"])] if "eos_token" in names else []
        for file in ("generation_config.json", "config.json"):
            ids = _optional_json(folder / file).get("eos_token_id")
            stops += ids if isinstance(ids, list) else [ids]
        return cls(tokens, where=str(folder), stop_tokens=_stops(tokens, stops), template=_hf_template(folder, settings), names=names)

    @classmethod
    def from_gguf(cls, source: str | Path | GGUFFile) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes (see `vocabulary`).

        Raises:
          UnsupportedModel: another kind of tokenizer.
          CheckpointError: a key is missing.
          DamagedFile: the file can't be read, or its vocabulary is inconsistent.
        """
        file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        tokens, words = vocabulary.read_tokenizer(file)
        named = {name: file.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos", "eot", "unknown", "padding")}
        for name, index in named.items():
            if index is not None and not 0 <= index < len(words):
                raise errors.DamagedFile(f"{file.path}: tokenizer.ggml.{name}_token_id={index}: must be below the {len(words)} tokens")
        prefix = (named["bos"],) if file.get("tokenizer.ggml.add_bos_token", False) and named["bos"] is not None else ()
        names = {f"{name}_token": words[index] for name, index in named.items() if index is not None and name in ("bos", "eos")}
        stops = _stops(tokens, [named["eos"], named["eot"]])
        return cls(tokens, where=str(file.path), stop_tokens=stops, prefix=prefix, template=file.get("tokenizer.chat_template", None), names=names)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._tokens.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. A beginning-of-sequence token comes first only if the model's own files say so.

        Raises:
          TextError: the text holds a lone surrogate.
        """
        _check_text(text, "text")
        return self._prefix + self._tokens.encode(text).ids

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        """Text of token ids (any iterable of integers); control tokens are left out unless `skip_special` is False."""
        return self._tokens.decode([int(index) for index in ids], skip_special_tokens=skip_special)

    def settled_text(self, ids: list[int]) -> str:
        """As much of decode(ids) as stays whatever tokens follow: it ends before a character of which only a part is there."""
        end = len(ids)
        while end and ids[end - 1] in self._unsettled:
            end -= 1
        return self.decode(ids[:end]).rstrip("\ufffd")

    @functools.cached_property
    def _unsettled(self) -> frozenset[int]:
        """Tokens at the end of a text that the next token may change."""
        fallback = token_bytes.fallback_tokens(self._tokens)
        return fallback | token_bytes.control_tokens(self._tokens) if fallback else fallback

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """What each token id in 0..vocab_size-1 adds to a decoded text, as UTF-8: perhaps part of a character; nothing for control tokens.

        Raises:
          UnsupportedModel: the tokenizer's decoder is neither byte-level nor SentencePiece's.
        """
        if self._bytes is None or len(self._bytes) != vocab_size:
            self._bytes = token_bytes.read(self._tokens, vocab_size, self._where)
        return self._bytes

    @property
    def drops_first_space(self) -> bool:
        """Whether decode leaves out a space at the beginning of a text."""
        return token_bytes.drops_first_space(self._tokens)

    def apply_chat(self, messages: list[dict[str, str]], *, answer_next: bool = True) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, in the model's own chat template.

        Args:
          messages: dicts with "role" ("system", "user" or "assistant") and "content". A template may add a default system message.
          answer_next: False ends with the last message instead, as a later turn of the conversation would have it before itself.

        Raises:
          CheckpointError: the model has no template, or its template refuses these messages.
          TextError: a message holds a lone surrogate.
        """
        if self._chat is None:
            raise errors.CheckpointError(f"{self._where}: has no chat template (a base model?); use encode on plain text instead")
        for number, message in enumerate(messages, 1):
            for key, value in message.items():
                if isinstance(value, str):
                    _check_text(value, f"message {number}: {key!r}")
        text = self._chat.render(messages, answer_next=answer_next)
        _check_text(text, f"{self._where}: the chat template's text")
        return self._tokens.encode(text, add_special_tokens=False).ids  # the template writes them itself


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise TextError(f"{name} has {found!r} at character {error.start + 1}: must be Unicode text, and half of a surrogate pair is none") from None


def _stops(tokens: Any, ids: list[int | None]) -> tuple[int, ...]:
    """The given ids and the known end-of-turn tokens, each once, in this order."""
    found = [*ids, *(tokens.token_to_id(word) for word in _END_OF_TURN)]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(value: Any) -> str | None:
    """A special token's text: written as a string, or as a dict with "content"."""
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _hf_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template's source: chat_template.jinja, else the one (or the one named "default") in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


__all__ = ["TextError", "Tokenizer"]
