"""Stop strings: the automata against a search of the text, and rows of the loop against a search after every token."""

import dataclasses
import random

import fakes
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop, stops

PROMPTS = fakes.prompts(3, 9, 20)
BUDGET, M = 25, 3
WORDS = [word.encode() for word in ("a", "b", "ab", "aab", "ba ", " ", "", "é", "€", "😀")]
PARTS = [b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80"]  # of these characters
PIECES = fakes.Pieces([(WORDS + PARTS)[token % 16] for token in range(64)])


def config(*strings, **changes):
    return config_lib.DecodeConfig(max_new_tokens=BUDGET, num_draft=M, stop_strings=(*strings, "never")[:2], **changes)


@pytest.fixture(scope="module")
def answers(runtime):
    return [output.tokens for output in generate.run(runtime.without_drafter(), PROMPTS, config_lib.DecodeConfig(max_new_tokens=BUDGET)).outputs]


@pytest.fixture(scope="module")
def runtimes(runtime, answers):
    """One token a step; blocks of four, all right; a head."""
    script = np.zeros((3, 256), np.int32)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        script[row, : len(prompt) + BUDGET] = prompt + answer
    return [runtime.without_drafter(), dataclasses.replace(runtime, drafter=fakes.Scripted(), drafter_params=jnp.asarray(script)), runtime]


def searched(tokens, tokenizer, strings):
    """Tokens, text and finish reason by decoding and searching after every token."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        places = [text.find(string) for string in strings if string in text]
        if places:
            return tokens[:count], text[: min(places)], "stop"
    return tokens, tokenizer.decode(tokens), "length"


def check(runtimes, backbone, answers, tokenizer, *strings):
    """Rows of every runtime end where the search says; gives how they end."""
    loaded = dataclasses.replace(backbone, tokenizer=tokenizer)
    expected = [searched(answer, tokenizer, strings) for answer in answers]
    for runtime in runtimes:
        result = generate.run_text(runtime, loaded, PROMPTS, config(*strings))
        assert [(output.tokens, output.text, output.finish_reason) for output in result.outputs] == expected, strings
    return [reason for _, _, reason in expected]


def walk(table, tokens):
    """Number of tokens after which a string has been found, or None."""
    states = np.asarray(table.start)
    for count, token in enumerate(tokens, 1):
        states = np.asarray(table.next)[np.arange(table.num_strings), states, token]
        if (states == np.asarray(table.found)).any():
            return count
    return None


@pytest.mark.parametrize(
    "string, pieces, count",
    [
        ("aab", ["a", "a", "a", "b"], 4),  # after "aaa" the last two count
        ("abab!", ["ab", "abab", "!"], 3),
        ("aabaaab", ["aabaa", "b", "aaab"], 3),
        ("ab", ["xa", "bc"], 2),
        ("ab", ["xabx"], 1),
        ("ab", ["a", "", "b"], 3),  # a control token between them
        ("ab", ["a", "x", "b"], None),
    ],
)
def test_hand_worked_strings(string, pieces, count):
    table = stops.make_table([piece.encode() for piece in pieces], [string])
    assert walk(table, range(len(pieces))) == count


@pytest.mark.parametrize("drops_first_space", [False, True])
def test_random_strings_equal_a_search(drops_first_space):
    rng = random.Random(1)
    pieces = [b"a", b"b", b"aa", b"ab", b"bab", b"", b" ", b" a"]
    for _ in range(60):
        strings = ["".join(rng.choices("ab ", [4, 4, 1], k=rng.randint(1, 7))) for _ in range(2)]
        table = stops.make_table(pieces, strings, drops_first_space=drops_first_space)
        for _ in range(20):
            tokens = rng.choices(range(len(pieces)), k=12)
            texts = [b"".join(pieces[token] for token in tokens[:count]).decode() for count in range(1, 13)]
            texts = [text.removeprefix(" ") if drops_first_space else text for text in texts]
            expected = next((count for count, text in enumerate(texts, 1) if any(string in text for string in strings)), None)
            assert walk(table, tokens) == expected, (strings, tokens)


def test_tables_of_like_length_have_one_shape():
    pieces = [b"ab", b"", b"b"]
    assert stops.make_table(pieces, ["b"]).next.shape == stops.make_table(pieces, ["b" * 14]).next.shape == (1, 16, 3)
    long = stops.make_table(pieces, ["b" * 300, "b"])
    assert long.next.shape == (2, 304, 3) and walk(long, [2] * 299 + [2]) == 1 and walk(stops.make_table(pieces, ["b" * 300]), [2] * 400) == 300


def test_rows_end_where_a_search_ends_them(runtimes, backbone, answers):
    """Strings cut out of the texts that are coming, at any place: borders of tokens, drafts, steps and characters fall where they may."""
    rng, reasons = random.Random(2), []
    for _ in range(12):
        strings = []
        for _ in range(2):
            text = PIECES.decode(rng.choice(answers))
            begin = rng.randrange(len(text) - 6)
            strings.append(text[begin : begin + rng.randint(2, 9)].replace("\ufffd", "") or "a")
        reasons += check(runtimes, backbone, answers, PIECES, *strings)
    assert reasons.count("stop") > 10 and reasons.count("length") > 5


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_string_of_the_first_token_and_one_across_its_end(runtimes, backbone, answers, row):
    first, second = answers[row][:2]
    assert check(runtimes, backbone, answers, fakes.Tokenizer(), str(first))[row] == "stop"  # with no space before it, as in the text
    assert check(runtimes, backbone, answers, fakes.Tokenizer(), f"{first} {str(second)[0]}")[row] == "stop"
    check(runtimes, backbone, answers, fakes.Tokenizer(), f" {first} {second}")  # with one it is not in this text's beginning


def test_characters_split_over_tokens(runtimes, backbone, answers):
    """Token by token the row's text gains a third of a character, so the string ends in the middle of nowhere but the whole."""
    thirds = [b"\xe2", b"\x82", b"\xac"]
    place = {token: index for index, token in reversed(list(enumerate(answers[0])))}
    pieces = [thirds[place[token] % 3] if token in place else b"x" for token in range(64)]
    for strings in (["€"], ["€€"], ["€" * 4, "x€"]):
        check(runtimes, backbone, answers, fakes.Pieces(pieces), *strings)


def test_overlapping_strings_that_one_token_completes_cut_at_the_earliest(runtimes, backbone, answers):
    token = answers[0][5]
    pieces = [b"." if other != token else b"abcd" for other in range(64)]
    check(runtimes, backbone, answers, fakes.Pieces(pieces), "bc", "abcd")
    check(runtimes, backbone, answers, fakes.Pieces(pieces), "abcd", "d.")
    output = generate.run_text(runtimes[1], dataclasses.replace(backbone, tokenizer=fakes.Pieces(pieces)), PROMPTS, config("bc", "abcd")).outputs[0]
    assert output.text == "." * answers[0].index(token) and output.tokens[-1] == token


def test_a_string_that_begins_in_the_prompt_does_not_count(runtimes, backbone, answers):
    last, first = PROMPTS[0][-1], answers[0][0]
    assert last not in answers[0][: answers[0].index(first) + 1]
    pieces = [f"<{token}>".encode() for token in range(64)]
    for string in (f"<{last}><{first}>", f"<{last}>", f">{'<' + str(first) + '>'}"):
        check(runtimes, backbone, answers, fakes.Pieces(pieces), string)


def test_a_stop_token_ends_a_row_whose_string_is_half_there(runtimes, backbone, answers):
    stop = answers[0][4]
    pieces = [f"<{token}>".encode() for token in range(64)]
    loaded = dataclasses.replace(backbone, tokenizer=fakes.Pieces(pieces, (stop,)))
    half = f"<{stop}><"
    output = generate.run_text(runtimes[1], loaded, PROMPTS, config(half)).outputs[0]
    assert output.tokens == answers[0][: answers[0].index(stop) + 1] and output.finish_reason == "stop"
    assert output.text == "".join(f"<{token}>" for token in output.tokens)


def test_other_strings_of_like_length_compile_nothing(runtimes, backbone):
    loaded = dataclasses.replace(backbone, tokenizer=PIECES)
    generate.run_text(runtimes[0], loaded, PROMPTS, config("ab", "aaab"))
    before = loop.decode._cache_size(), loop.begin._cache_size(), loop.read._cache_size()
    generate.run_text(runtimes[0], loaded, PROMPTS, config("ab é€😀a", "b"))
    assert (loop.decode._cache_size(), loop.begin._cache_size(), loop.read._cache_size()) == before


def test_a_large_vocabulary_is_tabulated_once_per_tokenizer_and_strings():
    rng = np.random.default_rng(0)
    tokenizer = fakes.Pieces([rng.integers(32, 127, rng.integers(1, 12)).astype(np.uint8).tobytes() for _ in range(49152)])
    table = stops.table_for(tokenizer, 49152, ("User:", "\n\n"))
    assert stops.table_for(tokenizer, 49152, ("User:", "\n\n")) is table
    assert table.next.nbytes == 2 * 16 * 49152


def test_stop_strings_without_a_tokenizer_or_with_half_a_surrogate_pair(runtime):
    with pytest.raises(config_lib.ConfigError, match="need the tokenizer"):
        generate.run(runtime, PROMPTS, config("a"))
    with pytest.raises(config_lib.ConfigError, match=r"stop_strings='a\\ud800': must be Unicode text"):
        config("a\ud800")
