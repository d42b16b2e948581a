"""`mtp-jax generate`: answers to prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mtp_jax import prompts as prompts_lib
from mtp_jax.commands import shared

if TYPE_CHECKING:
    from mtp_jax import config as config_lib
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead
    from mtp_jax.decoding.generate import DecodeResult, Output


@dataclass(frozen=True, kw_only=True)
class Generate(shared.SampledDraftFlags):
    """Answer prompts. The text is what the backbone writes alone; the head only makes it come sooner.

    Several prompts are decoded together in one batch. The answers go to stdout, everything else to stderr."""

    text: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT ...")] = ()
    """One or more prompts, each a user message; quote them."""
    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Read prompts from JSON-lines files instead: one object a line, with a text "prompt"."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="STRING ...")] = ()
    """End an answer just before the first of these strings."""

    def run(self) -> dict[str, Any]:
        """Returns the JSON document; prints the texts unless --json."""
        texts = self._texts()
        config = self.draft_config(max_new_tokens=self.max_new_tokens, stop_strings=self.stop)
        backbone, head = shared.load_both(self.backbone, self.head, self.drafter)
        shared.say("compiling, then decoding ...")
        if len(texts) == 1 and not self.json and sys.stdout.isatty():
            result = self._print_as_it_comes(backbone, head, texts, config)
        else:
            result = self._print_at_the_end(backbone, head, texts, config)
        shared.say(f"{_statistics(result.outputs[0]) + ', ' if len(texts) == 1 else ''}{result.tokens_per_second:.1f} tokens/s")
        return document(result)

    def _print_as_it_comes(self, backbone: LoadedBackbone, head: LoadedHead | None, texts: list[str], config: config_lib.DecodeConfig) -> DecodeResult:
        from mtp_jax.decoding import stream

        pieces = stream.generate_stream(backbone, head, texts, config, drafter=self.drafter, warm_up=True)
        for delta in pieces:
            print(delta.text, end="", flush=True)
        print(flush=True)
        return pieces.result()

    def _print_at_the_end(self, backbone: LoadedBackbone, head: LoadedHead | None, texts: list[str], config: config_lib.DecodeConfig) -> DecodeResult:
        from mtp_jax.decoding import generate as generate_lib

        result = generate_lib.generate(backbone, head, texts, config, drafter=self.drafter, warm_up=True)
        for number, output in enumerate(result.outputs):
            if len(texts) > 1:
                shared.say(f"[{number + 1}/{len(texts)}] {_statistics(output)}")
            if not self.json:
                print(output.text, flush=True)
        return result

    def _texts(self) -> list[str]:
        if bool(self.text) == bool(self.prompts):
            raise shared.UsageError("give either prompts on the command line or --prompts FILE")
        for number, text in enumerate(self.text, 1):
            if not text.strip():
                raise shared.UsageError(f"prompt {number} is empty: it needs at least one character that is not whitespace")
        return list(self.text) or [prompt.text for prompt in prompts_lib.read(self.prompts)]


def document(result: DecodeResult) -> dict[str, Any]:
    """One prompt: its record. Several: a list of records under `outputs`, and the batch's tokens_per_second.

    `tokens` are token ids, `prompt_tokens` is a count; a row's tokens_per_second is its tokens over the batch's wall time.
    """
    seconds = result.prefill_seconds + result.decode_seconds
    records = [_record(output, seconds) for output in result.outputs]
    if len(records) == 1:
        return records[0]
    return {"outputs": records, "tokens_per_second": round(result.tokens_per_second, 3)}


def _record(output: Output, seconds: float) -> dict[str, Any]:
    return {
        "text": output.text,
        "tokens": output.tokens,
        "prompt_tokens": output.prompt_tokens,
        "steps": output.steps,
        "tokens_per_step": round(output.tokens_per_step, 4),
        "accepted_per_position": [round(rate, 4) for rate in output.accepted_per_position],
        "tokens_per_second": round(len(output.tokens) / seconds, 3),
        "finish_reason": output.finish_reason,
    }


def _statistics(output: Output) -> str:
    return f"{len(output.tokens)} tokens in {output.steps} steps ({output.tokens_per_step:.2f} a step), finish: {output.finish_reason}"
