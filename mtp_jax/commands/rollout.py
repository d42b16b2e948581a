"""`mtp-jax rollout`: the backbone's own answers, which a head is trained on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mtp_jax import prompts as prompts_lib
from mtp_jax.commands import shared

FAILURES_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Rollout(shared.BackboneFlags, shared.SamplingFlags):
    """Let the backbone answer prompts, and store tokens and answers as training data for `mtp-jax train`.

    Interrupted? The same command again goes on where it stopped."""

    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]
    """JSON-lines files, one object a line: a text "prompt" (perhaps with an "answer"), or "messages", a list of objects with "role" and "content".
    Each may have a "task"."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """JSON-lines file to write, or to continue."""
    answers: Literal["backbone", "given"] = "backbone"
    """backbone: the backbone writes the last answer of each conversation, whatever the file has there. given: take all answers of the file as they
    are, without decoding; a head learns best from the backbone's own."""
    max_new_tokens: int = 96
    """Longest answer, in tokens."""
    batch_size: int = 16
    """Prompts answered together."""
    limit: Annotated[int | None, shared.Unset] = None
    """Take only so many prompts of each file. Default: all."""
    max_prompt_tokens: int = 512
    """Skip (and count) prompts longer than this, earlier turns included."""

    def status(self, document: dict[str, Any]) -> int:
        return 0 if document["done"] else 1  # a file without any answer is of no use

    def run(self) -> dict[str, Any]:
        """Returns the counts and the file's path."""
        shared.check_positive(batch_size=self.batch_size, max_prompt_tokens=self.max_prompt_tokens, limit=1 if self.limit is None else self.limit)
        if not self.prompts:
            raise shared.UsageError("--prompts: give at least one file")
        config = self.decode_config(max_new_tokens=self.max_new_tokens, num_draft=0)
        conversations = prompts_lib.read_conversations(self.prompts, limit=self.limit)
        backbone = shared.load_backbone(self.backbone)
        from mtp_jax.training import rollout as rollout_lib

        if self.answers == "backbone":
            shared.say(f"answering {len(conversations)} prompts; the first of each length compile first")
        with shared.progress("rollout") as report:
            counts = rollout_lib.rollout(
                backbone,
                conversations,
                self.out,
                config,
                answers=self.answers,
                batch_size=self.batch_size,
                max_prompt_tokens=self.max_prompt_tokens,
                progress=lambda done, total: report(done, total, ""),
            )
        for failure in counts.failures[:FAILURES_SHOWN]:
            shared.say(f"failed: {failure}")
        if counts.failed > FAILURES_SHOWN:
            shared.say(f"failed: {counts.failed - FAILURES_SHOWN} more")
        shared.say(
            f"{self.out}: {counts.done} answered, {counts.skipped} skipped (over --max-prompt-tokens), {counts.failed} failed, "
            f"of {counts.input}; {counts.tokens} new tokens"
        )
        document = dataclasses.asdict(counts) | {"out": str(self.out)}
        del document["failures"]
        return document
