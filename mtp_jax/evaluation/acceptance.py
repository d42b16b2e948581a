"""A head against vanilla decoding, prompt by prompt, in one process on the same backbone arrays.

Every group of prompts is decoded both ways, one right after the other, and the order alternates from group to group, so
that a machine that slows down or warms up hits both alike. Compilation is kept out of all times.

What the numbers mean (of all prompts, and of each task):

    tokens                  tokens written with the head, each prompt's first one included
    steps                   verify passes
    tokens_per_step         tokens committed in steps / steps: each prompt's first token comes from the prefill, and is left out
    accept_unconditional    [k] = accepted[k] / steps: share of steps in which drafts 1..k were all kept
    accept_conditional      [k] = accepted[k] / accepted[k-1] (the first one / steps)
    identical               prompts whose tokens are vanilla's, every one; when sampling with accept="rejection" the distribution is, not the tokens
    tokens_per_second       tokens / wall-clock seconds of prefill and decoding
    speedup                 vanilla's seconds / the head's seconds
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax import prompts as prompts_lib
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.evaluation import journal as journal_lib
from mtp_jax.prompts import Prompt
from mtp_jax.training import walk

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead

MAX_DIFFERENCES = 5  # listed in the result; the count is always exact


@dataclass(frozen=True)
class Pair:
    """The prompts of one task that were decoded together, both ways."""

    task: str
    indices: list[int]  # of the prompts
    vanilla: list[generate_lib.Output]
    drafted: list[generate_lib.Output]
    vanilla_seconds: float  # prefill and decoding
    drafted_seconds: float
    state_bytes: int = 0  # of the drafter, for this group


def evaluate(
    backbone: LoadedBackbone,
    head: LoadedHead | None,
    prompts: Sequence[Prompt],
    config: config_lib.DecodeConfig,
    *,
    drafter: config_lib.DrafterName = "mtp",
    batch_size: int = 1,
    journal: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Decode every prompt with and without the head, and compare.

    Args:
      backbone: as loaded.
      head: None measures vanilla decoding alone, unless the drafter needs no head; it then stands in both places.
      prompts: user messages with the task they are counted under.
      config: budget, num_draft, sampling. Stop tokens left empty mean the tokenizer's.
      drafter: see `decoding.generate.attach`.
      batch_size: prompts of one task decoded together; a group that is not full is padded by repeating its last row.
      journal: a JSON-lines file that gets each group as it is done. When it is there from a run that was stopped, with the
        same settings and prompts, its groups are not decoded again. Removing it afterwards is the caller's.
      progress: called with (prompts done, prompts in all).

    Returns:
      JSON-ready: `overall`, `tasks.<name>`, `drafter_bytes`, `settings`, and `differences` where an output differs:
      the prompt's index and the first generated position at which the two tell apart, for 5 prompts at most.

    Raises:
      PromptError: naming the first prompt that is empty or too long, before anything is decoded.
      ConfigError: num_draft = 0 with a head, or batch_size below 1.
      JournalError: the journal is of a run with other settings.
    """
    drafting = head is not None or drafter != "mtp"
    check(drafting, config, batch_size)
    config = dataclasses.replace(config, stop_tokens=config.stop_tokens or tuple(backbone.tokenizer.stop_tokens))
    ids = [generate_lib.encode_prompt(backbone, prompt.text) for prompt in prompts]
    generate_lib.check_prompts(ids, backbone.config, config.max_new_tokens)
    vanilla = generate_lib.make_runtime(backbone)
    drafted = generate_lib.attach(vanilla, head, drafter) if drafting else None
    num_draft = config.num_draft if drafting else 0
    settings = run_settings(backbone, head, config, num_draft, batch_size) | {"drafter": drafter if drafting else None}
    depends_on = settings | {"prompts": prompts_lib.digest(prompts), "weights": weights_digest(backbone, head)}
    pairs = [_pair(values) for values in journal_lib.begin(journal, depends_on)]
    finished = {index for pair in pairs for index in pair.indices}
    warmed: set[tuple[int, ...]] = set()
    for number, group in enumerate(groups(prompts, ids, batch_size)):
        if finished.issuperset(group):
            continue
        padded = group + group[-1:] * (batch_size - len(group))
        plain, fast = side_by_side(vanilla, drafted, [ids[i] for i in padded], config, warmed, row_numbers=padded, drafted_first=number % 2 == 1)
        pairs.append(make_pair(prompts[group[0]].task, group, plain, fast))
        journal_lib.add(journal, dataclasses.asdict(pairs[-1]))
        progress(sum(len(pair.indices) for pair in pairs), len(prompts))
    result: dict[str, Any] = {
        "overall": summary(pairs, num_draft),
        "tasks": {task: summary([pair for pair in pairs if pair.task == task], num_draft) for task in dict.fromkeys(p.task for p in prompts)},
        "drafter_bytes": {"parameters": (drafted or vanilla).drafter_bytes()["parameters"], "state": max(pair.state_bytes for pair in pairs)},
        "settings": settings,
    }
    found = differences(pairs)
    return result | ({"differences": found[:MAX_DIFFERENCES]} if found else {})


