"""Does decoding with a drafter write exactly what the backbone writes alone?

Every group of prompts is decoded three ways on the same backbone arrays:

    drafted       with the drafter
    fixed_width   the backbone alone, one token a step, in passes as wide as a verify pass
    one_token     the backbone alone, one token a step: what there is without a drafter

A verify pass and a fixed-width pass are one computation, row by row, so every bit of the logits that a token was chosen
from must be the same, on any device and in any dtype. A one-token pass multiplies matrices of another shape, and its
last bits may be others; where the two best logits are all but equal, that can tip the choice.

Positions count generated tokens, from 0. They are compared up to the first token that differs, that one included: from
there on the two texts are different texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from mtp_jax import config as config_lib
from mtp_jax import prompts as prompts_lib
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.evaluation import acceptance
from mtp_jax.evaluation import journal as journal_lib
from mtp_jax.prompts import Prompt
from mtp_jax.training import walk

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead

MAX_LISTED = 20  # places listed in the result; counts are always exact


@dataclass(frozen=True)
class Ways:
    """The three ways to decode."""

    drafted: generate_lib.Runtime
    fixed_width: generate_lib.Runtime
    one_token: generate_lib.Runtime

    @property
    def references(self) -> dict[str, generate_lib.Runtime]:
        return {"fixed_width": self.fixed_width, "one_token": self.one_token}


def ways_of(drafted: generate_lib.Runtime) -> Ways:
    """All three from a runtime with a drafter."""
    return Ways(drafted, drafted.at_fixed_width(), drafted.without_drafter())


@dataclass(frozen=True)
class Comparison:
    """One prompt's drafted text against one reference."""

    positions: int  # compared
    parted_at: int | None = None  # the first position whose tokens differ
    tokens: list[int | None] = dataclasses.field(default_factory=list)  # there: the reference's and the drafted one; None is a text that had ended
    gap: float | None = None  # there: the reference's best logit less its second best
    other_bits: int | None = None  # positions compared whose logits are not the same in every bit; None when logits were not kept
    first_other_bits: int | None = None  # the first of them
    largest: float | None = None  # absolute difference of two logits at the positions compared


@dataclass(frozen=True)
class Record:
    """One prompt."""

    prompt: int  # its index
    tokens: int  # written with the drafter
    steps: int
    accepted: list[int]
    against: dict[str, Comparison]  # by reference


