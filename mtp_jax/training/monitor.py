"""What a run tells while it goes: one line of metrics.jsonl a step, TensorBoard, how hard the devices work, and a decode to compare with.

Model FLOPs are those of matrix products, 2 for each multiply-add, of one step's forward and backward pass: neither what the
compiler adds nor what rematerialisation does again, as utilisation is defined by Chowdhery et al. 2022 (PaLM, appendix B).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints.hf import read_json
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.training import data, sharding, walk
from mtp_jax.training import features as features_lib
from mtp_jax.training import loss as loss_lib
from mtp_jax.training import step as step_lib

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead

TOLERANCE = 0.1  # by which a decode's tokens per step may differ from the measured ones: rounding turns single drafts, a mistake turns most


class MonitorError(ValueError):
    """Something that was asked for can't be shown."""


@contextlib.contextmanager
def log(out: Path, step: int, *, tensorboard: bool = False) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """A function that writes the metrics of a step; in the first process only, elsewhere it does nothing.

    Args:
      out: run folder; metrics.jsonl is appended to, after dropping lines of steps beyond `step` and a last one that was cut off.
      step: that the run goes on from.
      tensorboard: write every number to `out`/tensorboard as well.

    Raises:
      MonitorError: tensorboardX is not installed.
    """
    with contextlib.ExitStack() as stack:
        if not sharding.is_first():
            yield lambda step, values: None
            return
        board = stack.enter_context(_board(out / "tensorboard", step)) if tensorboard else None
        kept = [line for line in files.whole_lines(out / "metrics.jsonl") if json.loads(line)["step"] <= step]
        files.write_text(out / "metrics.jsonl", "".join(line + "\n" for line in kept))

        def write(step: int, values: dict[str, Any]) -> None:
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
            if board is not None:
                for name, value in flat(values).items():
                    board.add_scalar(name, value, step)

        yield write


def _board(folder: Path, step: int) -> Any:
    try:
        import tensorboardX  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MonitorError("--tensorboard: needs tensorboardX: pip install 'mtp-jax[train]'") from None
    return tensorboardX.SummaryWriter(str(folder), purge_step=step + 1)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers among `values` by name, with names such as "held_out/tokens_per_step" and, for lists, "accept/1"."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(place): item for place, item in enumerate(value, 1)}
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


def step_flops(
    head: forms.AnyHead,
    config: config_lib.TrainConfig,
    state: step_lib.TrainState,
    frozen: loss_lib.Frozen,
    features: features_lib.Features,
    batch: data.Batch,
    backbone: tuple[backbone_lib.Backbone, Any] | None = None,
) -> int:
    """Model FLOPs of one optimizer step on all devices together; only shapes are looked at.

    Args:
      backbone: module and parameters, when its features are computed in the step.
    """
    plain = dataclasses.replace(config, accumulate=1, remat=False, rows_per_chunk=0, mesh=(1, 1, 1))
    flops = matmul_flops(lambda *arrays: step_lib.train_step(head, plain, *arrays), state, frozen, features, batch)
    if backbone is None:
        return flops
    module, params = backbone
    keys, values = tuple(sorted(features.keys)), tuple(sorted(features.values))

    def compute(params: Any, tokens: Any) -> features_lib.Features:
        return features_lib.compute(module, params, tokens, key_layers=keys, value_layers=values)

    return flops + matmul_flops(compute, params, batch.tokens)


def matmul_flops(function: Callable[..., Any], *args: Any) -> int:
    """FLOPs of the matrix products in `function(*args)`: 2 for each multiply-add. Loops without a fixed number of rounds count as one round."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), args)
    return _jaxpr_flops(jax.make_jaxpr(function)(*shapes).jaxpr)


def _jaxpr_flops(jaxpr: Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left: Any = equation.invars[0].aval
            out: Any = equation.outvars[0].aval
            total += 2 * math.prod(out.shape) * math.prod(left.shape[axis] for axis in contracted)
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, ClosedJaxpr | Jaxpr)):
            if isinstance(value, ClosedJaxpr | Jaxpr):
                total += rounds * _jaxpr_flops(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
    return total


def speed(seconds: float, tokens: int, flops: int, devices: int, peak_tflops: float | None) -> dict[str, float]:
    """Tokens and model FLOPs per second of all devices together; with the peak of one of them, the share of it that is used (mfu)."""
    found: dict[str, float] = {"tokens_per_second": round(tokens / seconds, 1), "flops_per_second": float(f"{flops / seconds:.4g}")}
    if peak_tflops is not None:
        found["mfu"] = round(flops / seconds / (peak_tflops * 1e12 * devices), 4)
    return found


def best_so_far(folder: Path) -> float | None:
    """Held-out tokens per step of the head in a folder, by the head's own record; None where there is none."""
    path = folder / "head.json"
    if not path.exists():
        return None
    return read_json(path).get("card", {}).get("metrics", {}).get("held_out", {}).get("tokens_per_step")


def decode(
    backbone: LoadedBackbone, head: LoadedHead, frozen: loss_lib.Frozen, examples: Sequence[data.Example], config: config_lib.TrainConfig
) -> dict[str, Any]:
    """Decode the shortest of the examples greedily with the head, and compare with what `walk.measure` says of them.

    The two agree where the text decoded is the example's answer, that is for the backbone's own greedy answers. A warning tells
    when they do not: then training does not see what decoding does.

    Args:
      examples: of which those with one answer at the end, not longer than config.max_length, count.

    Returns:
      prompts, of them `identical` to the example's answer, and tokens_per_step as decoded.
    """
    from mtp_jax.decoding import generate

    runtime = generate.make_runtime(backbone, head, drafter=head.config.drafter, column_blocks=False)  # no second copy of the backbone
    prompts = [example.tokens[~example.answer].tolist() for example in examples]
    answers = [example.tokens[example.answer].tolist() for example in examples]
    budgets = [len(answer) for answer in answers]
    rules = config_lib.DecodeConfig(max_new_tokens=max(budgets), num_draft=config.num_draft)
    outputs = generate.run(runtime, prompts, rules, budgets=budgets).outputs
    same = [index for index, output in enumerate(outputs) if output.tokens == answers[index]]
    decoded, steps = sum(len(outputs[index].tokens) - 1 for index in same), sum(outputs[index].steps for index in same)
    module = forms.make(head.config, backbone.config)
    measured = walk.measure(module, head.params, frozen, backbone, [examples[index] for index in same], config)
    if steps and abs(decoded / steps - measured.tokens_per_step) > TOLERANCE * measured.tokens_per_step:
        warnings.warn(
            f"decoding wrote {decoded / steps:.2f} tokens a step where {measured.tokens_per_step:.2f} were measured with the answers as input, "
            f"on the same {len(same)} texts: training and decoding do not run the same head",
            stacklevel=2,
        )
    committed, passes = sum(len(output.tokens) - 1 for output in outputs), sum(output.steps for output in outputs)
    return {"prompts": len(outputs), "identical": len(same), "tokens_per_step": round(committed / passes, 4) if passes else 0.0}


def decodable(examples: Sequence[data.Example], count: int, max_length: int) -> list[data.Example]:
    """The `count` shortest examples that are one prompt and one answer, at least two tokens long, and fit max_length."""
    chosen = [e for e in examples if len(e.tokens) <= max_length and e.answer.sum() >= 2 and (np.diff(e.answer.astype(int)) >= 0).all()]
    return sorted(chosen, key=lambda example: len(example.tokens))[:count]


__all__ = ["MonitorError", "best_so_far", "decodable", "decode", "flat", "log", "matmul_flops", "speed", "step_flops"]
