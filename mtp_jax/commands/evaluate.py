"""`mtp-jax evaluate`: acceptance, identical output and speed, per task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from mtp_jax import prompts as prompts_lib
from mtp_jax.commands import shared


@dataclass(frozen=True, kw_only=True)
class Evaluate(shared.SampledDraftFlags):
    """Measure a head: tokens per step, acceptance per position, identical outputs, and tokens/s against the backbone alone.

    Each prompt is decoded with and without the head in this process; compilation is not timed."""

    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]
    """JSON-lines files of prompts: one object a line, with a text "prompt" and perhaps a "task" to count it under."""
    limit: Annotated[int | None, shared.Unset] = None
    """Take only so many prompts of each file. Default: all."""
    max_new_tokens: int = 96
    """Longest answer, in tokens."""
    batch_size: int = 1
    """Prompts of one task decoded together."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the JSON document to this file. A run that is stopped and started again goes on where it was."""

    def run(self) -> dict[str, Any]:
        """Returns the JSON document of `evaluation.acceptance.evaluate`."""
        shared.check_positive(batch_size=self.batch_size, limit=1 if self.limit is None else self.limit)
        if not self.prompts:
            raise shared.UsageError("--prompts: give at least one file")
        config = self.draft_config(max_new_tokens=self.max_new_tokens)
        prompts = prompts_lib.read(self.prompts, limit=self.limit)
        backbone, head = shared.load_both(self.backbone, self.head, self.drafter)
        from mtp_jax.evaluation import acceptance

        shared.say(f"evaluating {len(prompts)} prompts, with and without the head; each new prompt length compiles first")
        measure = partial(acceptance.evaluate, backbone, head, prompts, config, drafter=self.drafter, batch_size=self.batch_size)
        result = shared.journaled("evaluate", self.out, measure)
        show(result)
        return result


def show(result: dict[str, Any]) -> None:
    """Print the table, and what does not fit in it."""
    from rich.table import Table

    table = Table("task", box=None)
    for name in ("prompts", "tokens/step", "identical", "vanilla tokens/s", "tokens/s", "speedup"):
        table.add_column(name, justify="right")
    overall = result["overall"]
    for name, numbers in [*result["tasks"].items(), ("overall", overall)]:
        table.add_row(
            name,
            str(numbers["prompts"]),
            f"{numbers['tokens_per_step']:.2f}",
            f"{numbers['identical']}/{numbers['prompts']}",
            f"{numbers['vanilla_tokens_per_second']:.1f}",
            f"{numbers['tokens_per_second']:.1f}",
            f"{numbers['speedup']:.2f}x",
            style="bold" if name == "overall" else None,
        )
    shared.console.print(table)
    for name, meaning in (("accept_unconditional", "of all steps"), ("accept_conditional", "given the draft before was kept")):
        shared.say(f"drafts kept, {meaning}: {' '.join(f'{rate:.2f}' for rate in overall[name])}")
    size = result["drafter_bytes"]
    shared.say(f"the head adds {size['parameters']:,} bytes of parameters and {size['state']:,} bytes of state")
    for item in result.get("differences", []):
        shared.say(f"prompt {item['prompt']}: differs from vanilla at generated token {item['position']}")
