"""The backbone's own answers to prompts: the text a head is trained on.

Output is JSON lines, one a prompt, in the order they were finished:

    {"prompt_index": 17, "task": "rewrite", "tokens": [..], "answer_mask": [0, 0, .., 1, 1], "finish_reason": "stop"}

`answer_mask` is 1 exactly at the tokens the backbone generated, known from the decoder and never searched for in text.
A run that is interrupted and started again skips the prompts whose line is there. `OUT.settings.json` beside the file says
with what settings it was made; other settings are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints.hf import read_json
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.prompts import Prompt

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone


class RolloutError(ValueError):
    """An output file does not belong to this run."""


@dataclass(frozen=True)
class RolloutReport:
    """Counts of prompts: done + failed + skipped == input."""

    input: int
    done: int  # answered, this time or before
    failed: int  # cannot be answered: empty or too long
    skipped: int  # left out by max_prompt_tokens
    tokens: int  # answer tokens written by this call


def rollout(
    backbone: LoadedBackbone,
    prompts: Sequence[Prompt],
    out: str | Path,
    config: config_lib.DecodeConfig,
    *,
    batch_size: int = 16,
    max_prompt_tokens: int = 512,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RolloutReport:
    """Answer every prompt and append each batch's lines to `out` as soon as it is done.

    Args:
      prompts: user messages.
      out: the JSON-lines file; continued when it is there.
      config: budget, sampling and stop tokens (empty means the tokenizer's). num_draft is ignored.
      batch_size: prompts decoded together, of like length.
      max_prompt_tokens: longer prompts are skipped and counted.
      progress: called with (finished, total).
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(config, stop_tokens=config.stop_tokens or tuple(backbone.tokenizer.stop_tokens))
    _check_same_run(out, backbone, prompts, config, max_prompt_tokens)
    lines = files.whole_lines(out)
    files.write_text(out, "".join(line + "\n" for line in lines))  # drops a line that a crash cut off
    finished = {json.loads(line)["prompt_index"] for line in lines}

    waiting, failed, skipped = [], 0, 0
    for index, prompt in enumerate(prompts):
        if index in finished:
            continue
        try:
            ids = generate_lib.encode_prompt(backbone, prompt.text)
            generate_lib.check_prompts([ids], backbone.config, config.max_new_tokens)
        except generate_lib.PromptError:
            failed += 1
            continue
        if len(ids) > max_prompt_tokens:
            skipped += 1
        else:
            waiting.append((index, ids))

    waiting.sort(key=lambda item: len(item[1]))
    runtime = generate_lib.make_runtime(backbone, column_blocks=None if batch_size == 1 else False)
    tokens = 0
    for start in range(0, len(waiting), batch_size):
        group = waiting[start : start + batch_size]
        rows = [ids for _, ids in group]
        numbers = [index for index, _ in group]
        padding = batch_size - len(rows)  # one shape for the last batch too
        result = generate_lib.run(runtime, rows + rows[-1:] * padding, config, row_numbers=numbers + numbers[-1:] * padding)
        with open(out, "a", encoding="utf-8") as file:
            for (index, ids), output in zip(group, result.outputs, strict=False):
                tokens += len(output.tokens)
                file.write(_line(index, prompts[index].task, ids, output) + "\n")
        progress(len(finished) + min(start + batch_size, len(waiting)), len(finished) + len(waiting))
    return RolloutReport(input=len(prompts), done=len(finished) + len(waiting), failed=failed, skipped=skipped, tokens=tokens)


def _line(index: int, task: str, prompt: list[int], output: generate_lib.Output) -> str:
    record = {
        "prompt_index": index,
        "task": task,
        "tokens": prompt + output.tokens,
        "answer_mask": [0] * len(prompt) + [1] * len(output.tokens),
        "finish_reason": output.finish_reason,
    }
    return json.dumps(record, separators=(",", ":"))


def _check_same_run(out: Path, backbone: LoadedBackbone, prompts: Sequence[Prompt], config: config_lib.DecodeConfig, max_prompt_tokens: int) -> None:
    """Write the settings beside a new file; refuse an old file made with others."""
    settings = {
        "backbone": backbone.fingerprint,
        "prompts": prompts_lib.digest(prompts),
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
        before = {"min_p": 0.0} | read_json(path)  # older files don't name it, and were made without
        for name, value in settings.items():
            if before.get(name) != value:
                raise RolloutError(f"{out}: was made with {name}={before.get(name)!r}, this run has {value!r}; choose another --out")
    files.write_json(path, settings)
