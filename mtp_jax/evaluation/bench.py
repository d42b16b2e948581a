"""What decoding costs on this machine and where the time goes: passes inside the compiled loop, drafts, whole steps, whole answers.

    one_token   a whole step of the vanilla loop: the unit that every ratio is to
    verify      the backbone's pass over `width` tokens of each row and the choice of its tokens, nothing else
    draft       num_draft tokens of each row by the drafter, nothing else
    steps       whole steps of `loop.decode`; overhead = step - its verify pass - its draft: choosing what to commit,
                writing it down, the loop itself. Also with a drafter that proposes nothing ("none"), which has no draft.

All of these run many times inside one compiled `while_loop`, over the same context, and take turns with two readings of
memory bandwidth (see timing.py). A step's ratio is also the tokens per step from which drafting gains.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from mtp_jax import config as config_lib
from mtp_jax import drafters
from mtp_jax.decoding import adaptive, loop
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.evaluation import acceptance, roofline, timing
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib
from mtp_jax.prompts import Prompt

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead

Progress = Callable[[int, int], None]
Key = tuple[str, Any, Any]  # what is timed, its size, and its layout or drafter
ONE_TOKEN: Key = ("step", 0, "none")
MATVEC: Key = ("matvec", 0, "")
READ: Key = ("read", 0, "")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    num_drafts: tuple[int, ...] = (1, 2, 3, 4)  # M; each at least 1
    widths: tuple[int, ...] = ()  # of verify passes, besides 1..max(num_drafts) + 1
    batch_sizes: tuple[int, ...] = (1,)  # passes and steps are measured at the first of them
    both_layouts: bool = False  # verify passes also in the layout that the loop does not take
    context: int = 128  # tokens of each row in the cache before the passes
    passes: int = 16  # in one run of a program
    rounds: int = 5
    decode_rounds: int = 3  # of the prompts; 0 leaves them out
    max_new_tokens: int = 64  # of a prompt's answer

    def __post_init__(self) -> None:
        for name in ("num_drafts", "batch_sizes"):
            if not getattr(self, name):
                raise config_lib.ConfigError(f"{name}={getattr(self, name)!r}: must name at least one")
        for name, least in (("context", 1), ("passes", 1), ("rounds", 1), ("decode_rounds", 0), ("max_new_tokens", 1)):
            if getattr(self, name) < least:
                raise config_lib.ConfigError(f"{name}={getattr(self, name)}: must be at least {least}")
        for name in ("num_drafts", "widths", "batch_sizes"):
            for value in getattr(self, name):
                if value < 1:
                    raise config_lib.ConfigError(f"{name}={value}: each must be at least 1")
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))

    @property
    def all_widths(self) -> tuple[int, ...]:
        return tuple(sorted({*range(1, max(self.num_drafts) + 2), *self.widths}))


def bench(
    backbone: LoadedBackbone,
    head: LoadedHead | None,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    drafter: config_lib.DrafterName = "mtp",
    accelerators: Sequence[roofline.Accelerator] = roofline.ACCELERATORS,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Measure everything.

    Args:
      backbone: as loaded.
      head: None leaves out what drafts, unless the drafter needs no head.
      prompts: the first is the text of the passes, repeated or cut to `plan.context` tokens; all are decoded end to end.
      plan: sizes and rounds.
      drafter: see `decoding.generate.attach`.
      accelerators: devices to predict for.
      progress: called with (runs done, runs in all), first for the passes, then for the prompts.

    Returns:
      JSON-ready: `roofline`, `passes`, `end_to_end`, `predicted` (what decoding/adaptive.py makes of the two: speed by num_draft, and the
      best), `drafter_bytes`, `settings`.

    Raises:
      PromptError: naming the first prompt that is empty or too long, or a context too long.
    """
    ids = [generate_lib.encode_prompt(backbone, prompt.text) for prompt in prompts]
    generate_lib.check_prompts(ids, backbone.config, plan.max_new_tokens)
    vanilla = generate_lib.make_runtime(backbone)
    drafting = head is not None or drafter != "mtp"
    drafted = generate_lib.attach(vanilla, head, drafter) if drafting else None
    bed = make_bed(vanilla, drafted, ids[0], plan)
    seconds = timing.take_turns(bed.programs(), plan.rounds, progress)
    config = generate_lib.with_stop_tokens(config_lib.DecodeConfig(max_new_tokens=plan.max_new_tokens), backbone)
    settings = acceptance.run_settings(backbone, head, config, max(plan.num_drafts) if drafting else 0, plan.batch_sizes[0])
    passes = _passes(bed, seconds)
    end_to_end = list(_end_to_end(vanilla, drafted, prompts, ids, config, plan, progress)) if plan.decode_rounds else []
    return {
        "roofline": _roofline(bed, head, seconds, accelerators),
        "passes": passes,
        "end_to_end": end_to_end,
        "predicted": _predicted(passes, end_to_end) if drafting else None,
        "drafter_bytes": (drafted or vanilla).drafter_bytes()["parameters"],
        "settings": settings | {"drafter": drafter if drafting else None, "slots": bed.num_slots, "plan": dataclasses.asdict(plan)},
    }


