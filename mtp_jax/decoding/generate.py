"""From prompts to text: checks at the door, shapes in buckets, the compiled loop, results with statistics.

Shapes. Prompts of one call are padded to a common multiple of `PROMPT_BUCKET`, and the cache holds a multiple of
`SLOT_BUCKET` slots, so prompts of like length share one compiled program. `DecodeConfig.max_new_tokens` is data, not
shape, as long as the bucket stays the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import loop, sampling
from mtp_jax.drafters import hybrid, mtp, prompt_lookup
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead

DRAFTERS: tuple[config_lib.DrafterName, ...] = get_args(config_lib.DrafterName)
PROMPT_BUCKET = 64
SLOT_BUCKET = 128


class PromptError(ValueError):
    """A prompt, or its length, breaks a rule."""


@dataclass(frozen=True)
class Runtime:
    """A backbone, and perhaps a drafter, in the layouts that run fastest on this device. Make it once, use it for many calls.

    On CPU the decode loop runs on column blocks (see models/layers.py) beside the plain parameters, which serve the
    prefill and large batches; on an accelerator both are the same arrays.
    """

    prefill_module: backbone_lib.Backbone
    prefill_params: Any
    step_module: backbone_lib.Backbone
    step_params: Any
    drafter: drafters.Drafter | None = None
    drafter_params: Any = None

    def without_drafter(self) -> Runtime:
        """The same backbone arrays, decoding one token a step."""
        return dataclasses.replace(self, drafter=None, drafter_params=None)

    def drafter_bytes(self, state: Any = ()) -> dict[str, int]:
        """Bytes the drafter adds to the backbone: its parameters and draft rows, and its state per batch."""

        def total(tree: Any) -> int:
            return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

        return {"parameters": total(self.drafter_params), "state": total(state)}


def make_runtime(
    backbone: LoadedBackbone, head: LoadedHead | None = None, *, drafter: config_lib.DrafterName = "mtp", column_blocks: bool | None = None
) -> Runtime:
    """Bring parameters into the layouts the loop uses.

    Args:
      backbone: as loaded.
      head: None for vanilla decoding, or for prompt lookup.
      drafter: see `attach`.
      column_blocks: layout of the loop's parameters; None means yes on CPU, no elsewhere.
    """
    blocked = jax.default_backend() == "cpu" if column_blocks is None else column_blocks
    step_params = backbone_lib.to_column_blocks(backbone.params, backbone.config) if blocked else backbone.params
    runtime = Runtime(
        prefill_module=backbone_lib.Backbone(backbone.config),
        prefill_params=backbone.params,
        step_module=backbone_lib.Backbone(backbone.config, column_blocks=blocked),
        step_params=step_params,
    )
    return runtime if head is None and drafter == "mtp" else attach(runtime, head, drafter)


def attach(runtime: Runtime, head: LoadedHead | None, drafter: config_lib.DrafterName = "mtp") -> Runtime:
    """The same backbone arrays with a drafter.

    Args:
      runtime: of the backbone alone, or with another drafter.
      head: needed by "mtp" and "hybrid".
      drafter: "mtp" (the head), "prompt_lookup" (nothing trained), or "hybrid" (lookup where the text's end occurred before, else the head).

    Raises:
      ConfigError: an unknown drafter, or one that needs a head and has none.
    """
    if drafter not in DRAFTERS:
        raise config_lib.ConfigError(f"drafter={drafter!r}: must be one of {', '.join(DRAFTERS)}")
    if drafter == "prompt_lookup":
        return dataclasses.replace(runtime, drafter=prompt_lookup.PromptLookup(), drafter_params=None)
    if head is None:
        raise config_lib.ConfigError(f"drafter={drafter!r}: needs a head")
    module = head_lib.Head(head.config, runtime.step_module.config, column_blocks=runtime.step_module.column_blocks)
    params = mtp.make_params(module, head.params, jnp.asarray(head.draft_ids), runtime.prefill_params)
    drafting = mtp.MTPDrafter(module)
    return dataclasses.replace(runtime, drafter=drafting if drafter == "mtp" else hybrid.Hybrid(drafting), drafter_params=params)


@dataclass(frozen=True)
class Output:
    """One row's result."""

    tokens: list[int]  # generated ids; a stop token, if it ended the row, is the last
    text: str  # decoded without special tokens; empty when the call had no tokenizer
    prompt_tokens: int
    steps: int  # verify passes
    accepted: list[int]  # steps in which draft k was kept, k = 1..M
    finish_reason: str  # "stop" or "length"

    @property
    def tokens_per_step(self) -> float:
        """Tokens committed per verify pass; the first token comes from the prefill and counts as none's."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """accepted[k] / steps: the unconditional share of steps in which draft k was kept."""
        return [count / self.steps if self.steps else 0.0 for count in self.accepted]


@dataclass(frozen=True)
class DecodeResult:
    """All rows of one call, with wall-clock seconds (compilation left out when the call warmed up first)."""

    outputs: list[Output]
    prefill_seconds: float
    decode_seconds: float
    drafter_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all rows over prefill and decode time."""
        return sum(len(output.tokens) for output in self.outputs) / (self.prefill_seconds + self.decode_seconds)


def generate(
    backbone: LoadedBackbone,
    head: LoadedHead | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: config_lib.DecodeConfig | None = None,
    *,
    drafter: config_lib.DrafterName = "mtp",
    warm_up: bool = False,
) -> DecodeResult:
    """Write what the backbone would write after each prompt, sooner with a drafter.

    Args:
      backbone: from load_backbone.
      head: from load_head; None decodes one token a step, unless the drafter needs no head.
      prompts: user messages (put through the chat template where the tokenizer has one) or lists of token ids.
      config: budget, draft length, stop tokens. Stop tokens left empty mean the tokenizer's.
      drafter: see `attach`.
      warm_up: compile before timing.

    Raises:
      PromptError: no prompt, an empty one, an id outside the vocabulary, or one too long.
      ConfigError: num_draft = 0 with a head.
    """
    config = config or config_lib.DecodeConfig()
    if not config.stop_tokens:
        config = dataclasses.replace(config, stop_tokens=tuple(backbone.tokenizer.stop_tokens))
    ids = [encode_prompt(backbone, prompt) for prompt in prompts]
    runtime = make_runtime(backbone, head, drafter=drafter)
    result = run(runtime, ids, config, warm_up=warm_up)
    return with_text(result, backbone)


def generate_vanilla(
    backbone: LoadedBackbone, prompts: Sequence[str] | Sequence[Sequence[int]], config: config_lib.DecodeConfig | None = None, *, warm_up: bool = False
) -> DecodeResult:
    """`generate` without a head: the same loop, one token a step."""
    return generate(backbone, None, prompts, config, warm_up=warm_up)


def encode_prompt(backbone: LoadedBackbone, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt; text goes through the chat template where there is one."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if not prompt.strip():
        raise PromptError("prompt is empty: it needs at least one character that is not whitespace")
    if backbone.tokenizer.has_chat_template:
        return backbone.tokenizer.apply_chat([{"role": "user", "content": prompt}])
    return backbone.tokenizer.encode(prompt)


def with_text(result: DecodeResult, backbone: LoadedBackbone) -> DecodeResult:
    """Fill in the decoded text."""
    outputs = [dataclasses.replace(output, text=backbone.tokenizer.decode(output.tokens)) for output in result.outputs]
    return dataclasses.replace(result, outputs=outputs)


def run(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    config: config_lib.DecodeConfig,
    *,
    warm_up: bool = False,
    row_numbers: Sequence[int] | None = None,
) -> DecodeResult:
    """Decode token ids with a prepared runtime. Vanilla when it has no drafter (num_draft is then ignored).

    `row_numbers` (0, 1, .. by default) and config.seed give each row its own random numbers, whatever batch it is in.
    """
    num_draft = 0
    if runtime.drafter is not None:
        num_draft = config.num_draft
        if num_draft < 1:
            raise config_lib.ConfigError(f"num_draft={num_draft}: must be at least 1 when there is a head; leave the head out for vanilla decoding")
    check_prompts(prompts, runtime.step_module.config, config.max_new_tokens)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = round_up(int(lengths.max()), PROMPT_BUCKET)
    num_slots = round_up(max(int(lengths.max()) + config.max_new_tokens + num_draft + 1, width), SLOT_BUCKET)
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    limits = jnp.asarray(lengths + config.max_new_tokens)
    row_keys = sampling.row_keys(config.seed, list(row_numbers) if row_numbers is not None else list(range(len(prompts))))
    rules = dataclasses.replace(config, num_draft=num_draft, max_new_tokens=1, seed=0)

    def prefill() -> loop.DecodeState:
        return loop.prefill(
            runtime.prefill_module,
            runtime.prefill_params,
            jnp.asarray(padded),
            jnp.asarray(lengths),
            limits,
            row_keys,
            num_slots=num_slots,
            drafter=runtime.drafter,
            config=rules,
        )

    few_rows = len(prompts) * (num_draft + 1) <= layers.COLUMN_BLOCK_ROWS
    module, params = (runtime.step_module, runtime.step_params) if few_rows else (runtime.prefill_module, runtime.prefill_params)

    def decode(state: loop.DecodeState) -> loop.DecodeState:
        return loop.decode(module, runtime.drafter, params, runtime.drafter_params, state, limits, row_keys, config=rules)

    if warm_up:
        state = prefill()
        jax.block_until_ready(decode(state.replace(done=jnp.ones_like(state.done))))
    start = time.perf_counter()
    state = jax.block_until_ready(prefill())
    prefilled = time.perf_counter()
    state = jax.block_until_ready(decode(state))
    end = time.perf_counter()
    return DecodeResult(
        outputs=_outputs(state, lengths),
        prefill_seconds=prefilled - start,
        decode_seconds=end - prefilled,
        drafter_bytes=runtime.drafter_bytes(state.drafter_state),
    )


def check_prompts(prompts: Sequence[Sequence[int]], config: config_lib.BackboneConfig, max_new_tokens: int) -> None:
    """Raise PromptError unless every prompt is usable and fits the backbone together with its budget."""
    if not prompts:
        raise PromptError("prompts is empty: give at least one")
    for row, prompt in enumerate(prompts):
        if len(prompt) < 1:
            raise PromptError(f"prompt {row} is empty: it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise PromptError(f"prompt {row} holds a token id outside 0..{config.vocab_size - 1}")
        if len(prompt) + max_new_tokens > config.max_positions:
            raise PromptError(
                f"prompt {row} has {len(prompt)} tokens: with max_new_tokens={max_new_tokens} that exceeds the backbone's max_positions={config.max_positions}"
            )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _outputs(state: loop.DecodeState, prompt_lengths: np.ndarray) -> list[Output]:
    tokens, ends = np.asarray(state.tokens), np.asarray(state.cache.lengths) + 1
    stopped, steps, accepted = np.asarray(state.stopped), np.asarray(state.steps), np.asarray(state.accepted)
    return [
        Output(
            tokens=tokens[row, begin:end].tolist(),
            text="",
            prompt_tokens=int(begin),
            steps=int(steps[row]),
            accepted=accepted[row].tolist(),
            finish_reason="stop" if stopped[row] else "length",
        )
        for row, (begin, end) in enumerate(zip(prompt_lengths, ends, strict=True))
    ]
