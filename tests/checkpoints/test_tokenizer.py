"""The tokenizer from either format, and the chat template."""

import json

import pytest
import tiny_files

from mtp_jax.checkpoints import errors
from mtp_jax.checkpoints.chat import ChatTemplate
from mtp_jax.checkpoints.tokenizer import TextError, Tokenizer

WORDS = {word: index for index, word in enumerate(tiny_files.vocabulary())}
HELLO = [{"role": "user", "content": "hello 12"}]


@pytest.fixture(params=["gguf", "hf"])
def tokenizer(request, tmp_path):
    if request.param == "gguf":
        return Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf"))
    return Tokenizer.from_hf(tiny_files.write_hf_tokenizer(tmp_path))


def test_merges_digits_and_special_tokens(tokenizer):
    # "12" has a merge, but smollm splits digits first.
    expected = [WORDS["hello"], WORDS["Ġh"], WORDS["i"], WORDS["Ġ"], WORDS["1"], WORDS["2"], WORDS["<|im_end|>"]]
    assert tokenizer.encode("hello hi 12<|im_end|>") == expected
    assert tokenizer.decode(expected) == "hello hi 12"
    assert tokenizer.decode(expected, skip_special=False) == "hello hi 12<|im_end|>"


@pytest.mark.parametrize("text", ["", "  a\n\n\tb ", "é 😀 ½٣", "<|im_start|>x"])
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_chat_is_rendered_with_the_default_system_message(tokenizer):
    assert tokenizer.has_chat_template
    ids = tokenizer.apply_chat(HELLO)
    assert tokenizer.decode(ids, skip_special=False) == tiny_files.RENDERED_HELLO
    assert ids[0] == WORDS["<|im_start|>"] and ids.count(WORDS["<|im_end|>"]) == 2


def test_own_system_message_replaces_the_default(tokenizer):
    text = tokenizer.decode(tokenizer.apply_chat([{"role": "system", "content": "be brief"}, *HELLO]))
    assert text.startswith("system\nbe brief\nuser\nhello 12")


def test_template_can_refuse(tokenizer):
    with pytest.raises(errors.CheckpointError, match="refuses these messages: no tools here"):
        tokenizer.apply_chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, {"role": "user", "content": None}])
def test_message_without_role_or_content(tokenizer, message):
    with pytest.raises(errors.CheckpointError, match="must be a string"):
        tokenizer.apply_chat([message])


def test_lone_surrogates_are_refused_where_they_stand(tokenizer):
    """As JSON's escapes or a command line of other bytes can hold them; a whole pair in JSON is one character."""
    with pytest.raises(TextError, match=r"^text has '\\ud800' at character 3: must be Unicode text"):
        tokenizer.encode("ab\ud800c")
    with pytest.raises(TextError, match=r"^message 2: 'content' has '\\udc80' at character 1: "):
        tokenizer.apply_chat([*HELLO, {"role": "user", "content": "\udc80"}])
    with pytest.raises(TextError, match=r"^message 1: 'role' has '\\udfff' at character 4: "):
        tokenizer.apply_chat([{"role": "cat\udfff", "content": "x"}])
    assert tokenizer.encode(json.loads('"\\ud83d\\ude00"')) == tokenizer.encode("\N{GRINNING FACE}")


def test_a_lone_surrogate_of_the_template_is_refused_too(tmp_path):
    tokenizer = Tokenizer.from_hf(tiny_files.write_hf_tokenizer(tmp_path, chat_template="{{ '\ud800' }}"))
    with pytest.raises(TextError, match=r"the chat template's text has '\\ud800' at character 1: "):
        tokenizer.apply_chat(HELLO)


def test_stop_tokens_and_vocabulary(tokenizer):
    assert tokenizer.stop_tokens == (WORDS["<|im_end|>"],)
    assert tokenizer.vocab_size == len(WORDS)


def test_missing_template_is_said_when_it_is_needed(tmp_path):
    tokenizer = Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", tokenizer__chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(errors.CheckpointError, match="m.gguf: has no chat template"):
        tokenizer.apply_chat(HELLO)


def test_gguf_bos_only_when_the_file_says_so(tmp_path):
    plain = Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "a.gguf"))
    adding = Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "b.gguf", tokenizer__ggml__add_bos_token=True))
    assert adding.encode("hi") == [1, *plain.encode("hi")]
    assert adding.encode("hi") == adding.encode("hi")  # the prefix isn't used up
    assert adding.apply_chat(HELLO) == plain.apply_chat(HELLO)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        (errors.UnsupportedModel, {"tokenizer__ggml__pre": "falcon"}, "tokenizer.ggml.pre='falcon': only 'smollm' and 'qwen2'"),
        (errors.UnsupportedModel, {"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model='bert': only 'gpt2' and 'llama'"),
        (errors.CheckpointError, {"tokenizer__ggml__merges": None}, "'tokenizer.ggml.merges' is missing"),
        (errors.DamagedFile, {"tokenizer__ggml__merges": ["h zz"]}, "merges doesn't fit"),
        (errors.DamagedFile, {"tokenizer__ggml__merges": ["h"]}, "merges doesn't fit"),
        (errors.DamagedFile, {"tokenizer__ggml__token_type": [1, 1]}, "but 2 token types"),
        (errors.DamagedFile, {"tokenizer__ggml__eos_token_id": 9999}, "eos_token_id=9999"),
        (errors.CheckpointError, {"tokenizer__chat_template": "{% if %}"}, "template can't be compiled"),
    ],
)
def test_gguf_tokenizer_errors(tmp_path, kind, changes, message):
    with pytest.raises(kind, match=f"m.gguf: .*{message}"):
        Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", **changes))


def test_hf_template_file_wins_and_stops_come_from_generation_config(tmp_path):
    tiny_files.write_hf_tokenizer(tmp_path, chat_template=[{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "no"}])
    assert Tokenizer.from_hf(tmp_path).decode(Tokenizer.from_hf(tmp_path).apply_chat(HELLO)) == "listed"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file {{ messages[0]['content'] }}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    tokenizer = Tokenizer.from_hf(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat(HELLO), skip_special=False) == "<|im_start|>file hello 12"
    assert tokenizer.stop_tokens == (2, 0)


def test_hf_post_processor_adds_bos_to_text_but_not_to_chat(tmp_path):
    import tokenizers
    from tokenizers import processors

    plain = Tokenizer.from_hf(tiny_files.write_hf_tokenizer(tmp_path))
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    saved.enable_truncation(4)
    saved.enable_padding(length=50)
    saved.save(str(tmp_path / "tokenizer.json"))
    adding = Tokenizer.from_hf(tmp_path)
    assert adding.encode("hello 1 2 1 2") == [1, *plain.encode("hello 1 2 1 2")]  # and neither cut nor padded
    assert adding.apply_chat(HELLO) == plain.apply_chat(HELLO)


def test_hf_tokenizer_file_absent_or_damaged(tmp_path):
    with pytest.raises(errors.CheckpointError, match="tokenizer.json: no such file"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(errors.DamagedFile, match="tokenizer.json: not a tokenizer file"):
        Tokenizer.from_hf(tmp_path)


def test_template_is_sandboxed_and_tojson_does_not_escape():
    with pytest.raises(errors.CheckpointError, match="refuses"):
        ChatTemplate("{{ ''.__class__.__mro__ and ''.__class__.__mro__[1].__subclasses__() }}", {}, "here").render(HELLO)
    assert ChatTemplate("{{ '<é>' | tojson }}", {}, "here").render(HELLO) == '"<é>"'
