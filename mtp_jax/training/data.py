"""Training sequences and the batches made of them.

A sequence is one conversation: token ids, and an exact mask of the answers' tokens, mostly the backbone's own. Batches
are a pure function of (sequences, TrainConfig, step), so a resumed run sees exactly what the unbroken one would have;
`pipeline` makes them ahead of time.

Rows. Training row i of a sequence is the state of a decoder whose slots 0..i are valid and whose pending token is
x_{i+1}; draft step k predicts x_{i+1+k}. A batch lists the rows that carry loss explicitly, so that padding, and the
prefix that all sequences share (a system message), cost nothing in the head.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from mtp_jax import config as config_lib

LENGTH_BUCKET = 64
HostArray = Array | np.ndarray  # made by numpy, an Array inside jit


class DataError(ValueError):
    """A line of a file, or a sequence, breaks a rule."""


@dataclass(frozen=True)
class Example:
    """One training sequence: a prompt and its answer, or several turns."""

    task: str
    tokens: np.ndarray  # int32 [T]: prompt, then answer
    answer: np.ndarray  # bool [T]: True at the tokens of answers, their stop tokens included
    where: str = ""  # file and line it was read from


class Batch(struct.PyTreeNode):
    """One batch. `index` names the sequences, for features computed before."""

    tokens: Int[HostArray, "B T"]  # padded with 0 on the right
    lengths: Int[HostArray, " B"]
    answer: Bool[HostArray, "B T"]
    rows: Int[HostArray, "B R"]  # rows that carry loss, in ascending order
    row_mask: Bool[HostArray, "B R"]  # False at padding of `rows`
    index: Int[HostArray, " B"]


def read_rollouts(paths: Sequence[str | Path], *, vocab_size: int) -> list[Example]:
    """Read rollout files (JSON lines with `tokens` and `answer_mask`).

    Raises:
      DataError: naming file and line, for anything that is not such a line, and for a mask that is empty or all ones.
    """
    sequences = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    sequences.append(_parse_rollout(line, f"{path}:{number}", vocab_size))
    if not sequences:
        raise DataError(f"{', '.join(map(str, paths))}: no rollout in it")
    return sequences


def _parse_rollout(line: str, where: str, vocab_size: int) -> Example:
    try:
        record = json.loads(line)
        tokens, answer = (_integers(record[name]) for name in ("tokens", "answer_mask"))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where}: not a rollout (needs integer lists 'tokens' and 'answer_mask'): {error}") from None
    if tokens.ndim != 1 or tokens.shape != answer.shape:
        raise DataError(f"{where}: 'tokens' has shape {tokens.shape} and 'answer_mask' {answer.shape}: they must be flat lists of one length")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise DataError(f"{where}: 'tokens' holds an id outside 0..{vocab_size - 1}")
    if not np.isin(answer, (0, 1)).all() or not answer.any() or answer.all():
        raise DataError(f"{where}: 'answer_mask' must hold 0 and 1, both at least once")
    return Example(task=str(record.get("task", "default")), tokens=tokens.astype(np.int32), answer=answer.astype(bool), where=where)


def _integers(values: list[int]) -> np.ndarray:
    found = np.asarray(values)
    if found.size and found.dtype.kind not in "biu":
        raise TypeError(f"they hold {found.dtype}")
    return found.astype(np.int64)


def fingerprint(sequences: Sequence[Example]) -> str:
    """Hash of all tokens and masks, in order: ties features and checkpoints to their data."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(np.int64(len(sequence.tokens)).tobytes() + sequence.tokens.tobytes() + sequence.answer.tobytes())
    return digest.hexdigest()[:16]


def shared_prefix(sequences: Sequence[Example]) -> int:
    """Number of leading tokens that all sequences have in common; 0 for fewer than two sequences."""
    if len(sequences) < 2:
        return 0
    first = sequences[0].tokens
    length = min(len(sequence.tokens) for sequence in sequences)
    for sequence in sequences[1:]:
        differs = np.flatnonzero(first[:length] != sequence.tokens[:length])
        length = int(differs[0]) if len(differs) else length
    return length


def draft_vocabulary(sequences: Sequence[Example], size: int, vocab_size: int) -> np.ndarray:
    """The `size` token ids most frequent in answers, then in prompts, then the lowest ids; ascending, int32 [C]."""
    answers, everything = np.zeros(vocab_size), np.zeros(vocab_size)
    for sequence in sequences:
        np.add.at(answers, sequence.tokens[sequence.answer], 1)
        np.add.at(everything, sequence.tokens, 1)
    order = np.lexsort((np.arange(vocab_size), -everything, -answers))
    return np.sort(order[:size]).astype(np.int32)


