"""Pieces of text as they come: put together they are `generate`'s text, and none of them has to be taken back."""

import dataclasses
import random

import fakes
import pytest
import tiny_files
from test_vocabulary import WORDS

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax.checkpoints.tokenizer import Tokenizer
from mtp_jax.decoding import generate, loop, stream

PROMPTS = fakes.prompts(3, 9, 20)
CONFIG = config_lib.DecodeConfig(max_new_tokens=25, num_draft=3)
STOPS = dataclasses.replace(CONFIG, stop_strings=("never", "neither"))  # two strings in every call: one shape
# Token i is 'a', ' ', a letter of its own, or a third of a character, so that many texts have loose ends.
PIECES = fakes.Pieces([[b"a", b" ", chr(0x4E00 + token).encode(), "€".encode()[token // 4 % 3 :][:1]][token % 4] for token in range(64)])


@pytest.fixture(scope="module")
def loaded(backbone):
    return dataclasses.replace(backbone, tokenizer=PIECES)


def by_row(deltas):
    rows = {row: [] for row in range(len(PROMPTS))}
    for delta in deltas:
        rows[delta.row].append(delta)
    return rows


def check(runtime, loaded, config, every, **options):
    """The pieces against the whole; gives them by row."""
    whole = generate.run_text(runtime, loaded, PROMPTS, config, **options)
    found = stream.stream(runtime, loaded, PROMPTS, config, every=every, **options)
    rows = by_row(found)
    for output, deltas in zip(whole.outputs, rows.values(), strict=True):
        assert "".join(delta.text for delta in deltas) == output.text
        assert sum((delta.tokens for delta in deltas), []) == output.tokens
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [output.finish_reason]
        assert len(deltas[0].tokens) == 1 and all(delta.tokens for delta in deltas)
    assert found.result().outputs == whole.outputs
    return rows


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("with_head", [False, True])
def test_pieces_make_up_the_whole(runtime, loaded, every, with_head):
    rows = check(runtime if with_head else runtime.without_drafter(), loaded, STOPS, every)
    assert not any(delta.text.endswith("\ufffd") for deltas in rows.values() for delta in deltas[:-1])
    if every == 1 and not with_head:
        assert all(len(delta.tokens) == 1 for deltas in rows.values() for delta in deltas)
        assert any(not delta.text for deltas in rows.values() for delta in deltas)  # thirds of characters wait
    if every == 100:
        assert all(len(deltas) == 2 for deltas in rows.values())


def test_pieces_of_rows_with_their_own_budgets_and_stop_strings(runtime, loaded):
    rng = random.Random(0)
    answers = [output.text for output in generate.run_text(runtime, loaded, PROMPTS, STOPS).outputs]
    reasons = set()
    for _ in range(10):
        strings = []
        for _ in range(2):
            text = rng.choice(answers).replace("\ufffd", "")
            begin = rng.randrange(len(text) - 4)
            strings.append(text[begin : begin + rng.randint(1, 4)])
        config = dataclasses.replace(CONFIG, stop_strings=tuple(strings))
        rows = check(runtime, loaded, config, rng.randint(1, 3), budgets=[rng.randint(1, 25) for _ in PROMPTS])
        reasons |= {deltas[-1].finish_reason for deltas in rows.values()}
    assert reasons == {"stop", "length"}


def test_what_may_begin_a_stop_string_waits_and_nothing_else(runtime, loaded):
    """Vanilla, one step a look: after every token all of the text but the end that the string begins with has gone out."""
    text = fakes.Tokenizer()
    plain = generate.run_text(runtime.without_drafter(), dataclasses.replace(loaded, tokenizer=text), PROMPTS, STOPS).outputs[0]
    string = f"{plain.tokens[8]} {plain.tokens[9]} x"  # comes within one letter of being found
    config = dataclasses.replace(CONFIG, stop_strings=(string, "never"))
    deltas = by_row(stream.stream(runtime.without_drafter(), dataclasses.replace(loaded, tokenizer=text), PROMPTS, config, every=1))[0]
    sent, tokens, waited = "", [], 0
    for delta in deltas[:-1]:
        sent, tokens = sent + delta.text, tokens + delta.tokens
        so_far = text.decode(tokens)
        held = max(length for length in range(len(string)) if so_far.endswith(string[:length]))
        assert sent == so_far[: len(so_far) - held]
        waited += held > 0
    assert waited >= 2 and deltas[-1].finish_reason == "length"


def test_looks_compile_nothing_that_generate_has_compiled(runtime, loaded):
    generate.run_text(runtime, loaded, PROMPTS, STOPS)
    before = loop.decode._cache_size(), loop.begin._cache_size(), loop.read._cache_size()
    for every in (2, 5):
        list(stream.stream(runtime, loaded, PROMPTS, STOPS, every=every))
    assert (loop.decode._cache_size(), loop.begin._cache_size(), loop.read._cache_size()) == before


def test_a_stream_can_be_left_and_gone_on_from(runtime, loaded):
    """Left after its first pieces, the state holds just these; the next call reads on behind them."""
    whole = stream.stream(runtime, loaded, PROMPTS, STOPS, every=2)
    with pytest.raises(generate.StateError, match="nothing has been decoded yet"):
        whole.result()
    first = [next(whole) for _ in PROMPTS]
    assert [output.tokens for output in whole.result().outputs] == [delta.tokens for delta in first]
    more = fakes.prompts(4, 1, 2, seed=8)
    texts = [prompt + delta.tokens + then for prompt, delta, then in zip(PROMPTS, first, more, strict=True)]
    expected = generate.run_text(runtime, loaded, texts, STOPS).outputs
    second = stream.stream(runtime, loaded, more, STOPS, before=whole.state)
    rows = by_row(second)
    assert [sum((delta.tokens for delta in deltas), []) for deltas in rows.values()] == [output.tokens for output in expected]
    with pytest.raises(generate.StateError, match="another call has gone on from"):
        whole.result()
    with pytest.raises(generate.StateError, match="another call has gone on from"):
        stream.stream(runtime, loaded, more, STOPS, before=whole.state)
    assert second.result().outputs[0].prompt_tokens == len(texts[0])


def test_a_warm_stream_leaves_the_earlier_state_to_itself(runtime, loaded):
    earlier = generate.run(runtime, PROMPTS, STOPS, tokenizer=PIECES, keep_state=True)
    more = fakes.prompts(4, 1, 2, seed=8)
    found = stream.stream(runtime, loaded, more, STOPS, before=earlier.state, warm_up=True)
    texts = [prompt + output.tokens + then for prompt, output, then in zip(PROMPTS, earlier.outputs, more, strict=True)]
    list(found)
    expected = generate.run_text(runtime, loaded, texts, STOPS).outputs
    assert [output.tokens for output in found.result().outputs] == [output.tokens for output in expected]
    assert found.result().prefill_seconds > 0 and found.result().decode_seconds > 0


def test_wrong_calls_are_refused_before_the_first_piece(runtime, loaded):
    with pytest.raises(config_lib.ConfigError, match="every=0: must be at least 1"):
        stream.stream(runtime, loaded, PROMPTS, every=0)
    with pytest.raises(generate.PromptError, match="prompts is empty"):
        stream.stream(runtime, loaded, [])


def test_streams_for_a_backbone_and_a_head(head, loaded):
    expected = generate.generate(loaded, head, ["abc", "b", "zz"], STOPS).outputs
    rows = by_row(mtp_jax.generate_stream(loaded, head, ["abc", "b", "zz"], STOPS, every=2))
    assert ["".join(delta.text for delta in deltas) for deltas in rows.values()] == [output.text for output in expected]


BEGINNINGS = [("abca", ["abcd"], 1), ("xabc", ["abcd", "bcx"], 3), ("ab", ["x"], 0), ("", ["ab"], 0), ("aa", ["aab", "b"], 2)]


@pytest.mark.parametrize("text, strings, length", BEGINNINGS)
def test_hand_worked_beginnings(text, strings, length):
    assert stream.possible_beginning(text, strings) == length


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
def test_any_tokens_of_a_real_tokenizer(tmp_path, kind):
    """Random tokens, so most of these texts are broken; half of the rows end by a string cut out of them."""
    keys = {} if kind == "byte-level" else tiny_files.spm_keys(WORDS)
    tokenizer = Tokenizer.from_gguf(tiny_files.write_gguf(tmp_path / "m.gguf", **keys))
    rng = random.Random(6)
    for number in range(200):
        tokens = rng.choices(range(tokenizer.vocab_size), k=15)
        text = tokenizer.decode(tokens)
        begin = rng.randrange(len(text)) if text else 0
        string = text[begin : begin + 3].replace("\ufffd", "") or "never"
        ends = [count for count in range(1, 16) if number % 2 and string in tokenizer.settled_text(tokens[:count])]
        tokens = tokens[: ends[0]] if ends else tokens
        reason = "stop" if ends else "length"
        row = stream.Row(0, tokenizer, (string,))
        pieces = [row.take([token], reason if count == len(tokens) else None).text for count, token in enumerate(tokens, 1)]
        assert "".join(pieces) == generate.text_of(tokenizer, tokens, reason, (string,)), (tokens, string)
