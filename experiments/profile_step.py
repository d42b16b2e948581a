"""Where the time of a decode step goes, by operation of the compiled program, from XLA's own trace.

    python experiments/profile_step.py --out experiments/results/profile.json

Each way of decoding runs a number of steps of its loop under the profiler; the times of equal operations are added up. Operations
run on two threads at once, so the sum of their times is more than that of the step. `--table` prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.decoding import generate

CONTEXT, WARM_STEPS, STEPS, ROUNDS = 128, 3, 20, 3
SHOWN = 8
PRODUCTS = ("ynn_fusion", "dot", "wrapped_dot")  # what XLA's CPU backend calls matrix products


def profile(job: generate.Job) -> dict[str, Any]:
    """Milliseconds per step: of the step (median of ROUNDS, without the profiler), and of each operation."""
    state = jax.block_until_ready(job.decode(job.prefill(), WARM_STEPS))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        state = jax.block_until_ready(job.decode(state, STEPS))
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            state = jax.block_until_ready(job.decode(state, STEPS))
        (path,) = Path(folder).rglob("perfetto_trace.json.gz")
        with gzip.open(path) as file:
            trace = json.load(file)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    milliseconds: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, float] = collections.defaultdict(float)
    for event in events:
        name = event.get("name", "").split(".")[0]
        if event.get("ph") == "X" and name.islower() and ":" not in name and "$" not in name:  # the program's operations have such names
            milliseconds[name] += event["dur"] / 1e3 / STEPS
            calls[name] += 1 / STEPS
    products = sum(time for name, time in milliseconds.items() if name in PRODUCTS)
    most = sorted(milliseconds.items(), key=lambda item: -item[1])[:SHOWN]
    return {
        "step_ms": round(sorted(times)[ROUNDS // 2], 2),
        "products_ms": round(products, 2),
        "products": round(sum(count for name, count in calls.items() if name in PRODUCTS)),
        "others_ms": round(sum(milliseconds.values()) - products, 2),
        "others": round(sum(calls.values()) - sum(count for name, count in calls.items() if name in PRODUCTS)),
        "operations": [{"name": name, "ms": round(time, 3), "calls": round(calls[name], 1)} for name, time in most],
    }


def markdown(result: dict[str, Any]) -> str:
    lines = ["| loop | step, ms | matrix products, ms of both threads (number) | all else, ms (number) |", "|---|---|---|---|"]
    for name, found in result["loops"].items():
        lines.append(f"| {name} | {found['step_ms']:.1f} | {found['products_ms']:.1f} ({found['products']}) | {found['others_ms']:.1f} ({found['others']}) |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print the result file as Markdown and do nothing else")
    args = parser.parse_args()
    if not args.table:
        backbone = shared.load_backbone("smollm2-135m-instruct")
        vanilla = generate.make_runtime(backbone)
        runtimes = {
            "vanilla": (vanilla, 0),
            "vanilla, plain layout": (generate.make_runtime(backbone, column_blocks=False), 0),
            "vanilla at the width of a verify pass, 5 rows": (vanilla.at_fixed_width(), 4),
            "head, M = 4": (generate.attach(vanilla, load.load_head("smollm2-135m-instruct-mtp", backbone)), 4),
        }
        loops = {}
        for name, (runtime, num_draft) in runtimes.items():
            budget = (WARM_STEPS + STEPS * (ROUNDS + 1)) * (num_draft + 1) + 1
            config = config_lib.DecodeConfig(max_new_tokens=budget, num_draft=num_draft)
            shared.say(f"profiling: {name}")
            loops[name] = profile(generate.make_job(runtime, [list(range(100, 100 + CONTEXT))], config))
        versions = {"mtp_jax": mtp_jax.__version__, "jax": jax.__version__}
        files.write_json(args.out, {"backbone": backbone.name, "context": CONTEXT, "steps": STEPS, "versions": versions, "loops": loops})
    print(markdown(json.loads(args.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