@dataclass(frozen=True)
class Bed:
    """Programs over one context, ready to be timed. All jobs have the same number of slots."""

    plan: Plan
    vanilla: generate_lib.Job
    drafted: dict[int, generate_lib.Job]  # by M
    nothing: generate_lib.Job | None  # proposes nothing, at the width of the largest M

    @property
    def num_slots(self) -> int:
        return self.vanilla.num_slots

    @property
    def batch(self) -> int:
        return len(self.vanilla.prompts)

    @property
    def weight_bytes(self) -> dict[str, int]:
        work, size = self.work(1), jnp.dtype(self.config.dtype).itemsize
        return {"layers": work.layers * size, "unembedding": work.unembedding * size, "total": (work.layers + work.unembedding) * size}

    @property
    def config(self) -> config_lib.BackboneConfig:
        return self.vanilla.runtime.prefill_module.config

    def work(self, width: int) -> roofline.Work:
        return roofline.backbone_work(self.vanilla.runtime.prefill_params, self.config, batch=self.batch, width=width, num_slots=self.num_slots)

    def layout(self, width: int) -> tuple[str, backbone_lib.Backbone, Any]:
        """Name, module and parameters that the loop takes for passes of this width."""
        job = dataclasses.replace(self.vanilla, rules=dataclasses.replace(self.vanilla.rules, num_draft=width - 1))
        module, params = job.backbone
        return "column_blocks" if module.column_blocks else "plain", module, params

    def programs(self) -> dict[Key, timing.Timed]:
        """All that takes turns."""
        count = self.plan.passes
        matrix = roofline.read_matrix(self.weight_bytes["total"], self.config.width, self.config.dtype)
        found: dict[Key, timing.Timed] = {MATVEC: timing.Timed(lambda: (), lambda _: roofline.matvec(matrix, count), count)}
        if jax.default_backend() == "cpu":
            read = roofline.threaded_read(matrix)
            found[READ] = timing.Timed(lambda: (), lambda _: read())
        found[ONE_TOKEN] = self._steps(self.vanilla)
        for width in self.plan.all_widths:
            for name, module, params in self._layouts(width):
                found["verify", width, name] = self._verify(module, params, width)
        for num_draft, job in self.drafted.items():
            found["draft", num_draft, ""] = self._draft(job)
            found["step", num_draft, "drafter"] = self._steps(job)
        if self.nothing is not None:
            found["step", self.nothing.rules.num_draft, "none"] = self._steps(self.nothing)
        return found

    def _layouts(self, width: int) -> Iterator[tuple[str, backbone_lib.Backbone, Any]]:
        chosen = self.layout(width)
        yield chosen
        if self.plan.both_layouts:
            runtime = self.vanilla.runtime
            others = (("plain", runtime.prefill_module, runtime.prefill_params), ("column_blocks", runtime.step_module, runtime.step_params))
            yield from (other for other in others if other[1] != chosen[1] and other[1].column_blocks == (other[0] == "column_blocks"))

    def _steps(self, job: generate_lib.Job) -> timing.Timed:
        state, count = job.prefill(), self.plan.passes
        if bool(state.done.any()):
            raise RuntimeError("a row is done before its first step")

        def run(given: loop.DecodeState) -> loop.DecodeState:
            return job.decode(given, at_most=count)

        return timing.Timed(partial(jax.tree.map, jnp.copy, state), run, count)

    def _verify(self, module: backbone_lib.Backbone, params: Any, width: int) -> timing.Timed:
        state = self.vanilla.prefill()
        tokens = jnp.broadcast_to(state.pending[:, None], (self.batch, width))
        run = partial(_verify_passes, module, params, tokens, count=jnp.int32(self.plan.passes))
        return timing.Timed(partial(jax.tree.map, jnp.copy, state.cache), run, self.plan.passes)

    def _draft(self, job: generate_lib.Job) -> timing.Timed:
        state, runtime = job.prefill(), job.runtime
        assert runtime.drafter is not None
        context = loop.context_of(state, job.backbone[1], job.request)
        run = partial(_drafts, runtime.drafter, job.rules, runtime.drafter_params, state.drafter_state, context, jnp.int32(self.plan.passes))
        return timing.Timed(lambda: (), lambda _: run(), self.plan.passes)


