"""Text while it is being written: the compiled loop runs a few steps, the host hands on what has become certain, and so on.

A piece of text is certain when no later token can change it or take it away. Held back are the end of a text in the middle
of a character, and the longest end that a stop string begins with:

    stop string "\\nUser:", text so far "Yes.\\nUs" -> "Yes." goes out; then "ed" -> "\\nUsed", or "er:" -> the row has ended

The pieces of a row, put together, are the text that `generate` gives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate, loop

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead
    from mtp_jax.checkpoints.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What a row has gained: at least one token."""

    row: int
    text: str  # may be empty: a control token, part of a character, perhaps the beginning of a stop string
    tokens: list[int]
    finish_reason: str | None  # "stop" or "length" with the row's last piece, else None


def stream(
    runtime: generate.Runtime,
    backbone: LoadedBackbone,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: config_lib.DecodeConfig | None = None,
    *,
    every: int = 8,
    warm_up: bool = False,
    **options: Any,
) -> Stream:
    """Iterator over what `generate.run_text` would write; the first piece of each row comes with its first token.

    Args:
      runtime: of this backbone, with or without a drafter.
      backbone: for its tokenizer.
      prompts: user messages or token ids.
      config: as in `generate`.
      every: steps on the device between two looks at the text.
      warm_up: compile before the time is taken.
      **options: row_numbers, budgets, seeds and before, as in `generate.run`.

    Raises:
      PromptError, ConfigError, StateError: now, not at the first piece; see `generate.run`.
    """
    if every < 1:
        raise config_lib.ConfigError(f"every={every}: must be at least 1")
    config = generate.with_stop_tokens(config or config_lib.DecodeConfig(), backbone)
    ids = [generate.encode_prompt(backbone, prompt) for prompt in prompts]
    job = generate.make_job(runtime, ids, config, tokenizer=backbone.tokenizer, **options)
    before = options.get("before")
    if warm_up:
        job.warm_up(before)
    return Stream(job, backbone, config.stop_strings, every, before)


def generate_stream(
    backbone: LoadedBackbone,
    head: LoadedHead | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: config_lib.DecodeConfig | None = None,
    *,
    drafter: config_lib.DrafterName = "mtp",
    **options: Any,
) -> Stream:
    """`generate`, piece by piece; options as in `stream`."""
    return stream(generate.make_runtime(backbone, head, drafter=drafter), backbone, prompts, config, **options)


class Stream:
    """Iterator of `Delta`. One that is left before its end has decoded no further than its last piece says."""

    def __init__(self, job: generate.Job, backbone: LoadedBackbone, stop_strings: tuple[str, ...], every: int, before: loop.DecodeState | None) -> None:
        self.state = before  # newest state of the rows; a later call goes on from it (`before`), and uses it up
        self._job, self._backbone, self._stop_strings = job, backbone, stop_strings
        self._prefill_seconds = self._decode_seconds = 0.0
        self._deltas = self._run(every)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def result(self) -> generate.DecodeResult:
        """What `generate` returns, of the rows as they are now, with the state. Seconds are the device's alone.

        Raises:
          StateError: nothing has been decoded yet, or the state has been used up.
        """
        if self.state is None:
            raise generate.StateError("nothing has been decoded yet: the stream's first piece has not been asked for")
        generate.tokens_in(self.state)
        result = generate.DecodeResult(
            outputs=self._job.outputs(self.state),
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            drafter_bytes=self._job.runtime.drafter_bytes(self.state.drafter_state),
            state=self.state,
        )
        return generate.with_text(result, self._backbone, self._stop_strings)

    def _run(self, every: int) -> Iterator[Delta]:
        rows = [Row(number, self._backbone.tokenizer, self._stop_strings) for number in range(len(self._job.prompts))]
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self._job.prefill(self.state))
        self._prefill_seconds = time.perf_counter() - begin
        while True:
            state = self.state
            tokens, ends, done, stopped = (np.asarray(values) for values in (state.tokens, state.cache.lengths + 1, state.done, state.stopped))
            for row, start in zip(rows, self._job.starts, strict=True):
                new = tokens[row.number, start + len(row.tokens) : ends[row.number]].tolist()
                if new:
                    yield row.take(new, ("stop" if stopped[row.number] else "length") if done[row.number] else None)
            if done.all():
                return
            begin = time.perf_counter()
            self.state = jax.block_until_ready(self._job.decode(state, at_most=every))
            self._decode_seconds += time.perf_counter() - begin


@dataclass
class Row:
    """A row's tokens, and how much of their text has gone out."""

    number: int
    tokenizer: Tokenizer
    stop_strings: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    sent: int = 0  # characters

    def take(self, tokens: list[int], finish_reason: str | None) -> Delta:
        """Add tokens; the text that they make certain."""
        self.tokens += tokens
        if finish_reason is None:
            text = self.tokenizer.settled_text(self.tokens)
            text = text[: len(text) - possible_beginning(text, self.stop_strings)]
        else:
            text = generate.text_of(self.tokenizer, self.tokens, finish_reason, self.stop_strings)
        piece = text[self.sent :]
        self.sent += len(piece)
        return Delta(self.number, piece, tokens, finish_reason)


def possible_beginning(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that more text may make a stop string."""
    longest = max((len(string) for string in stop_strings), default=1) - 1
    tails = (text[len(text) - length :] for length in range(min(longest, len(text)), 0, -1))
    return next((len(tail) for tail in tails if any(string.startswith(tail) for string in stop_strings)), 0)
