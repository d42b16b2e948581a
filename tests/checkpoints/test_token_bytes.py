"""What tokens add to a text, against the tokenizers library's own decoding, and how much of a text is settled."""

import random

import pytest
import strange_texts
import tiny_files
import tokenizers
from test_vocabulary import NORMAL, USER_DEFINED, WORDS
from tokenizers import AddedToken, decoders, models

from mtp_jax.checkpoints import errors
from mtp_jax.checkpoints.tokenizer import Tokenizer

KINDS = ["byte-level", "SentencePiece", "Llama 2", "Metaspace"]


def made(decoder, words, added=()):
    """A tokenizer of these words, for decoding; `<s>` is a control token."""
    tokens = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokens.decoder = decoder
    tokens.add_tokens([AddedToken(word) for word in added])
    tokens.add_special_tokens(["<s>"])
    return Tokenizer(tokens, where="here", stop_tokens=(), names={})


@pytest.fixture
def tokenizer(request, tmp_path):
    if request.param == "byte-level":
        return Tokenizer.from_hf(tiny_files.write_hf_tokenizer(tmp_path))
    if request.param == "SentencePiece":
        words = {**WORDS, "é": (NORMAL, -9.0), "x▁😀": (USER_DEFINED, 0.0)}
        return Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", **tiny_files.spm_keys(words)))
    words = ["a", "▁", "▁a", "▁▁b", "é", *(f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC))]
    if request.param == "Metaspace":
        return made(decoders.Metaspace(), ["a", "▁", "▁a", "é", "<0x41>"])
    return made(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), words)


def joined(tokenizer, ids):
    pieces = tokenizer.token_bytes(tokenizer.vocab_size)
    text = b"".join(pieces[index] for index in ids)
    return text.removeprefix(b" ") if tokenizer.drops_first_space else text


@pytest.mark.parametrize("tokenizer", ["byte-level", "SentencePiece"], indirect=True)
def test_bytes_of_a_texts_tokens_are_its_decoded_text(tokenizer):
    assert not tokenizer.drops_first_space
    for text in strange_texts.texts(400):
        ids = tokenizer.encode(text)
        assert joined(tokenizer, ids) == tokenizer.decode(ids).encode(), text


@pytest.mark.parametrize("tokenizer", KINDS, indirect=True)
def test_bytes_of_any_tokens_are_their_decoded_text_where_they_are_utf_8(tokenizer):
    rng, whole = random.Random(3), 0
    for _ in range(1500):
        ids = rng.choices(range(tokenizer.vocab_size), k=rng.randint(1, 5))
        try:
            text = joined(tokenizer, ids).decode()
        except UnicodeDecodeError:
            assert "\ufffd" in tokenizer.decode(ids)
        else:
            whole += 1
            assert tokenizer.decode(ids) == text, ids
    assert whole > 100


@pytest.mark.parametrize("tokenizer", KINDS, indirect=True)
def test_a_settled_text_stays_and_is_all_of_a_text_without_loose_ends(tokenizer):
    rng, behind = random.Random(4), 0
    for _ in range(400):
        ids = rng.choices(range(tokenizer.vocab_size), k=12)
        whole, before = tokenizer.decode(ids), ""
        for count in range(1, 13):
            settled = tokenizer.settled_text(ids[:count])
            assert whole.startswith(settled) and settled.startswith(before), ids
            before = settled
            behind += settled != tokenizer.decode(ids[:count])
    assert (behind > 0) == (tokenizer._where != "here" or "Strip" in str(tokenizer._tokens.decoder))  # words of Metaspace have no loose ends


def test_a_character_comes_with_its_last_byte():
    tokenizer = made(decoders.ByteLevel(), ["a", "Ġ", "â", "Ĥ", "¬"])
    assert [tokenizer.settled_text([0, 1, 2, 3, 4][:count]) for count in range(6)] == ["", "a", "a ", "a ", "a ", "a €"]


def test_bytes_beside_words_wait_for_the_end_of_their_run():
    """A byte that does not fit breaks the whole run, also behind a control token, so none of it is settled before a word follows."""
    tokenizer = made(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), ["a", "<0x41>", "<0xC3>", "<0xA9>"])
    assert tokenizer.decode([0, 1]) == "aA" and tokenizer.decode([0, 1, 4, 2]) == "a\ufffd\ufffd"
    assert [tokenizer.settled_text([0, 1, 4, 2, 3, 0][:count]) for count in range(1, 7)] == ["a"] * 5 + ["aAéa"]


def test_added_tokens_control_tokens_and_ids_without_a_token():
    tokenizer = made(decoders.ByteLevel(), ["a", "Ġb"], added=["  ", "x é€", "é"])
    assert tokenizer.token_bytes(8) == [b"a", b" b", b"  ", "x é€".encode(), b"\xe9", b"", b"", b""]
    assert tokenizer.token_bytes(8) is tokenizer.token_bytes(8) and len(tokenizer.token_bytes(3)) == 3


def test_other_decoders_are_refused():
    with pytest.raises(errors.UnsupportedModel, match=r"here: the tokenizer's decoder is \['WordPiece'\]: stop strings need"):
        made(decoders.WordPiece(), ["a"]).token_bytes(1)
    with pytest.raises(errors.UnsupportedModel, match=r"decoder is \[\]"):
        made(None, ["a"]).token_bytes(1)
