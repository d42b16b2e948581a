"""What each token adds to a decoded text, in bytes: what stop strings are matched against."""

from __future__ import annotations

import json
import re
from typing import Any

from mtp_jax.checkpoints import errors

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def read(tokens: Any, vocab_size: int, where: str) -> list[bytes]:
    """Bytes of the ids 0..vocab_size-1 of a `tokenizers.Tokenizer`; empty for control tokens and ids without a token.

    Raises:
      UnsupportedModel: its decoder is neither byte-level nor SentencePiece's.
    """
    kinds = _kinds(json.loads(tokens.decoder.__getstate__())) if tokens.decoder is not None else set()
    if "ByteLevel" in kinds:
        plain = _byte_level
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        plain = _sentencepiece
    else:
        raise errors.UnsupportedModel(f"{where}: the tokenizer's decoder is {sorted(kinds)}: stop strings need a byte-level or a SentencePiece one")
    added = tokens.get_added_tokens_decoder()
    found = []
    for index in range(vocab_size):
        word = tokens.id_to_token(index)
        if word is None or (index in added and added[index].special):
            found.append(b"")
        else:
            found.append(word.encode() if index in added and plain is _byte_level else plain(word))
    return found


def _kinds(decoder: dict[str, Any]) -> set[str]:
    """Types of a decoder and of those in its sequence."""
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", [])))


def _byte_level(word: str) -> bytes:
    return b"".join(_BYTES[letter].to_bytes() if letter in _BYTES else letter.encode() for letter in word)


def _sentencepiece(word: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(word)
    return int(byte.group(1), 16).to_bytes() if byte else word.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: the printable ones of Latin-1 stand for themselves, the others, in order, for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()
