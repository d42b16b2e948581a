"""SentencePiece vocabularies: joins by score, bytes for what is missing, the same ids as SentencePiece and transformers give."""

import random

import pytest
import strange_texts
import tiny_files

from mtp_jax.checkpoints import catalog, errors, vocabulary
from mtp_jax.checkpoints.gguf import GGUFFile
from mtp_jax.checkpoints.tokenizer import Tokenizer

NORMAL, USER_DEFINED = 1, 4
PIECES = {"ab": -1.0, "bc": -2.0, "abc": -3.0, "▁a": -4.0, "aa": -5.0, "▁ab": -6.0, "aaa": -7.0, "ca": -8.0, "bcab": -9.0, "▁▁": -10.0}
WORDS = {
    **{word: (NORMAL, -100.0) for word in ("▁", "a", "b", "c")},
    **{word: (NORMAL, score) for word, score in reversed(PIECES.items())},  # the best-scored last: scores count, not ids
    **{word: (USER_DEFINED, -1000.0) for word in ("   ", "\n\n", "<b>")},
}


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", **tiny_files.spm_keys(WORDS)))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("abc", ["abc"]),  # ab, then ab + c
        ("bc", ["bc"]),
        ("bcab", ["bcab"]),
        ("abcab", ["abc", "ab"]),  # both ab first, so bc is never made
        ("aaaaa", ["aa", "aaa"]),  # (aa)(aa)a: the leftmost first; then aa + a
        ("a ab", ["a", "▁ab"]),
        ("a  b", ["a", "▁▁", "b"]),
        ("a   b", ["a", "   ", "b"]),  # a user-defined token, found before any join
        ("    a", ["   ", "▁a"]),
        ("a\n\n\nb", ["a", "\n\n", "<0x0A>", "b"]),
        ("a<b>c", ["a", "<b>", "c"]),
        ("é😀", ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]),
        ("a<bos>b", ["a", "<bos>", "b"]),
        ("\x00\x7f", ["<0x00>", "<0x7F>"]),
    ],
)
def test_hand_worked_texts(tokenizer, text, expected):
    ids = tokenizer.encode(text)
    assert [tokenizer.decode([index], skip_special=False) for index in ids[:1]] == ["<bos>"]
    assert ids[1:] == [tokenizer._tokens.token_to_id(word) for word in expected]
    assert tokenizer.decode(ids) == text.replace("<bos>", "")


def test_the_sign_for_a_space_in_a_text_is_a_space(tokenizer):
    """As in SentencePiece, also where it makes a user-defined token."""
    assert tokenizer.encode("a▁▁▁b▁ab") == tokenizer.encode("a   b ab")


def test_text_that_looks_like_a_byte_token_is_text(tokenizer):
    ids = tokenizer.encode("<0x41>")
    assert len(ids) == 1 + len("<0x41>") and tokenizer.decode(ids) == "<0x41>"


def test_broken_byte_sequences_decode_to_replacement_characters(tokenizer):
    a = tokenizer.encode("a")[1]
    assert tokenizer.decode([a, 3 + 0xC3, a, 3 + 0xC3, 3 + 0xA9]) == "a\ufffdaé"


def test_random_texts_equal_a_plain_implementation(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(["a", "b", "c", " ", "<b>", "é", "\n"], [6, 4, 4, 3, 1, 1, 1], k=rng.randint(0, 24)))
        expected = [tokenizer._tokens.token_to_id(word) for word in plain_encode(text)]
        assert tokenizer.encode(text) == [1, *expected], text


def plain_encode(text: str) -> list[str]:
    """SentencePiece's BPE as its paper and source say, in the slowest way."""
    parts, fixed = [], []
    text, users = text.replace(" ", "▁"), {word.replace(" ", "▁"): word for word, (kind, _) in WORDS.items() if kind == USER_DEFINED}
    while text:
        user = max((word for word in users if text.startswith(word)), key=len, default=None)
        parts.append(user or text[0])
        fixed.append(user is not None)
        text = text[len(parts[-1]) :]
    while True:
        pairs = [
            (PIECES[parts[i] + parts[i + 1]], -i) for i in range(len(parts) - 1) if not fixed[i] and not fixed[i + 1] and parts[i] + parts[i + 1] in PIECES
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2], fixed[at : at + 2] = [parts[at] + parts[at + 1]], [False]
    whole = [
        ([users[part]] if is_user else [part] if part in WORDS else [f"<0x{byte:02X}>" for byte in part.encode()])
        for part, is_user in zip(parts, fixed, strict=True)
    ]
    return [word for words in whole for word in words]


