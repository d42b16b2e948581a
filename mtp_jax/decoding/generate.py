"""From prompts to text: checks at the door, shapes in buckets, the compiled loop, results with statistics.

Shapes. Prompts of one call are padded to a common multiple of `PROMPT_BUCKET` tokens and read in chunks of `loop.CHUNK`;
the cache holds a multiple of `SLOT_BUCKET` slots, a ring one of `WINDOW_BUCKET`. Prompts of like length so share their compiled
programs, and a shape that came before never compiles again. Budgets, seeds and stop tokens' rows are data, not shape, as long as the buckets stay the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import loop, sampling, stops
from mtp_jax.drafters import early_exit, fixed_width, hybrid, jacobi, mtp, prompt_lookup, trained
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms, layers

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead
    from mtp_jax.checkpoints.tokenizer import Tokenizer

DRAFTERS: tuple[config_lib.DrafterName, ...] = get_args(config_lib.DrafterName)
PROMPT_BUCKET = 64
SLOT_BUCKET = 128
WINDOW_BUCKET = 64


class PromptError(ValueError):
    """A prompt, or its length, breaks a rule."""


class StateError(ValueError):
    """A state can't be gone on from."""


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
        return dataclasses.replace(self.tapping(()), drafter=None, drafter_params=None)

    def at_fixed_width(self) -> Runtime:
        """The same backbone arrays, one new token a step at the width of a verify pass: the reference for comparisons bit by bit."""
        return dataclasses.replace(self, drafter=fixed_width.FixedWidth(), drafter_params=None)

    def tapping(self, taps: tuple[int, ...]) -> Runtime:
        """The same backbone arrays, handing over these inner states as well."""
        prefill_module, step_module = (backbone_lib.Backbone(module.config, module.column_blocks, taps) for module in (self.prefill_module, self.step_module))
        return dataclasses.replace(self, prefill_module=prefill_module, step_module=step_module)

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
      head: needed by all but those of config.HEADLESS.
      drafter: "mtp" (the head), "prompt_lookup", "hybrid" (lookup where the text's end occurred before, else the head), the form of a baseline's
        head (models/baselines.py), "early_exit" (the backbone's first layers), or "jacobi" (the backbone's own earlier choices).

    Raises:
      ConfigError: an unknown drafter, or one that needs a head and has none, or one of another form.
    """
    if drafter not in DRAFTERS:
        raise config_lib.ConfigError(f"drafter={drafter!r}: must be one of {', '.join(DRAFTERS)}")
    if drafter in config_lib.HEADLESS:
        headless: dict[str, drafters.Drafter] = {
            "prompt_lookup": prompt_lookup.PromptLookup(),
            "early_exit": early_exit.EarlyExit(runtime.step_module.config),
            "jacobi": jacobi.Jacobi(),
        }
        return dataclasses.replace(runtime.tapping(()), drafter=headless[drafter], drafter_params=None)
    if head is None:
        raise config_lib.ConfigError(f"drafter={drafter!r}: needs a head")
    if head.config.drafter != ("mtp" if drafter == "hybrid" else drafter):
        raise config_lib.ConfigError(f"drafter={drafter!r}: head {head.name!r} is of another form; it must be drafter={head.config.drafter!r} with this one")
    module = forms.make(head.config, runtime.step_module.config, column_blocks=runtime.step_module.column_blocks)
    params = trained.make_params(module, head.params, jnp.asarray(head.draft_ids), runtime.prefill_params)
    drafting = trained.make(module)
    if drafter == "hybrid":
        assert isinstance(drafting, mtp.MTPDrafter)
        drafting = hybrid.Hybrid(drafting)
    return dataclasses.replace(runtime.tapping(head.config.taps), drafter=drafting, drafter_params=params)


@dataclass(frozen=True)
class Output:
    """One row's result."""

    tokens: list[int]  # generated ids; what ended the row, a stop token or the last token of a stop string, is the last
    text: str  # decoded without special tokens, cut before a stop string; empty when the call had no tokenizer
    prompt_tokens: int  # before generation: the prompt, and earlier turns
    steps: int  # verify passes
    drafted: int  # tokens proposed
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
    draft_seconds: float | None = None  # part of decode_seconds; measured on demand
    verify_seconds: float | None = None
    drafter_bytes: dict[str, int] = field(default_factory=dict)
    state: loop.DecodeState | None = None  # to go on from, on demand

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all rows over prefill and decode time."""
        return sum(len(output.tokens) for output in self.outputs) / (self.prefill_seconds + self.decode_seconds)


Reference = Literal["one_token", "fixed_width"]


def generate(
    backbone: LoadedBackbone,
    head: LoadedHead | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: config_lib.DecodeConfig | None = None,
    *,
    drafter: config_lib.DrafterName = "mtp",
    budgets: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    warm_up: bool = False,
) -> DecodeResult:
    """Write what the backbone would write after each prompt, sooner with a drafter.

    Args:
      backbone: from load_backbone.
      head: from load_head; None decodes one token a step, unless the drafter needs no head.
      prompts: user messages (put through the chat template where the tokenizer has one) or lists of token ids.
      config: budget, draft length, stop tokens. Stop tokens left empty mean the tokenizer's.
      drafter: see `attach`.
      budgets: see `run`.
      seeds: see `run`.
      warm_up: compile before timing.

    Raises:
      PromptError: no prompt, an empty one, an id outside the vocabulary, or one too long.
      ConfigError: num_draft = 0 with a head, or budgets or seeds that don't fit the prompts.
    """
    runtime = make_runtime(backbone, head, drafter=drafter)
    return run_text(runtime, backbone, prompts, config, budgets=budgets, seeds=seeds, warm_up=warm_up)


def generate_vanilla(
    backbone: LoadedBackbone,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: config_lib.DecodeConfig | None = None,
    *,
    reference: Reference = "one_token",
    budgets: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    warm_up: bool = False,
) -> DecodeResult:
    """`generate` without a head: the same loop, one new token a step.

    `reference="fixed_width"` runs each step at the width of a verify pass, config.num_draft + 1: its logits are then equal to
    those of decoding with a head bit for bit, on every device (see drafters/fixed_width.py).
    """
    if reference not in get_args(Reference):
        raise config_lib.ConfigError(f"reference={reference!r}: must be one of {', '.join(get_args(Reference))}")
    runtime = make_runtime(backbone)
    if reference == "fixed_width":
        runtime = runtime.at_fixed_width()
    return run_text(runtime, backbone, prompts, config, budgets=budgets, seeds=seeds, warm_up=warm_up)


def run_text(
    runtime: Runtime, backbone: LoadedBackbone, prompts: Sequence[str] | Sequence[Sequence[int]], config: config_lib.DecodeConfig | None = None, **options: Any
) -> DecodeResult:
    """`run` from prompts to text, with the backbone's tokenizer: its stop tokens, unless config names some, and its bytes for stop strings."""
    config = with_stop_tokens(config or config_lib.DecodeConfig(), backbone)
    ids = [encode_prompt(backbone, prompt) for prompt in prompts]
    return with_text(run(runtime, ids, config, tokenizer=backbone.tokenizer, **options), backbone, config.stop_strings)


def with_stop_tokens(config: config_lib.DecodeConfig, backbone: LoadedBackbone) -> config_lib.DecodeConfig:
    """The config with the tokenizer's stop tokens, unless it names some."""
    return config if config.stop_tokens else dataclasses.replace(config, stop_tokens=tuple(backbone.tokenizer.stop_tokens))


def encode_prompt(backbone: LoadedBackbone, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt; text goes through the chat template where there is one."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if not prompt.strip():
        raise PromptError("prompt is empty: it needs at least one character that is not whitespace")
    if backbone.tokenizer.has_chat_template:
        return backbone.tokenizer.apply_chat([{"role": "user", "content": prompt}])
    return backbone.tokenizer.encode(prompt)


def with_text(result: DecodeResult, backbone: LoadedBackbone, stop_strings: Sequence[str] = ()) -> DecodeResult:
    """Fill in the decoded text, cut before a stop string."""
    texts = [text_of(backbone.tokenizer, output.tokens, output.finish_reason, stop_strings) for output in result.outputs]
    outputs = [dataclasses.replace(output, text=text) for output, text in zip(result.outputs, texts, strict=True)]
    return dataclasses.replace(result, outputs=outputs)


def text_of(tokenizer: Tokenizer, tokens: list[int], finish_reason: str, stop_strings: Sequence[str]) -> str:
    """Decoded text of a row that has ended; where a stop string ended it, up to where that begins (the earliest one, if its last token completes several)."""
    text = tokenizer.decode(tokens)
    places = [place for string in stop_strings if finish_reason == "stop" and (place := text.find(string)) >= 0]
    return text[: min(places)] if places else text


@dataclass(frozen=True)
class Job:
    """A call that has passed the checks: shapes and data of its programs."""

    runtime: Runtime
    rules: loop.Rules
    prompts: Int[np.ndarray, "B T"]  # padded
    prompt_lengths: Int[np.ndarray, " B"]
    starts: Int[np.ndarray, " B"]  # tokens of each row before generation
    request: loop.Request
    num_slots: int
    window_slots: int | None  # of layers with a window; None: as many as the others have

    def prefill(self, before: loop.DecodeState | None = None) -> loop.DecodeState:
        """Read the prompts and choose each row's first token."""
        return loop.prefill(
            self.runtime.prefill_module,
            self.runtime.prefill_params,
            jnp.asarray(self.prompts),
            jnp.asarray(self.prompt_lengths),
            self.request,
            num_slots=self.num_slots,
            drafter=self.runtime.drafter,
            drafter_params=self.runtime.drafter_params,
            config=self.rules,
            before=before,
            window_slots=self.window_slots,
        )

    @property
    def backbone(self) -> tuple[backbone_lib.Backbone, Any]:
        """Module and parameters of the verify pass, in the layout that is faster for its number of rows."""
        few_rows = len(self.prompts) * (self.rules.num_draft + 1) <= layers.COLUMN_BLOCK_ROWS
        runtime = self.runtime
        return (runtime.step_module, runtime.step_params) if few_rows else (runtime.prefill_module, runtime.prefill_params)

    def decode(self, state: loop.DecodeState, at_most: int | None = None) -> loop.DecodeState:
        """Step until all rows are done, or `at_most` times. The state is donated."""
        module, params = self.backbone
        limit = loop.WITHOUT_END if at_most is None else np.int32(at_most)
        return loop.decode(module, self.runtime.drafter, params, self.runtime.drafter_params, state, self.request, limit, config=self.rules)

    def warm_up(self, before: loop.DecodeState | None = None, decode: Callable[[loop.DecodeState], loop.DecodeState] | None = None) -> None:
        """Compile prefill and `decode` (default: the method) by running both, the second without steps."""
        state = self.prefill(None if before is None else jax.tree.map(jnp.copy, before))
        (decode or self.decode)(state.replace(done=jnp.ones_like(state.done)))

    def outputs(self, state: loop.DecodeState) -> list[Output]:
        """What each row has by now; text is left empty."""
        tokens, ends = np.asarray(state.tokens), np.asarray(state.cache.lengths) + 1
        stopped, steps, drafted, accepted = (np.asarray(values) for values in (state.stopped, state.steps, state.drafted, state.accepted))
        return [
            Output(
                tokens=tokens[row, begin:end].tolist(),
                text="",
                prompt_tokens=int(begin),
                steps=int(steps[row]),
                drafted=int(drafted[row]),
                accepted=accepted[row].tolist(),
                finish_reason="stop" if stopped[row] else "length",
            )
            for row, (begin, end) in enumerate(zip(self.starts, ends, strict=True))
        ]


def make_job(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    config: config_lib.DecodeConfig,
    *,
    tokenizer: Tokenizer | None = None,
    row_numbers: Sequence[int] | None = None,
    budgets: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    before: loop.DecodeState | None = None,
) -> Job:
    """Check a call at the door and choose its shapes; arguments and errors as in `run`."""
    num_draft = 0
    if runtime.drafter is not None:
        num_draft = config.num_draft
        if num_draft < 1:
            raise config_lib.ConfigError(f"num_draft={num_draft}: must be at least 1 when there is a head; leave the head out for vanilla decoding")
    if config.stop_strings and tokenizer is None:
        raise config_lib.ConfigError(f"stop_strings={config.stop_strings!r}: need the tokenizer; pass it as tokenizer")
    budget = np.asarray(_per_row("budgets", budgets, len(prompts), [config.max_new_tokens] * len(prompts), least=1), np.int32)
    earlier = np.zeros(len(prompts), np.int32) if before is None else tokens_in(before)
    if len(earlier) != len(prompts):
        raise PromptError(f"{len(prompts)} prompts for a state of {len(earlier)} rows: must be as many")
    check_prompts(prompts, runtime.step_module.config, budget, earlier)

    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    pending = 0 if before is None else 1  # read together with the prompt
    width = round_up(int(lengths.max()) + pending, PROMPT_BUCKET) - pending
    starts = earlier + lengths
    num_slots = round_up(max(int((starts + budget).max()) + num_draft + 1, int(earlier.max()) + width), SLOT_BUCKET)
    if before is not None:
        num_slots = max(num_slots, before.cache.num_slots)
    window_slots = ring_size(runtime.step_module.config, num_draft, before) if config.window_cache == "ring" else None
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    if seeds is not None:
        keys = sampling.keys_of_seeds(_per_row("seeds", seeds, len(prompts), [], least=None))
    else:
        keys = sampling.row_keys(config.seed, list(row_numbers) if row_numbers is not None else list(range(len(prompts))))
    table = None
    if config.stop_strings and tokenizer is not None:
        table = stops.table_for(tokenizer, runtime.step_module.config.vocab_size, config.stop_strings)
    request = loop.Request(limits=jnp.asarray(starts + budget), keys=keys, stops=table)
    if isinstance(runtime.drafter, fixed_width.FixedWidth):  # it proposes nothing, and is there for its width
        config = dataclasses.replace(config, short_drafts=())
    return Job(runtime, loop.rules_of(config, num_draft), padded, lengths, starts, request, num_slots, window_slots)


def ring_size(config: config_lib.BackboneConfig, num_draft: int, before: loop.DecodeState | None) -> int | None:
    """Slots of a ring: of one size for vanilla and any usual num_draft, so that both sum in the same order; no fewer than before."""
    if "sliding" not in config.layer_types or config.sliding_window is None:
        return None
    return max(round_up(config.sliding_window + num_draft + 1, WINDOW_BUCKET), 0 if before is None else before.cache.window_slots or 0)


def run(
    runtime: Runtime,
    prompts: Sequence[Sequence[int]],
    config: config_lib.DecodeConfig,
    *,
    tokenizer: Tokenizer | None = None,
    row_numbers: Sequence[int] | None = None,
    budgets: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    before: loop.DecodeState | None = None,
    keep_state: bool = False,
    split_times: bool = False,
    warm_up: bool = False,
) -> DecodeResult:
    """Decode token ids with a prepared runtime. Vanilla when it has no drafter (num_draft is then ignored).

    Args:
      runtime: from make_runtime.
      prompts: token ids of each row; with `before`, what comes after its text.
      config: budget, draft length, stop tokens, sampling.
      tokenizer: needed for stop strings.
      row_numbers: 0, 1, .. by default; with config.seed they give each row its own random numbers, whatever batch it is in.
      budgets: tokens each row may write, instead of config.max_new_tokens.
      seeds: one a row, instead of config.seed and the row's number: the row is sampled as it would be alone, whatever its place.
      before: the state of an earlier call with `keep_state`, which goes on without a second prefill. It is used up: its buffers are donated.
      keep_state: put the final state into the result.
      split_times: also measure drafting and verifying apart. Every step then waits for the host, so the whole is slower.
      warm_up: compile before timing.

    Raises:
      PromptError: no prompt, an empty one, an id outside the vocabulary, one too long, or not as many as `before` has rows.
      StateError: `before` has been used up by another call.
      ConfigError: num_draft = 0 with a drafter, stop strings without a tokenizer, or budgets or seeds that don't fit the prompts.
    """
    job = make_job(runtime, prompts, config, tokenizer=tokenizer, row_numbers=row_numbers, budgets=budgets, seeds=seeds, before=before)
    times = {"draft": 0.0, "verify": 0.0} if split_times else None
    decode = job.decode if times is None else partial(_decode_in_parts, job, times=times)
    if warm_up:
        job.warm_up(before, decode)
        if times is not None:
            times.update(draft=0.0, verify=0.0)
    start = time.perf_counter()
    state = jax.block_until_ready(job.prefill(before))
    prefilled = time.perf_counter()
    state = jax.block_until_ready(decode(state))
    end = time.perf_counter()
    return DecodeResult(
        outputs=job.outputs(state),
        prefill_seconds=prefilled - start,
        decode_seconds=end - prefilled,
        draft_seconds=None if times is None else times["draft"],
        verify_seconds=None if times is None else times["verify"],
        drafter_bytes=runtime.drafter_bytes(state.drafter_state),
        state=state if keep_state else None,
    )


def _decode_in_parts(job: Job, state: loop.DecodeState, times: dict[str, float]) -> loop.DecodeState:
    """The loop on the host, one step at a time in two programs; adds the seconds of each to `times`. Runs at least one step."""
    module, params = job.backbone
    while True:
        begin = time.perf_counter()
        drafter, drafter_params = job.runtime.drafter, job.runtime.drafter_params
        drafts = jax.block_until_ready(loop.propose_alone(drafter, params, drafter_params, state, job.request, config=job.rules))
        drafted = time.perf_counter()
        proposal, state = loop.after_draft(state, *drafts)
        state = jax.block_until_ready(loop.finish_step(module, drafter, params, drafter_params, state, proposal, job.request, config=job.rules))
        times["draft"] += drafted - begin
        times["verify"] += time.perf_counter() - drafted
        if bool(state.done.all()):
            return state


def tokens_in(before: loop.DecodeState) -> Int[np.ndarray, " B"]:
    """Tokens of each row of a state, the pending one included.

    Raises:
      StateError: the state has been used up.
    """
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(before.cache)):
        raise StateError("before is a state that another call has gone on from: its cache is that call's now; go on from that call's state")
    return np.asarray(before.cache.lengths) + 1


def check_prompts(
    prompts: Sequence[Sequence[int]], config: config_lib.BackboneConfig, budgets: int | Int[np.ndarray, " B"], earlier: Int[np.ndarray, " B"] | None = None
) -> None:
    """Raise PromptError unless every prompt is usable and fits the backbone together with its budget and what came before it."""
    if not prompts:
        raise PromptError("prompts is empty: give at least one")
    budgets = np.broadcast_to(budgets, len(prompts))
    for row, prompt in enumerate(prompts):
        if len(prompt) < 1:
            raise PromptError(f"prompt {row} is empty: it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise PromptError(f"prompt {row} holds a token id outside 0..{config.vocab_size - 1}")
        before = 0 if earlier is None else int(earlier[row])
        if before + len(prompt) + budgets[row] > config.max_positions:
            rule = f"with max_new_tokens={budgets[row]} that exceeds the backbone's max_positions={config.max_positions}"
            raise PromptError(f"prompt {row} has {len(prompt)} tokens{f' after {before} earlier ones' if before else ''}: {rule}")


def _per_row(name: str, values: Sequence[int] | None, rows: int, default: list[int], least: int | None) -> list[int]:
    if values is None:
        return default
    if len(values) != rows:
        raise config_lib.ConfigError(f"{name} has {len(values)} entries for {rows} prompts: must be as many")
    for value in values:
        if least is not None and value < least:
            raise config_lib.ConfigError(f"{name} holds {value}: each must be at least {least}")
    return [int(value) for value in values]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
