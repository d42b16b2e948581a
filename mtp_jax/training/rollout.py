"""Answers to prompts and conversations: the text a head is trained on.

The backbone answers each conversation's last question itself, and an answer in the file is replaced. With answers="given" the
file's own assistant turns are kept, and nothing is decoded. Output is JSON lines, one a conversation, in the order they were finished:

    {"prompt_index": 17, "task": "rewrite", "tokens": [..], "answer_mask": [0, 0, .., 1, 1], "finish_reason": "stop"}

`answer_mask` is 1 exactly at the tokens the backbone generated, known from the decoder, or at those of the turns given, known from
token ids (conversations.py); it is never searched for in text. A run that is interrupted and started again skips the conversations
whose line is there. `OUT.settings.json` beside the file says with what settings it was made; other settings are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints import errors
from mtp_jax.checkpoints.hf import read_json
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.decoding import refill
from mtp_jax.prompts import Conversation
from mtp_jax.training import conversations as conversations_lib

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone

Answers = Literal["backbone", "given"]


class RolloutError(ValueError):
    """An output file does not belong to this run."""


@dataclass(frozen=True)
class RolloutReport:
    """Counts of conversations: done + failed + skipped == input."""

    input: int
    done: int  # answered, this time or before
    failed: int  # can't be used: too long for the backbone, refused by the chat template, without an answer where it is to be given
    skipped: int  # left out by max_prompt_tokens
    tokens: int  # answer tokens written by this call
    failures: tuple[str, ...] = ()  # of each that failed: file and line, and why


@dataclass(frozen=True)
class _Sequence:
    """A conversation that can be used: its question, or all of it with the mask of the answers given."""

    index: int
    tokens: list[int]
    mask: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the last answer."""
        return max(place for place, answer in enumerate(self.mask) if not answer) + 1


def rollout(
    backbone: LoadedBackbone,
    conversations: Sequence[Conversation],
    out: str | Path,
    config: config_lib.DecodeConfig,
    *,
    answers: Answers = "backbone",
    batch_size: int = 16,
    max_prompt_tokens: int = 512,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RolloutReport:
    """Answer every conversation and append its line to `out` as soon as it is done.

    Args:
      conversations: from prompts.read_conversations.
      out: the JSON-lines file; continued when it is there.
      config: budget, sampling and stop tokens (empty means the tokenizer's); num_draft is ignored, and with answers="given" all of it.
      answers: "backbone" writes the last answer of each conversation anew; "given" takes every assistant's turn as it is.
      batch_size: prompts decoded together.
      max_prompt_tokens: conversations with more before their last answer are skipped and counted.
      progress: called with (finished, total).

    Raises:
      ConfigError: an unknown `answers`.
      RolloutError: `out` was made with other settings, or by something else.
    """
    if answers not in get_args(Answers):
        raise config_lib.ConfigError(f"answers={answers!r}: must be one of {', '.join(get_args(Answers))}")
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    config = generate_lib.with_stop_tokens(config, backbone)
    _check_same_run(out, backbone, conversations, config, answers, max_prompt_tokens)
    lines = files.whole_lines(out)
    files.write_text(out, "".join(line + "\n" for line in lines))  # drops a line that a crash cut off
    finished = {json.loads(line)["prompt_index"] for line in lines}

    waiting: list[_Sequence] = []
    failures, skipped = [], 0
    for index, conversation in enumerate(conversations):
        if index in finished:
            continue
        try:
            sequence = _encode(backbone, index, conversation, config, answers)
        except (generate_lib.PromptError, conversations_lib.ConversationError, errors.CheckpointError) as error:
            failures.append(f"{conversation.where or f'conversation {index}'}: {error}")
            continue
        if sequence.prompt_tokens > max_prompt_tokens:
            skipped += 1
        else:
            waiting.append(sequence)

    done, total, tokens = len(finished), len(finished) + len(waiting), 0
    with open(out, "a", encoding="utf-8") as file:
        for sequence, reason in _given(waiting) if answers == "given" else _answered(backbone, waiting, config, batch_size):
            file.write(_line(sequence, conversations[sequence.index].task, reason) + "\n")
            file.flush()
            done, tokens = done + 1, tokens + sum(sequence.mask)
            progress(done, total)
    return RolloutReport(len(conversations), done, len(failures), skipped, tokens, tuple(failures))


def _encode(backbone: LoadedBackbone, index: int, conversation: Conversation, config: config_lib.DecodeConfig, answers: Answers) -> _Sequence:
    if answers == "given":
        sequence = _Sequence(index, *conversations_lib.encode_answers(backbone.tokenizer, conversation.messages))
        generate_lib.check_prompts([sequence.tokens], backbone.config, 0)
        return sequence
    question = conversations_lib.encode_question(backbone.tokenizer, conversation.question)
    generate_lib.check_prompts([question], backbone.config, config.max_new_tokens)
    return _Sequence(index, question, [0] * len(question))


def _given(waiting: list[_Sequence]) -> Iterator[tuple[_Sequence, str]]:
    """Each as it is, and why it ends."""
    for sequence in waiting:
        yield sequence, "given"


def _answered(backbone: LoadedBackbone, waiting: list[_Sequence], config: config_lib.DecodeConfig, batch_size: int) -> Iterator[tuple[_Sequence, str]]:
    """Each with the backbone's answer behind its question, and why that ends."""
    runtime = generate_lib.make_runtime(backbone, column_blocks=None if batch_size == 1 else False)
    questions, numbers = [sequence.tokens for sequence in waiting], [sequence.index for sequence in waiting]
    for place, output in refill.answers(runtime, questions, config, batch_size=batch_size, row_numbers=numbers):
        asked = waiting[place]
        yield _Sequence(asked.index, asked.tokens + output.tokens, asked.mask + [1] * len(output.tokens)), output.finish_reason


def _line(sequence: _Sequence, task: str, finish_reason: str) -> str:
    record = {
        "prompt_index": sequence.index,
        "task": task,
        "tokens": sequence.tokens,
        "answer_mask": sequence.mask,
        "finish_reason": finish_reason,
    }
    return json.dumps(record, separators=(",", ":"))


def _check_same_run(
    out: Path, backbone: LoadedBackbone, conversations: Sequence[Conversation], config: config_lib.DecodeConfig, answers: Answers, max_prompt_tokens: int
) -> None:
    """Write the settings beside a new file; refuse an old file made with others."""
    settings: dict[str, Any] = {
        "backbone": backbone.fingerprint,
        "prompts": prompts_lib.digest_conversations(conversations),
        "answers": answers,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "seed": config.seed,
        "max_prompt_tokens": max_prompt_tokens,
    }
    path = out.with_name(out.name + ".settings.json")
    if out.exists():
        if not path.exists():
            raise RolloutError(f"{out}: exists without {path.name}, so it was not made by this command; choose another --out")
        before = {"min_p": 0.0, "answers": "backbone"} | read_json(path)  # older files don't name them, and were made so
        for name, value in settings.items():
            if before.get(name) != value:
                raise RolloutError(f"{out}: was made with {name}={before.get(name)!r}, this run has {value!r}; choose another --out")
    files.write_json(path, settings)
