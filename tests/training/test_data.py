"""Rollout files, batches that depend on the step alone, rows that carry loss, the draft vocabulary."""

import dataclasses
import json

import numpy as np
import pytest

from mtp_jax.config import TrainConfig
from mtp_jax.training import data


def example(tokens, answer_from):
    tokens = np.asarray(tokens, np.int32)
    return data.Example("t", tokens, np.arange(len(tokens)) >= answer_from)


def many(count, seed=0):
    rng = np.random.default_rng(seed)
    return [example(rng.integers(0, 64, rng.integers(8, 90)), int(rng.integers(2, 6))) for _ in range(count)]


def write(path, *records):
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def test_read_rollouts(tmp_path):
    one = write(tmp_path / "a.jsonl", {"tokens": [1, 2, 3], "answer_mask": [0, 1, 1], "task": "x"}, "")
    two = write(tmp_path / "b.jsonl", {"tokens": [5, 6], "answer_mask": [False, True]})
    found = data.read_rollouts([one, two], vocab_size=7)
    assert [(e.task, e.tokens.tolist(), e.answer.tolist()) for e in found] == [("x", [1, 2, 3], [False, True, True]), ("default", [5, 6], [False, True])]
    assert [e.where for e in found] == [f"{one}:1", f"{two}:1"]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not a rollout"),
        ("[1]", "not a rollout"),
        ({"tokens": [1, 2]}, "not a rollout.*answer_mask"),
        ({"tokens": ["a", 2], "answer_mask": [0, 1]}, "not a rollout"),
        ({"tokens": ["1", "2"], "answer_mask": [0, 1]}, "not a rollout .needs integer lists"),
        ({"tokens": [1.5, 2], "answer_mask": [0, 1]}, "not a rollout .needs integer lists"),
        ({"tokens": [1, 2], "answer_mask": [0, 0.9]}, "not a rollout .needs integer lists"),
        ({"tokens": [], "answer_mask": []}, "both at least once"),
        ({"tokens": [1, 2, 3], "answer_mask": [0, 1]}, r"'tokens' has shape \(3,\) and 'answer_mask' \(2,\)"),
        ({"tokens": [[1, 2]], "answer_mask": [[0, 1]]}, "flat lists"),
        ({"tokens": [1, 7], "answer_mask": [0, 1]}, r"an id outside 0\.\.6"),
        ({"tokens": [1, 2], "answer_mask": [0, 2]}, "must hold 0 and 1, both at least once"),
        ({"tokens": [1, 2], "answer_mask": [0, 0]}, "both at least once"),
        ({"tokens": [1, 2], "answer_mask": [1, 1]}, "both at least once"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", {"tokens": [1, 2], "answer_mask": [0, 1]}, line)
    with pytest.raises(data.DataError, match=f"a.jsonl:2: .*{message}"):
        data.read_rollouts([path], vocab_size=7)


def test_a_file_without_rollouts(tmp_path):
    with pytest.raises(data.DataError, match="empty.jsonl: no rollout in it"):
        data.read_rollouts([write(tmp_path / "empty.jsonl", "")], vocab_size=7)


def test_fingerprint_sees_tokens_masks_and_boundaries():
    base = [example([1, 2, 3], 1), example([4, 5], 1)]
    others = [
        [example([1, 2, 9], 1), example([4, 5], 1)],
        [example([1, 2, 3], 2), example([4, 5], 1)],
        [example([4, 5], 1), example([1, 2, 3], 1)],
        [example([1, 2, 3, 4], 1), example([5], 1)],
    ]
    assert data.fingerprint(base) == data.fingerprint([example([1, 2, 3], 1), example([4, 5], 1)])
    assert len({data.fingerprint(sequences) for sequences in (base, *others)}) == 5


def test_shared_prefix():
    assert data.shared_prefix([example([1, 2, 3, 4], 1), example([1, 2, 9], 1), example([1, 2, 3], 1)]) == 2
    assert data.shared_prefix([example([1, 2], 1), example([1, 2, 3], 1)]) == 2
    assert data.shared_prefix([example([1, 2], 1), example([3], 0)]) == 0
    assert data.shared_prefix([example([1, 2], 1)]) == 0


def test_draft_vocabulary_ranks_answers_then_prompts_then_low_ids():
    sequences = [example([9, 9, 9, 5, 5, 7], 3), example([8, 7], 1)]  # answers: 5 twice, 7 twice; prompts: 9 three times, 8 once
    assert data.draft_vocabulary(sequences, 2, 12).tolist() == [5, 7]
    assert data.draft_vocabulary(sequences, 3, 12).tolist() == [5, 7, 9]
    assert data.draft_vocabulary(sequences, 6, 12).tolist() == [0, 1, 5, 7, 8, 9]
    assert data.draft_vocabulary(sequences, 12, 12).tolist() == list(range(12))


def test_make_batch_by_hand():
    """Of a text of T tokens, rows 0..T-3 have a first draft target; a row's target x_{i+2} decides for rows="answer"."""
    sequences = [example([1, 2, 3, 4, 5, 6], 3), example(range(10, 25), 4)]
    config = TrainConfig(max_length=8, num_draft=2, rows_per_sequence=0)
    batch = data.make_batch(sequences, np.array([1, 0]), config, None)
    assert batch.tokens.shape == (2, data.LENGTH_BUCKET) and batch.lengths.tolist() == [8, 6] and batch.index.tolist() == [1, 0]
    assert batch.tokens[0, :9].tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 0]
    assert [rows[mask].tolist() for rows, mask in zip(batch.rows, batch.row_mask, strict=True)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert batch.answer[1].nonzero()[0].tolist() == [3, 4, 5] and batch.answer[0].nonzero()[0].tolist() == [4, 5, 6, 7]
    answers = data.make_batch(sequences, np.array([0]), TrainConfig(max_length=8, num_draft=2, rows="answer"), None)
    assert answers.rows[answers.row_mask].tolist() == [1, 2, 3]
    late = data.make_batch(sequences, np.array([0]), config, None, first_row=2)
    assert late.rows[late.row_mask].tolist() == [2, 3]


def test_rows_are_drawn_without_repetition_in_order():
    config = TrainConfig(max_length=64, num_draft=2, rows_per_sequence=5)
    sequences = [example(range(40), 3), example(range(6), 3)]
    batch = data.make_batch(sequences, np.array([0, 1]), config, np.random.default_rng(0))
    assert batch.rows.shape == (2, 5) and batch.row_mask.sum(axis=1).tolist() == [5, 4]
    assert (np.diff(batch.rows[0]) > 0).all() and batch.rows[0].max() <= 37
    other = data.make_batch(sequences, np.array([0, 1]), config, np.random.default_rng(1))
    assert not np.array_equal(batch.rows[0], other.rows[0])


def test_batches_are_a_function_of_the_step_and_cover_the_epoch():
    sequences, config = many(11), TrainConfig(batch_size=4, max_length=64, num_draft=2, rows_per_sequence=8, seed=3)
    first = [data.batch_at(sequences, config, step) for step in range(12)]
    again = [data.batch_at(sequences, config, step) for step in reversed(range(12))][::-1]
    for a, b in zip(first, again, strict=True):
        for name in ("tokens", "rows", "row_mask", "index"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    epochs = [np.concatenate([first[2 * e].index, first[2 * e + 1].index]).tolist() for e in range(6)]
    for seen in epochs:
        assert len(set(seen)) == 8  # two batches of 4 of 11, none twice
    assert len({tuple(seen) for seen in epochs}) > 3
    other = data.batch_at(sequences, TrainConfig(batch_size=4, max_length=64, num_draft=2, rows_per_sequence=8, seed=4), 0)
    assert other.index.tolist() != first[0].index.tolist() or not np.array_equal(other.rows, first[0].rows)


def test_every_sequence_has_its_turn():
    """11 sequences, batches of 4: three are left out of an epoch, and not the same three (the longest, say) of every epoch."""
    sequences, config = many(11), TrainConfig(batch_size=4, max_length=64, num_draft=2)
    seen = np.concatenate([data.batch_at(sequences, config, step).index for step in range(2 * 12)])
    assert set(seen.tolist()) == set(range(11))


def test_fewer_sequences_than_a_batch_are_refused():
    config = TrainConfig(batch_size=4, max_length=64, num_draft=2)
    data.check(many(4), config)
    for refuse in (data.check, data.Batches):
        with pytest.raises(data.DataError, match="^batch_size=4: must be at most the number of sequences to train on, 3$"):
            refuse(many(3), config)


@pytest.mark.parametrize(
    "bad, message",
    [
        (example([1, 2, 3], 3), "its answer mask is empty"),
        (example([1, 2, 3], 0), "its answer mask is all ones"),
        (example(range(60), 40), "max_length=40 cuts off all of its answer, which begins at token 40"),
    ],
)
def test_masks_that_cannot_be_learnt_from_are_named(bad, message):
    config = TrainConfig(batch_size=2, max_length=40, num_draft=2)
    sequences = [*many(5), bad]
    with pytest.raises(data.DataError, match=f"row 1, sequence 5: {message}"):
        data.make_batch(sequences, np.array([0, 5]), config, None)
    data.make_batch(sequences, np.array([0, 1]), config, None)
    with pytest.raises(data.DataError, match=f"^sequence 5: {message}"):
        data.Batches(sequences, config)
    with pytest.raises(data.DataError, match=f"^r.jsonl:7: {message}"):
        data.check([*many(5), dataclasses.replace(bad, where="r.jsonl:7")], config)


def test_within_leaves_out_answers_that_are_cut_off():
    sequences = [example(range(60), 40), example(range(60), 39), example(range(8), 7)]
    assert [len(kept.tokens) - kept.answer.sum() for kept in data.within(sequences, 40)] == [39, 7]
    assert len(data.Batches(data.within(sequences, 40), TrainConfig(max_length=40, batch_size=2))[0].index) == 2


def test_a_row_is_one_sequence_and_nothing_of_another():
    """No packing: tokens, answers and rows of a row are its own sequence's, cut at max_length, and behind it there is nothing."""
    sequences, config = many(23), TrainConfig(batch_size=4, max_length=64, num_draft=2, rows_per_sequence=0)
    batches = data.Batches(sequences, config)
    for step in range(10):
        batch = batches[step]
        for tokens, answer, length, rows, mask, index in zip(batch.tokens, batch.answer, batch.lengths, batch.rows, batch.row_mask, batch.index, strict=True):
            own = sequences[index]
            assert length == min(len(own.tokens), 64)
            assert np.array_equal(tokens[:length], own.tokens[:length]) and not tokens[length:].any()
            assert np.array_equal(answer[:length], own.answer[:length]) and not answer[length:].any()
            assert rows[mask].max() == length - 3


def test_batches_hold_sequences_of_like_length():
    """Sorting inside windows: of 64 lengths between 8 and 400, batches of 4 pad by little; any order would pad by about half."""
    rng = np.random.default_rng(0)
    sequences = [example(range(length), 4) for length in rng.integers(8, 400, 64)]
    batches = data.Batches(sequences, TrainConfig(batch_size=4, max_length=400, num_draft=2))
    padded = sum(batches[step].tokens.size for step in range(16))
    assert padded < 1.35 * sum(len(sequence.tokens) for sequence in sequences)
    assert all(batches[step].tokens.shape[1] % data.LENGTH_BUCKET == 0 for step in range(16))


def test_what_all_batches_share_is_worked_out_once(monkeypatch):
    calls = []
    monkeypatch.setattr(data, "shared_prefix", lambda sequences: calls.append("prefix") or 0)
    order = data._epoch_order
    monkeypatch.setattr(data, "_epoch_order", lambda *args: calls.append("epoch") or order(*args))
    batches = data.Batches(many(12), TrainConfig(batch_size=4, max_length=64, num_draft=2))
    for step in range(6):
        batches[step]
    assert calls == ["prefix", "epoch", "epoch"]
