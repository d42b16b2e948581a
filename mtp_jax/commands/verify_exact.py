"""`mtp-jax verify-exact`: whether decoding with the head writes what the backbone writes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from mtp_jax import prompts as prompts_lib
from mtp_jax.commands import shared

NAMES = {"fixed_width": "alone, as wide as a verify pass", "one_token": "alone, one token a pass"}


@dataclass(frozen=True, kw_only=True)
class VerifyExact(shared.DraftFlags, shared.SamplingFlags):
    """Check on your model and device that decoding with the head writes exactly what the backbone writes alone.

    Each prompt is decoded with the head, without it in passes as wide as a verify pass, and without it one token a pass. Against the first
    reference every bit of the logits must be the same, or the exit code is 1. The second may differ where two tokens are all but equally
    probable, since its matrix products have another shape: that is a warning, with the distance of the two best logits."""

    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """JSON-lines files of prompts: one object a line, with a text "prompt". Default: the six of `mtp-jax demo`."""
    limit: Annotated[int | None, shared.Unset] = None
    """Take only so many prompts of each file. Default: all."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    num_draft: int = 4
    """Tokens the head drafts per step."""
    batch_size: int = 1
    """Prompts decoded together, of like length."""
    tokens_only: shared.Switch = False
    """Compare tokens, not logits: for long runs, and where twice 4 bytes x vocabulary x (prompt + answer) x batch size are too many."""
    strict: shared.Switch = False
    """Exit with 1 also when tokens differ from those of one token a pass."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the JSON document to this file. A run that is stopped and started again goes on where it was."""

    def run(self) -> dict[str, Any]:
        """Returns the JSON document of `evaluation.exactness.verify_exact`."""
        shared.check_positive(batch_size=self.batch_size, limit=1 if self.limit is None else self.limit)
        config = self.decode_config(max_new_tokens=self.max_new_tokens, num_draft=self.num_draft)
        if self.prompts:
            prompts = prompts_lib.read(self.prompts, limit=self.limit)
        else:
            from mtp_jax import demo

            prompts = [prompts_lib.Prompt(kind, text) for kind, text in demo.PROMPTS[: self.limit]]
        backbone, head = shared.load_both(self.backbone, self.head, self.drafter)
        if head is None and self.drafter == "mtp":
            raise shared.UsageError("--head none: leaves nothing to check; name a head, or pass --drafter prompt_lookup")
        from mtp_jax.evaluation import exactness

        shared.say(f"decoding {len(prompts)} prompts three ways; each new prompt length compiles first")
        measure = partial(exactness.verify_exact, backbone, head, prompts, config, drafter=self.drafter, batch_size=self.batch_size)
        result = shared.journaled("verify-exact", self.out, partial(measure, tokens_only=self.tokens_only))
        show(result)
        return result

    def status(self, document: dict[str, Any]) -> int:
        passed = document["exact"] and (not self.strict or document["against"]["one_token"]["identical"] == document["prompts"])
        return 0 if passed else 1


def show(result: dict[str, Any]) -> None:
    """Print the table, where anything differs, and the verdict."""
    from rich.table import Table

    table = Table("the backbone", box=None)
    for name in ("prompts identical", "tokens identical", "logits identical in every bit", "largest difference"):
        table.add_column(name, justify="right")
    for name, numbers in result["against"].items():
        compared, measured = numbers["tokens_compared"], numbers["other_bits"] is not None
        table.add_row(
            NAMES[name],
            f"{numbers['identical']}/{result['prompts']}",
            f"{numbers['tokens_identical']}/{compared}",
            f"{compared - numbers['other_bits']}/{compared}" if measured else "not measured",
            f"{numbers['largest_logit_difference']:.3g}" if measured else "not measured",
        )
    shared.console.print(table)
    shared.say(f"{result['tokens']} tokens written with the head, {result['tokens_per_step']:.2f} per step")
    strict, loose = result["against"]["fixed_width"], result["against"]["one_token"]
    for place in strict["first_other_bits"] or []:
        shared.say(f"prompt {place['prompt']}: logits differ from generated token {place['position']} on")
    _show_differences("fixed_width", strict)
    _show_differences("one_token", loose)
    if loose["differences"] and result["exact"]:
        shared.say(
            f"warning: {result['prompts'] - loose['identical']} of {result['prompts']} prompts differ from one token a pass, "
            f"where its two best logits are at most {_number(loose['largest_gap'])} apart"
        )
    measured = "tokens" if strict["other_bits"] is None else "tokens and logits, in every bit"
    shared.say(f"exact: the same {measured}" if result["exact"] else "NOT EXACT: the head changes what the backbone writes")


def _show_differences(name: str, numbers: dict[str, Any]) -> None:
    for place in numbers["differences"]:
        one, other = ("no token" if place[side] is None else f"token {place[side]}" for side in ("reference_token", "drafted_token"))
        shared.say(
            f"prompt {place['prompt']}, generated token {place['position']}: {one} {NAMES[name]}, {other} with the head; "
            f"the two best logits are {_number(place['gap'])} apart"
        )


def _number(gap: float | None) -> str:
    return "an unknown distance" if gap is None else f"{gap:.3g}"