def make_bed(vanilla: generate_lib.Runtime, drafted: generate_lib.Runtime | None, text: Sequence[int], plan: Plan) -> Bed:
    """Jobs with a budget that no run uses up, and with as many slots for each M.

    Raises:
      PromptError: the context and what is written after it exceed the backbone's positions.
    """
    most = max(plan.num_drafts)
    prompt = np.resize(np.asarray(text), plan.context).tolist()
    budget = max(plan.passes * (most + 1) + 2, max(plan.all_widths))

    def job(runtime: generate_lib.Runtime, num_draft: int) -> generate_lib.Job:
        config = config_lib.DecodeConfig(max_new_tokens=budget + most - num_draft, num_draft=num_draft, window_cache="full")
        return generate_lib.make_job(runtime, [prompt] * plan.batch_sizes[0], config)

    return Bed(
        plan,
        vanilla=job(vanilla, 0),
        drafted={} if drafted is None else {num_draft: job(drafted, num_draft) for num_draft in plan.num_drafts},
        nothing=None if drafted is None else job(vanilla.at_fixed_width(), most),
    )


@partial(jax.jit, static_argnames=("module",), donate_argnames=("cache",))
def _verify_passes(module: backbone_lib.Backbone, params: Any, tokens: Int[Array, "B T"], cache: cache_lib.Cache, count: Int[Array, ""]) -> Any:
    """`count` passes to the same slots; each reads the tokens that the one before chose."""

    def body(_: Array, carry: tuple[Array, cache_lib.Cache]) -> tuple[Array, cache_lib.Cache]:
        output = module.apply({"params": params}, carry[0], carry[1])
        assert isinstance(output, backbone_lib.BackboneOutput) and output.logits is not None
        return jnp.argmax(output.logits, axis=-1).astype(jnp.int32), output.cache

    return lax.fori_loop(0, count, body, (tokens, cache))