class Batches:
    """The batches of a run, by number of the optimizer step (from 0); each is a function of examples, config and step alone.

    An epoch is every example in an order of its own, sorted by length inside windows of 32 batches to save padding; what is left
    of a last batch has its turn in other epochs. A row of a batch is one example: none are packed together.

    Raises:
      DataError: as `check`.
    """

    def __init__(self, sequences: Sequence[Example], config: config_lib.TrainConfig) -> None:
        check(sequences, config)
        self._sequences, self._config = sequences, config
        self._lengths = np.array([len(sequence.tokens) for sequence in sequences])
        self._first_row = max(shared_prefix(sequences) - 2, 0)
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])  # the newest: its number, and its batches' indices

    def __len__(self) -> int:
        return self._config.steps

    def __getitem__(self, step: int) -> Batch:
        config = self._config
        epoch, place = divmod(step, len(self._sequences) // config.batch_size)
        number, order = self._epoch
        if number != epoch:
            order = _epoch_order(self._lengths, config.batch_size, np.random.default_rng((config.seed, epoch)))
            self._epoch = epoch, order
        return make_batch(self._sequences, order[place], config, np.random.default_rng((config.seed, 1, step)), first_row=self._first_row)


def check(sequences: Sequence[Example], config: config_lib.TrainConfig) -> None:
    """Whether batches can be made of these.

    Raises:
      DataError: fewer sequences than a batch has; or naming the one whose mask is empty or all ones, or whose answer max_length cuts off whole.
    """
    if len(sequences) < config.batch_size:
        raise DataError(f"batch_size={config.batch_size}: must be at most the number of sequences to train on, {len(sequences)}")
    for index, sequence in enumerate(sequences):
        _check_mask(sequence, config.max_length, sequence.where or f"sequence {index}")


def batch_at(sequences: Sequence[Example], config: config_lib.TrainConfig, step: int) -> Batch:
    """The batch of optimizer step `step` (from 0). For many of them, make a `Batches` once."""
    return Batches(sequences, config)[step]


def _epoch_order(lengths: np.ndarray, batch_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Index arrays of one epoch's batches: shuffled, then sorted by length inside windows."""
    count = len(lengths) // batch_size
    order = rng.permutation(len(lengths))[: count * batch_size]  # left out before sorting, or it would be the longest each time
    window = 32 * batch_size
    order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in np.split(order, range(window, len(order), window))])
    batches = [order[i * batch_size : (i + 1) * batch_size] for i in range(count)]
    return [batches[i] for i in rng.permutation(count)]


def within(sequences: Sequence[Example], max_length: int) -> list[Example]:
    """Those of which max_length leaves some of the answer."""
    return [sequence for sequence in sequences if sequence.answer[:max_length].any()]


def make_batch(
    sequences: Sequence[Example], chosen: np.ndarray, config: config_lib.TrainConfig, rng: np.random.Generator | None, *, first_row: int = 0
) -> Batch:
    """Pad the chosen sequences to one bucket and pick their rows.

    Args:
      chosen: indices into `sequences`.
      rng: picks `rows_per_sequence` rows at random; None takes every row.
      first_row: rows before it are left out.

    Raises:
      DataError: naming the row, where a mask is empty or all ones, or max_length cuts off all of an answer.
    """
    for place, index in enumerate(chosen):
        _check_mask(sequences[index], config.max_length, f"row {place}, sequence {index}")
    cut = [sequences[i].tokens[: config.max_length] for i in chosen]
    width = -(-max(len(tokens) for tokens in cut) // LENGTH_BUCKET) * LENGTH_BUCKET
    tokens, answer = np.zeros((len(chosen), width), np.int32), np.zeros((len(chosen), width), bool)
    row_lists = []
    for place, (index, text) in enumerate(zip(chosen, cut, strict=True)):
        tokens[place, : len(text)] = text
        answer[place, : len(text)] = sequences[index].answer[: len(text)]
        row_lists.append(_rows(answer[place, : len(text)], config, rng, first_row))
    count = config.rows_per_sequence if rng is not None and config.rows_per_sequence else width
    rows, mask = np.zeros((len(chosen), count), np.int32), np.zeros((len(chosen), count), bool)
    for place, picked in enumerate(row_lists):
        rows[place, : len(picked)] = picked
        mask[place, : len(picked)] = True
    return Batch(
        tokens=tokens, lengths=np.array([len(text) for text in cut], np.int32), answer=answer, rows=rows, row_mask=mask, index=np.asarray(chosen, np.int32)
    )


def _check_mask(sequence: Example, max_length: int, where: str) -> None:
    if not sequence.answer.any():
        raise DataError(f"{where}: its answer mask is empty: must hold at least one token")
    if sequence.answer.all():
        raise DataError(f"{where}: its answer mask is all ones: must leave at least one token of a prompt")
    if not sequence.answer[:max_length].any():
        begin = int(np.flatnonzero(sequence.answer)[0])
        raise DataError(f"{where}: max_length={max_length} cuts off all of its answer, which begins at token {begin}; raise max_length, or leave it out")


def _rows(answer: np.ndarray, config: config_lib.TrainConfig, rng: np.random.Generator | None, first_row: int) -> np.ndarray:
    """Rows i whose first draft target x_{i+2} exists (and is an answer token, for rows="answer")."""
    rows = np.arange(min(first_row, max(len(answer) - 3, 0)), len(answer) - 2)
    if config.rows == "answer":
        rows = rows[answer[rows + 2]]
    if rng is not None and config.rows_per_sequence and len(rows) > config.rows_per_sequence:
        rows = np.sort(rng.choice(rows, config.rows_per_sequence, replace=False))
    return rows
