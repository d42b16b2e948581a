"""`mtp-jax rollout`: the backbone's own answers, which a head is trained on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from mtp_jax import prompts as prompts_lib
from mtp_jax.commands import shared


@dataclass(frozen=True, kw_only=True)
class Rollout(shared.BackboneFlags, shared.SamplingFlags):
    """Let the backbone answer prompts, and store tokens and answers as training data for `mtp-jax train`.

    Interrupted? The same command again goes on where it stopped."""

    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]
    """JSON-lines files of prompts: one object a line, with a text "prompt" and perhaps a "task"."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """JSON-lines file to write, or to continue."""
    max_new_tokens: int = 96
    """Longest answer, in tokens."""
    batch_size: int = 16
    """Prompts answered together."""
    limit: Annotated[int | None, shared.Unset] = None
    """Take only so many prompts of each file. Default: all."""
    max_prompt_tokens: int = 512
    """Skip (and count) prompts longer than this."""

    def run(self) -> dict[str, Any]:
        """Returns the counts and the file's path."""
        shared.check_positive(batch_size=self.batch_size, max_prompt_tokens=self.max_prompt_tokens, limit=1 if self.limit is None else self.limit)
        if not self.prompts:
            raise shared.UsageError("--prompts: give at least one file")
        config = self.decode_config(max_new_tokens=self.max_new_tokens, num_draft=0)
        prompts = prompts_lib.read(self.prompts, limit=self.limit)
        backbone = shared.load_backbone(self.backbone)
        from mtp_jax.training import rollout as rollout_lib

        shared.say(f"answering {len(prompts)} prompts; the first batch of each length compiles first")
        with shared.progress("rollout") as report:
            counts = rollout_lib.rollout(
                backbone,
                prompts,
                self.out,
                config,
                batch_size=self.batch_size,
                max_prompt_tokens=self.max_prompt_tokens,
                progress=lambda done, total: report(done, total, ""),
            )
        shared.say(
            f"{self.out}: {counts.done} answered, {counts.skipped} skipped (over --max-prompt-tokens), {counts.failed} failed (too long for the backbone), "
            f"of {counts.input}; {counts.tokens} new tokens"
        )
        return dataclasses.asdict(counts) | {"out": str(self.out)}