@partial(jax.jit, static_argnames=("drafter", "rules"))
def _drafts(
    drafter: drafters.Drafter, rules: loop.Rules, params: Any, drafter_state: Any, context: drafters.Context, count: Int[Array, ""]
) -> tuple[Array, Array, Any]:
    """`count` times M drafts at the same place; each follows the last token that the time before drafted."""

    def body(_: Array, carry: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        pending, tokens, own = carry
        proposal, own = drafter.draft(params, own, context.replace(pending=pending, tokens=tokens), rules)
        pending = jnp.maximum(proposal.tokens[:, -1], 0)
        return pending, tokens.at[:, -1].set(pending), own  # so that nothing read off the text can be moved out of the loop

    return lax.fori_loop(0, count, body, (context.pending, context.tokens, drafter_state))


def _passes(bed: Bed, seconds: dict[Key, list[float]]) -> dict[str, Any]:
    """Times and ratios, of each kind in the order of size."""
    unit = seconds[ONE_TOKEN]

    def measured(key: Key) -> dict[str, float]:
        return {"ms": timing.milliseconds(seconds[key]), "ratio": timing.ratio(seconds[key], unit)}

    def step(key: Key) -> dict[str, Any]:
        _, num_draft, who = key
        parts = [seconds["verify", num_draft + 1, bed.layout(num_draft + 1)[0]]]
        if who == "drafter":
            parts.append(seconds["draft", num_draft, ""])
        overhead = [whole - sum(others) for whole, *others in zip(seconds[key], *parts, strict=True)]
        return {
            "num_draft": num_draft,
            "drafter": who,
            **measured(key),
            "overhead_ms": timing.milliseconds(overhead),
            "overhead_ratio": timing.ratio(overhead, unit),
        }

    return {
        "one_token": measured(ONE_TOKEN),
        "verify": [{"width": key[1], "layout": key[2], **measured(key)} for key in seconds if key[0] == "verify"],
        "draft": [{"num_draft": key[1], **measured(key)} for key in seconds if key[0] == "draft"],
        "steps": [step(key) for key in seconds if key[0] == "step"],
    }


def _predicted(passes: dict[str, Any], end_to_end: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Speed by num_draft from the times of passes and drafts and the acceptance of the longest drafts; None without decoded prompts."""
    if not end_to_end:
        return None
    longest = max(end_to_end, key=lambda item: item["num_draft"])
    verify = {item["width"]: item["ms"] for item in reversed(passes["verify"])}  # of two layouts, the one that the loop takes comes first
    draft = {item["num_draft"]: item["ms"] for item in passes["draft"]}
    found = adaptive.speedups(verify, draft, longest["accept_unconditional"])
    best = adaptive.best_num_draft(verify, draft, longest["accept_unconditional"])
    return {"speedups": {str(num_draft): round(value, 4) for num_draft, value in found.items()}, "best_num_draft": best}


def _roofline(bed: Bed, head: LoadedHead | None, seconds: dict[Key, list[float]], accelerators: Sequence[roofline.Accelerator]) -> dict[str, Any]:
    """What a step reads, what this device reads in a second, and what others would need."""
    weights, size, work = bed.weight_bytes, jnp.dtype(bed.config.dtype).itemsize, bed.work(1)
    matrix_bytes = max(weights["total"] // (bed.config.width * size), 1) * bed.config.width * size
    bandwidth = {name: matrix_bytes / statistics.median(seconds[key]) for name, key in (("matvec", MATVEC), ("read", READ)) if key in seconds}
    best = (weights["total"] + work.cache * size) / max(bandwidth.values())
    compiled = loop.decode.lower(*_decode_arguments(bed.vanilla), config=bed.vanilla.rules).compile()
    draft = roofline.Work()
    if bed.drafted and head is not None:
        draft = roofline.head_work(head.params, head.config, bed.config, batch=bed.batch, num_slots=bed.num_slots)
    verify = {num_draft: bed.work(num_draft + 1) for num_draft in bed.drafted}
    return {
        "weight_bytes": weights,
        "cache_bytes": work.cache * size,
        "flops": work.flops,
        "compiled": roofline.compiled_cost(compiled),
        "gb_per_second": {name: round(value / 1e9, 4) for name, value in bandwidth.items()},
        "best_ms": round(best * 1e3, 4),
        "one_token_ms": timing.milliseconds(seconds[ONE_TOKEN]),
        "one_token_over_best": round(statistics.median(seconds[ONE_TOKEN]) / best, 4),
        "accelerators": [roofline.predict(device, work, verify, draft) for device in accelerators],
    }


def _decode_arguments(job: generate_lib.Job) -> tuple[Any, ...]:
    module, params = job.backbone
    return module, job.runtime.drafter, params, job.runtime.drafter_params, job.prefill(), job.request, loop.WITHOUT_END


def _end_to_end(
    vanilla: generate_lib.Runtime,
    drafted: generate_lib.Runtime | None,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    config: config_lib.DecodeConfig,
    plan: Plan,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Every prompt with and without the drafter, by batch size and M; of each group of prompts the median time over the rounds."""
    num_drafts = plan.num_drafts if drafted is not None else (0,)
    sizes = [(batch, num_draft) for batch in plan.batch_sizes for num_draft in num_drafts]
    warmed: set[tuple[int, ...]] = set()
    for place, (batch, num_draft) in enumerate(sizes):
        rounds: list[list[acceptance.Pair]] = []
        for number in range(plan.decode_rounds):
            rounds.append([])
            for index, group in enumerate(acceptance.groups(prompts, ids, batch)):
                padded = group + group[-1:] * (batch - len(group))
                rows, asked = [ids[i] for i in padded], dataclasses.replace(config, num_draft=num_draft)
                first = (number + index) % 2 == 1
                plain, fast = acceptance.side_by_side(vanilla, drafted, rows, asked, warmed, row_numbers=padded, drafted_first=first)
                rounds[-1].append(acceptance.make_pair(prompts[group[0]].task, group, plain, fast))
            progress(place * plan.decode_rounds + number + 1, len(sizes) * plan.decode_rounds)
        pairs = [_median_pair(same) for same in zip(*rounds, strict=True)]
        found = acceptance.differences(pairs)
        yield {
            "batch_size": batch,
            "num_draft": num_draft,
            **acceptance.summary(pairs, num_draft),
            "state_bytes": max(pair.state_bytes for pair in pairs),
            "differences": found[: acceptance.MAX_DIFFERENCES],
        }


def _median_pair(pairs: Sequence[acceptance.Pair]) -> acceptance.Pair:
    """One group of prompts, decoded several times: its output, and its median times."""
    return dataclasses.replace(
        pairs[0],
        vanilla_seconds=statistics.median(pair.vanilla_seconds for pair in pairs),
        drafted_seconds=statistics.median(pair.drafted_seconds for pair in pairs),
    )