def side_by_side(
    vanilla: generate_lib.Runtime,
    drafted: generate_lib.Runtime | None,
    rows: Sequence[Sequence[int]],
    config: config_lib.DecodeConfig,
    warmed: set[tuple[int, ...]],
    *,
    row_numbers: Sequence[int],
    drafted_first: bool,
    early: Callable[[generate_lib.DecodeResult], None] = lambda result: None,
) -> tuple[generate_lib.DecodeResult, generate_lib.DecodeResult]:
    """(vanilla's result, the head's result) of the same prompts; vanilla's twice when there is no head.

    `warmed` holds the shapes that were compiled before; a new one is compiled outside the times, and put in.
    `early` gets the first of the two results before the second is begun.
    """

    def once(runtime: generate_lib.Runtime) -> generate_lib.DecodeResult:
        num_draft = config.num_draft if runtime.drafter is not None else 0
        shape = shape_of(rows, config.max_new_tokens, num_draft)
        result = generate_lib.run(runtime, rows, config, warm_up=shape not in warmed, row_numbers=row_numbers)
        warmed.add(shape)
        return result

    if drafted is None:
        plain = once(vanilla)
        early(plain)
        return plain, plain
    order = (drafted, vanilla) if drafted_first else (vanilla, drafted)
    first = once(order[0])
    early(first)
    second = once(order[1])
    return (second, first) if drafted_first else (first, second)


def make_pair(task: str, indices: Sequence[int], vanilla: generate_lib.DecodeResult, drafted: generate_lib.DecodeResult) -> Pair:
    """Keep what the summary needs; rows beyond `indices` are padding."""
    return Pair(
        task=task,
        indices=list(indices),
        vanilla=vanilla.outputs[: len(indices)],
        drafted=drafted.outputs[: len(indices)],
        vanilla_seconds=vanilla.prefill_seconds + vanilla.decode_seconds,
        drafted_seconds=drafted.prefill_seconds + drafted.decode_seconds,
        state_bytes=drafted.drafter_bytes["state"],
    )


def summary(pairs: Sequence[Pair], num_draft: int) -> dict[str, Any]:
    """The numbers of the module's docstring, over `pairs`."""
    vanilla = [output for pair in pairs for output in pair.vanilla]
    drafted = [output for pair in pairs for output in pair.drafted]
    tokens = sum(len(output.tokens) for output in drafted)
    accepted = np.sum([output.accepted for output in drafted], axis=0).astype(int).tolist() if num_draft else []
    counts = walk.Acceptance(steps=sum(output.steps for output in drafted), tokens=tokens - len(drafted), accepted=accepted)
    vanilla_seconds, seconds = sum(pair.vanilla_seconds for pair in pairs), sum(pair.drafted_seconds for pair in pairs)
    return {
        "prompts": len(drafted),
        "tokens": tokens,
        **counts.as_dict(),
        "identical": sum(a.tokens == b.tokens for a, b in zip(vanilla, drafted, strict=True)),
        "vanilla_tokens_per_second": round(sum(len(output.tokens) for output in vanilla) / vanilla_seconds, 3),
        "tokens_per_second": round(tokens / seconds, 3),
        "speedup": round(vanilla_seconds / seconds, 4),
    }


