"""A GGUF file's vocabulary -> a `tokenizers.Tokenizer`: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama").

SentencePiece (arXiv:1808.06226; its src/bpe_model.cc) keeps no list of merges: it joins the two neighbours
whose joined text is the best-scored piece, the leftmost of equals. The same comes of a list that holds, best piece
first, every way of making the piece out of two others (as transformers' converters derive it).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtp_jax.checkpoints import errors
from mtp_jax.checkpoints.gguf import GGUFFile

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"  # how SentencePiece writes a space
# As Qwen2's tokenizer.json has it.
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_tokenizer(file: GGUFFile) -> tuple[Any, list[str]]:
    """Tokenizer of a GGUF file, and its tokens in the order of their ids.

    Raises:
      UnsupportedModel: another kind of tokenizer.
      CheckpointError: a key is missing.
      DamagedFile: the keys don't fit each other.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise errors.UnsupportedModel(f"{file.path}: tokenizer.ggml.model={kind!r}: only 'gpt2' and 'llama' are supported")
    words: list[str] = file.get("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type")
    if len(kinds) != len(words) or len(set(words)) != len(words):
        problem = f"{len(kinds)} token types" if len(kinds) != len(words) else f"{len(set(words))} different ones"
        raise errors.DamagedFile(f"{file.path}: tokenizer.ggml.tokens has {len(words)} tokens but {problem}; must be as many")
    build = _byte_level_bpe if kind == "gpt2" else _sentencepiece_bpe
    return build(file, words, kinds), words


def _byte_level_bpe(file: GGUFFile, words: list[str], kinds: list[int]) -> Any:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    pre = file.get("tokenizer.ggml.pre")
    if pre not in ("smollm", "qwen2"):
        raise errors.UnsupportedModel(f"{file.path}: tokenizer.ggml.pre={pre!r}: only 'smollm' and 'qwen2' are supported")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    try:
        tokens = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    except Exception as error:  # a merge of tokens that the vocabulary lacks, or that isn't a pair
        raise errors.DamagedFile(f"{file.path}: tokenizer.ggml.merges doesn't fit tokenizer.ggml.tokens: {error}") from error
    if pre == "smollm":  # every digit alone, then GPT-2's rule, as SmolLM's tokenizer.json has it
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        parts = [pre_tokenizers.Split(tokenizers.Regex(_QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokens.normalizer = normalizers.NFC()
    tokens.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokens.decoder = decoders.ByteLevel()
    _add(tokens, words, kinds, {_UNKNOWN, _CONTROL}, special=True)
    _add(tokens, words, kinds, {_USER_DEFINED}, special=False)
    return tokens


def _sentencepiece_bpe(file: GGUFFile, words: list[str], kinds: list[int]) -> Any:
    """Gemma's tokenizer: text as it is, spaces as "▁", characters outside the vocabulary as their UTF-8 bytes."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    for key, default, only in (("add_space_prefix", True, False), ("remove_extra_whitespaces", False, False), ("add_eos_token", False, False)):
        value = file.get(f"tokenizer.ggml.{key}", default)
        if value != only:
            raise errors.UnsupportedModel(f"{file.path}: tokenizer.ggml.{key}={value!r}: only {only!r} is supported")
    if file.get("tokenizer.ggml.precompiled_charsmap", None) is not None:
        raise errors.UnsupportedModel(f"{file.path}: tokenizer.ggml.precompiled_charsmap: text is taken as it is; this key is not supported")
    scores = file.get("tokenizer.ggml.scores")
    if len(scores) != len(words):
        raise errors.DamagedFile(f"{file.path}: tokenizer.ggml.tokens has {len(words)} tokens but {len(scores)} scores; must be as many")
    others = sorted(set(kinds) - {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE})
    if others:
        raise errors.UnsupportedModel(f"{file.path}: tokenizer.ggml.token_type holds {others[0]}; only 1, 2, 3, 4 and 6 are supported")
    bytes_held = {word for word, kind in zip(words, kinds, strict=True) if kind == _BYTE}
    lacking = [word for word in (f"<0x{byte:02X}>" for byte in range(256)) if word not in bytes_held]
    if lacking:
        raise errors.DamagedFile(f"{file.path}: tokenizer.ggml.tokens lacks the byte token {lacking[0]!r}; all 256 are needed")
    vocab = {word: index for index, word in enumerate(words)}
    unknown = next((word for word, kind in zip(words, kinds, strict=True) if kind == _UNKNOWN), None)
    tokens = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(_merges(words, kinds, scores)), byte_fallback=True, fuse_unk=True, unk_token=unknown))
    tokens.normalizer = normalizers.Replace(" ", _SPACE)
    tokens.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add(tokens, words, kinds, {_UNKNOWN, _CONTROL}, special=True)
    # Found before any merge, the longest first, in the text with its spaces already written as "▁".
    _add(tokens, words, kinds, {_USER_DEFINED}, special=False, normalized=True)
    return tokens


def _merges(words: list[str], kinds: list[int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """All pairs of pieces whose joined text is a piece, the best-scored text first; texts of equal score by id.

    Worked row: pieces a, b, c, ab (score -1), abc (-2) give (a, b), (ab, c); bc is no piece, so (a, bc) isn't a pair.
    Control, byte and user-defined tokens don't take part: SentencePiece never reaches one by joining.
    """
    pieces = {word for word, kind in zip(words, kinds, strict=True) if kind == _NORMAL}
    order = sorted((-scores[index], index) for index, kind in enumerate(kinds) if kind == _NORMAL)
    for _, index in order:
        word = words[index]
        for cut in range(1, len(word)):
            left, right = word[:cut], word[cut:]
            if left in pieces and right in pieces:
                yield left, right


def _add(tokens: Any, words: list[str], kinds: list[int], wanted: set[int], *, special: bool, normalized: bool = False) -> None:
    import tokenizers

    added = [tokenizers.AddedToken(word, special=special, normalized=normalized) for word, kind in zip(words, kinds, strict=True) if kind in wanted]
    (tokens.add_special_tokens if special else tokens.add_tokens)(added)


__all__ = ["read_tokenizer"]
