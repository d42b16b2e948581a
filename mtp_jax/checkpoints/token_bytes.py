"""What each token adds to a decoded text, in bytes: what stop strings are matched against."""

from __future__ import annotations

import json
import re
from typing import Any

from mtp_jax.checkpoints import errors

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def read(tokens: Any, vocab_size: int, where: str) -> list[bytes]:
    """Bytes of the ids 0..vocab_size-1 of a `tokenizers.Tokenizer`; empty for control tokens and ids without a token.

    Raises:
      UnsupportedModel: its decoder is neither byte-level nor SentencePiece's.
    """
    kinds = {part["type"] for part in _decoders(tokens)}
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif "ByteFallback" in kinds:
        to_bytes = _byte_fallback
    elif "Metaspace" in kinds:
        to_bytes = _words
    else:
        raise errors.UnsupportedModel(f"{where}: the tokenizer's decoder is {sorted(kinds)}: stop strings need a byte-level or a SentencePiece one")
    silent = control_tokens(tokens)
    words = [None if index in silent else tokens.id_to_token(index) for index in range(vocab_size)]
    return [b"" if word is None else to_bytes(word) for word in words]


def control_tokens(tokens: Any) -> frozenset[int]:
    """Ids that add nothing to a text."""
    return frozenset(index for index, token in tokens.get_added_tokens_decoder().items() if token.special)


def fallback_tokens(tokens: Any) -> frozenset[int]:
    """Ids that stand for one byte each in a decoder that takes a run of them as a whole: text if all of it is UTF-8, else broken from end to end."""
    if not any(part["type"] == "ByteFallback" for part in _decoders(tokens)):
        return frozenset()
    return frozenset(index for word, index in tokens.get_vocab(with_added_tokens=True).items() if _BYTE_TOKEN.fullmatch(word))


def drops_first_space(tokens: Any) -> bool:
    """Whether a space at the beginning of a text is left out when it is decoded, as Llama 2's tokenizer does."""
    parts = _decoders(tokens)
    return any(part["type"] == "Strip" and part["start"] > 0 or part["type"] == "Metaspace" and part["prepend_scheme"] != "never" for part in parts)


def _decoders(tokens: Any) -> list[dict[str, Any]]:
    """What a tokenizer's decoder is made of."""

    def flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
        return sum(map(flat, decoder["decoders"]), []) if decoder["type"] == "Sequence" else [decoder]

    return [] if tokens.decoder is None else flat(json.loads(tokens.decoder.__getstate__()))


def _byte_level(word: str) -> bytes:
    if all(letter in _BYTES for letter in word):
        return bytes(_BYTES[letter] for letter in word)
    return word.encode()  # an added token, written as it is


def _byte_fallback(word: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(word)
    return bytes([int(byte.group(1), 16)]) if byte else _words(word)


def _words(word: str) -> bytes:
    return word.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: the printable ones of Latin-1 stand for themselves, the others, in order, for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()
