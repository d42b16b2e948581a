"""Cost of one backbone pass by number of rows, in both kernel layouts, inside the compiled loop.

    python experiments/step_cost.py --out experiments/results/step_cost.json

Every (layout, rows) pair runs 20 passes inside one `lax.while_loop`; pairs are visited in turn, several rounds, and the
median is kept. Figures are ratios to the plain one-row pass of the same process; absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

import mtp_jax
from mtp_jax import files
from mtp_jax.decoding.generate import make_runtime
from mtp_jax.models import cache as cache_lib

PASSES = 20


def looped(module, rows: int):
    """`PASSES` passes over the same `rows` tokens, cache carried."""

    def run(params, cache):
        tokens = jnp.ones((1, rows), jnp.int32)

        def body(carry):
            i, cache, total = carry
            output = module.apply({"params": params}, tokens, cache)
            return i + 1, output.cache, total + output.logits.sum()

        return jax.lax.while_loop(lambda carry: carry[0] < PASSES, body, (0, cache, 0.0))

    return jax.jit(run, donate_argnames=("cache",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 9])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--out", default="experiments/results/step_cost.json")
    args = parser.parse_args()

    backbone = mtp_jax.load_backbone(args.backbone)
    runtime = make_runtime(backbone, column_blocks=True)
    layouts = {"plain": (runtime.prefill_module, runtime.prefill_params), "column_blocks": (runtime.step_module, runtime.step_params)}

    def cache():
        return cache_lib.empty(backbone.config, 1, args.slots).replace(lengths=jnp.array([128], jnp.int32))

    programs = {}
    for layout, (module, params) in layouts.items():
        for rows in args.rows:
            programs[layout, rows] = (looped(module, rows), params)
            jax.block_until_ready(programs[layout, rows][0](params, cache()))
    seconds = {key: [] for key in programs}
    for _ in range(args.rounds):
        for key, (program, params) in programs.items():
            fresh = jax.block_until_ready(cache())
            start = time.perf_counter()
            jax.block_until_ready(program(params, fresh))
            seconds[key].append((time.perf_counter() - start) / PASSES)
    unit = statistics.median(seconds["plain", 1])
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(runtime.prefill_params))
    result = {
        "experiment": "step_cost",
        "backbone": args.backbone,
        "slots": args.slots,
        "rounds": args.rounds,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "weight_bytes": weight_bytes,
        "milliseconds": {layout: {rows: round(statistics.median(seconds[layout, rows]) * 1e3, 2) for rows in args.rows} for layout in layouts},
        "ratio_to_plain_one_row": {layout: {rows: round(statistics.median(seconds[layout, rows]) / unit, 3) for rows in args.rows} for layout in layouts},
    }
    files.write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