def test_base_model_has_no_template_and_stops_at_eos(tokenizer):
    assert not tokenizer.has_chat_template and tokenizer.stop_tokens == (2,)


def _without(word):
    keys = tiny_files.spm_keys(WORDS)
    at = keys["tokenizer__ggml__tokens"].index(word)
    return {key: [value for index, value in enumerate(values) if index != at] if isinstance(values, list) else values for key, values in keys.items()}


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        (errors.UnsupportedModel, {"tokenizer__ggml__add_space_prefix": None}, "tokenizer.ggml.add_space_prefix=True: only False"),
        (errors.UnsupportedModel, {"tokenizer__ggml__add_eos_token": True}, "tokenizer.ggml.add_eos_token=True: only False"),
        (errors.UnsupportedModel, {"tokenizer__ggml__precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap"),
        (errors.CheckpointError, {"tokenizer__ggml__scores": None}, "'tokenizer.ggml.scores' is missing"),
        (errors.DamagedFile, {"tokenizer__ggml__scores": [0.0]}, "but 1 scores; must be as many"),
        (errors.UnsupportedModel, {"tokenizer__ggml__token_type": [5] * (259 + len(WORDS))}, "token_type holds 5"),
        (errors.DamagedFile, _without("<0x7F>"), "lacks the byte token '<0x7F>'"),
    ],
)
def test_errors_name_file_and_key(tmp_path, kind, changes, message):
    with pytest.raises(kind, match=f"m.gguf: .*{message}"):
        Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", **(tiny_files.spm_keys(WORDS) | changes)))


def test_qwen2_splitting_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers (the parity extra)")
    words, merges = tiny_files.vocabulary(), [tuple(merge.split(" ")) for merge in tiny_files.MERGES]
    theirs = transformers.Qwen2Tokenizer(vocab={word: index for index, word in enumerate(words)}, merges=merges)
    ours = Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", tokenizer__ggml__pre="qwen2"))
    for text in strange_texts.texts(500):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), repr(text)


@pytest.mark.slow
def test_gemma_equals_sentencepiece_on_strange_texts():
    """SentencePiece's own code on the same pieces. It reads no control tokens out of a text, and the texts hold none."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece and protobuf, and 249 MB of weights")
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="needs sentencepiece and protobuf, and 249 MB of weights")
    file = GGUFFile(catalog.fetch("gemma3-270m"))
    model = pb.ModelProto()
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = pb.TrainerSpec.BPE, True
    model.trainer_spec.pad_id, model.trainer_spec.eos_id, model.trainer_spec.bos_id, model.trainer_spec.unk_id = 0, 1, 2, 3
    model.normalizer_spec.name, model.normalizer_spec.escape_whitespaces = "identity", True
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    columns = [file.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type")]
    for word, score, kind in zip(*columns, strict=True):
        model.pieces.add(piece=word.replace(" ", "▁") if kind == USER_DEFINED else word, score=score, type=kind)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()), Tokenizer.from_gguf(file)
    texts = strange_texts.texts(3000)
    assert [ours.encode(text) for text in texts] == [[2, *theirs.encode(text)] for text in texts]
    assert [ours.decode(ours.encode(text)) for text in texts] == [text.replace("▁", " ") for text in texts]


def test_tokens_come_back_in_the_order_of_their_ids(tmp_path):
    _, words = vocabulary.read_tokenizer(GGUFFile(tiny_files.write_gguf(tmp_path / "m.gguf", **tiny_files.spm_keys(WORDS))))
    assert words[:4] == ["<unk>", "<bos>", "<eos>", "<0x00>"] and words[-1] == "<b>"