def verify_exact(
    backbone: LoadedBackbone,
    head: LoadedHead | None,
    prompts: Sequence[Prompt],
    config: config_lib.DecodeConfig,
    *,
    drafter: config_lib.DrafterName = "mtp",
    batch_size: int = 1,
    tokens_only: bool = False,
    journal: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Decode every prompt the three ways, and compare.

    Args:
      backbone: as loaded.
      head: needed by the drafters "mtp" and "hybrid".
      prompts: user messages.
      config: budget, num_draft, sampling. Stop tokens left empty mean the tokenizer's.
      drafter: see `decoding.generate.attach`.
      batch_size: prompts decoded together, of like length; a group that is not full is padded by repeating its last row.
      tokens_only: keep no logits. They take 4 bytes x vocabulary x cache slots x batch_size, twice.
      journal: as in `acceptance.evaluate`.
      progress: called with (prompts done, prompts in all).

    Returns:
      JSON-ready: `exact`, whether drafted and fixed-width decoding were the same in all that was compared; `prompts`, `tokens` and
      the acceptance of drafts; `against.fixed_width` and `against.one_token` (see `summary`); `settings`.

    Raises:
      PromptError: naming the first prompt that is empty or too long, before anything is decoded.
      ConfigError: num_draft = 0, no head where the drafter needs one, batch_size below 1, or drafts that are not kept by matching.
      JournalError: the journal is of a run with other settings.
    """
    acceptance.check(True, config, batch_size)
    if config.by_rejection:
        raise config_lib.ConfigError(f"accept={config.accept!r}: must be 'match' here; the other rule writes other samples than the backbone alone")
    config = dataclasses.replace(config, stop_tokens=config.stop_tokens or tuple(backbone.tokenizer.stop_tokens), keep_logits=not tokens_only)
    ids = [generate_lib.encode_prompt(backbone, prompt.text) for prompt in prompts]
    generate_lib.check_prompts(ids, backbone.config, config.max_new_tokens)
    runtime = generate_lib.make_runtime(backbone)
    ways = ways_of(generate_lib.attach(runtime, head, drafter))
    settings = acceptance.run_settings(backbone, head, config, config.num_draft, batch_size) | {"drafter": drafter, "tokens_only": tokens_only}
    depends_on = settings | {"prompts": prompts_lib.digest(prompts), "weights": acceptance.weights_digest(backbone, head)}
    records = [_record(values) for group in journal_lib.begin(journal, depends_on) for values in group]
    finished = {record.prompt for record in records}
    for group in _groups(ids, batch_size):
        if finished.issuperset(group):
            continue
        padded = group + group[-1:] * (batch_size - len(group))
        new = compare(ways, [ids[i] for i in padded], config, row_numbers=padded)[: len(group)]
        journal_lib.add(journal, [dataclasses.asdict(record) for record in new])
        records += new
        progress(len(records), len(prompts))
    return result_of(records) | {"settings": settings}


def compare(ways: Ways, rows: Sequence[Sequence[int]], config: config_lib.DecodeConfig, *, row_numbers: Sequence[int]) -> list[Record]:
    """Decode one group the three ways, and compare row by row; logits too, if the config keeps them."""

    def decode(runtime: generate_lib.Runtime) -> generate_lib.DecodeResult:
        return generate_lib.run(runtime, rows, config, row_numbers=row_numbers, keep_state=config.keep_logits)

    drafted = decode(ways.drafted)
    against: dict[str, list[Comparison]] = {}
    for name, runtime in ways.references.items():
        reference = decode(runtime)
        comparisons = [_compare_tokens(one, other) for one, other in zip(reference.outputs, drafted.outputs, strict=True)]
        if config.keep_logits:
            comparisons = _compare_logits(comparisons, reference, drafted)
        against[name] = _with_gaps(comparisons, runtime, rows, config, row_numbers)
        del reference  # its logits, before the next one's
    return [
        Record(number, len(output.tokens), output.steps, output.accepted, {name: comparisons[row] for name, comparisons in against.items()})
        for row, (number, output) in enumerate(zip(row_numbers, drafted.outputs, strict=True))
    ]


def _compare_tokens(reference: generate_lib.Output, drafted: generate_lib.Output) -> Comparison:
    one, other = reference.tokens, drafted.tokens
    position = acceptance.first_difference(one, other)
    if position is None:
        return Comparison(positions=len(one))
    return Comparison(positions=position + 1, parted_at=position, tokens=[text[position] if position < len(text) else None for text in (one, other)])


def _compare_logits(comparisons: Sequence[Comparison], reference: generate_lib.DecodeResult, drafted: generate_lib.DecodeResult) -> list[Comparison]:
    """Fill in what the logits say."""
    assert reference.state is not None and drafted.state is not None
    assert reference.state.logits is not None and drafted.state.logits is not None
    others, sizes = (np.asarray(values) for values in _logit_differences(reference.state.logits, drafted.state.logits))
    found = []
    for row, (comparison, one, other) in enumerate(zip(comparisons, reference.outputs, drafted.outputs, strict=True)):
        both = min(comparison.positions, len(one.tokens), len(other.tokens))
        places = slice(one.prompt_tokens, one.prompt_tokens + both)
        where = np.flatnonzero(others[row, places])
        first = int(where[0]) if len(where) else None
        largest = float(sizes[row, places].max(initial=0))
        found.append(dataclasses.replace(comparison, other_bits=len(where), first_other_bits=first, largest=largest))
    return found


@jax.jit
def _logit_differences(one: Float[Array, "B R V"], other: Float[Array, "B T V"]) -> tuple[Bool[Array, "B U"], Float[Array, "B U"]]:
    """At each place that both have: whether any bit differs, and the largest absolute difference."""
    common = min(one.shape[1], other.shape[1])
    one, other = one[:, :common], other[:, :common]
    bits = [lax.bitcast_convert_type(logits, jnp.uint32) for logits in (one, other)]
    return (bits[0] != bits[1]).any(axis=-1), jnp.abs(one - other).max(axis=-1)


def _with_gaps(
    comparisons: Sequence[Comparison], runtime: generate_lib.Runtime, rows: Sequence[Sequence[int]], config: config_lib.DecodeConfig, numbers: Sequence[int]
) -> list[Comparison]:
    """Fill in the gaps where texts part.

    The reference decodes again as far as the first such place, then the next, so that no more than one step's logits are held.
    (Of position 0, which the prefill chooses, the gap is right but for rounding.)
    """
    found = list(comparisons)
    places = sorted((c.parted_at, row) for row, c in enumerate(comparisons) if c.parted_at is not None and c.tokens[0] is not None)
    if not places:
        return found
    job = generate_lib.make_job(runtime, rows, dataclasses.replace(config, keep_logits=False), row_numbers=numbers)
    module, params = job.backbone
    state, done = job.prefill(), 0
    for position, row in places:
        state, done = job.decode(state, at_most=position - done), position
        wide = jnp.repeat(state.hidden[:, None], job.rules.num_draft + 1, axis=1)  # as the pass that chose the token
        logits = module.apply({"params": params}, wide, method="logits")
        assert isinstance(logits, jax.Array)
        best, second = np.asarray(lax.top_k(logits[row, 0], 2)[0])
        found[row] = dataclasses.replace(found[row], gap=float(best - second))
    return found


def result_of(records: Sequence[Record]) -> dict[str, Any]:
    """The result but for its settings."""
    records = sorted(records, key=lambda record: record.prompt)
    tokens, accepted = sum(record.tokens for record in records), np.sum([record.accepted for record in records], axis=0).astype(int).tolist()
    counts = walk.Acceptance(steps=sum(record.steps for record in records), tokens=tokens - len(records), accepted=accepted)
    against = {name: summary(records, name) for name in records[0].against}
    strict = against["fixed_width"]
    return {
        "exact": strict["identical"] == len(records) and not strict["other_bits"],
        "prompts": len(records),
        "tokens": tokens,
        **counts.as_dict(),
        "against": against,
    }


def summary(records: Sequence[Record], reference: str) -> dict[str, Any]:
    """All prompts against one reference.

    identical                  prompts whose tokens are the reference's, every one
    tokens_compared            positions compared
    tokens_identical           of these
    other_bits                 positions compared whose logits differ in some bit; this and the next two: None when logits were not kept
    largest_logit_difference   there
    first_other_bits           [{prompt, position}], one a prompt, 20 at most
    largest_gap                of all gaps where texts part; None when none does
    differences                [{prompt, position, reference_token, drafted_token, gap}] where texts part, 20 at most
    """
    pairs = [(record.prompt, record.against[reference]) for record in records]
    parted = [(prompt, c) for prompt, c in pairs if c.parted_at is not None]
    measured = all(c.other_bits is not None for _, c in pairs)
    compared = sum(c.positions for _, c in pairs)
    return {
        "identical": len(pairs) - len(parted),
        "tokens_compared": compared,
        "tokens_identical": compared - len(parted),
        "other_bits": sum(c.other_bits or 0 for _, c in pairs) if measured else None,
        "largest_logit_difference": max(c.largest or 0.0 for _, c in pairs) if measured else None,
        "first_other_bits": [{"prompt": prompt, "position": c.first_other_bits} for prompt, c in pairs if c.other_bits][:MAX_LISTED] if measured else None,
        "largest_gap": max((c.gap for _, c in parted if c.gap is not None), default=None),
        "differences": [
            {"prompt": prompt, "position": c.parted_at, "reference_token": c.tokens[0], "drafted_token": c.tokens[1], "gap": c.gap} for prompt, c in parted
        ][:MAX_LISTED],
    }


def _record(values: dict[str, Any]) -> Record:
    """A record as the journal holds it."""
    return Record(**{**values, "against": {name: Comparison(**comparison) for name, comparison in values["against"].items()}})


def _groups(ids: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Prompt indices to decode together: of like length, so that few shapes compile, and shortest first."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