def differences(pairs: Sequence[Pair]) -> list[dict[str, int]]:
    """Where outputs part: `prompt` (index) and `position` (of the first generated token that differs, from 0), by prompt."""
    found = []
    for pair in pairs:
        for index, one, other in zip(pair.indices, pair.vanilla, pair.drafted, strict=True):
            position = first_difference(one.tokens, other.tokens)
            if position is not None:
                found.append({"prompt": index, "position": position})
    return sorted(found, key=lambda item: item["prompt"])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First index at which two lists tell apart, or one has ended; None when they are equal."""
    shorter = min(len(one), len(other))
    position = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    return None if position == len(one) == len(other) else position


def _pair(values: dict[str, Any]) -> Pair:
    """A pair as the journal holds it."""
    vanilla, drafted = ([generate_lib.Output(**output) for output in values.pop(side)] for side in ("vanilla", "drafted"))
    return Pair(vanilla=vanilla, drafted=drafted, **values)


def weights_digest(backbone: LoadedBackbone, head: LoadedHead | None) -> str:
    """16 hex digits of what the settings only name: backbone and head."""
    digest = hashlib.sha256(backbone.fingerprint.encode())
    for leaf in jax.tree.leaves(head.params if head is not None else ()):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def check(drafting: bool, config: config_lib.DecodeConfig, batch_size: int) -> None:
    """Raise ConfigError unless such a run is possible."""
    if drafting and config.num_draft < 1:
        raise config_lib.ConfigError(f"num_draft={config.num_draft}: must be at least 1 when there is a head; leave the head out for vanilla decoding")
    if batch_size < 1:
        raise config_lib.ConfigError(f"batch_size={batch_size}: must be at least 1")


def groups(prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Prompt indices to decode together: of one task and of like length, shortest groups first."""
    groups = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        members = sorted((i for i, prompt in enumerate(prompts) if prompt.task == task), key=lambda i: len(ids[i]))
        groups += [members[start : start + batch_size] for start in range(0, len(members), batch_size)]
    return sorted(groups, key=lambda group: len(ids[group[-1]]))


def shape_of(rows: Sequence[Sequence[int]], max_new_tokens: int, num_draft: int) -> tuple[int, ...]:
    """What `generate.run` compiles anew for: prompt width, cache slots, rows, and the drafted tokens (0 is vanilla)."""
    longest = max(len(row) for row in rows)
    width = generate_lib.round_up(longest, generate_lib.PROMPT_BUCKET)
    slots = generate_lib.round_up(max(longest + max_new_tokens + num_draft + 1, width), generate_lib.SLOT_BUCKET)
    return width, slots, len(rows), num_draft


def run_settings(backbone: LoadedBackbone, head: LoadedHead | None, config: config_lib.DecodeConfig, num_draft: int, batch_size: int) -> dict[str, Any]:
    """What was decoded, how, and on what; JSON-ready."""
    device = jax.devices()[0]
    return {
        "backbone": backbone.name,
        "head": None if head is None else head.name,
        "num_draft": num_draft,
        "short_drafts": [drafts for drafts in config.short_drafts if drafts < num_draft],
        "max_new_tokens": config.max_new_tokens,
        "batch_size": batch_size,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "min_confidence": config.min_confidence,
        "accept": config.accept,
        "seed": config.seed,
        "dtype": backbone.config.dtype,
        "platform": device.platform,
        "device": device.device_kind,
        "versions": {"mtp_jax": mtp_jax.__version__, "jax": jax.__version__},
    }
