"""Drafters side by side: the same prompts, the same loop, vanilla beside each in the same process.

    python experiments/compare.py --prompts *_test.jsonl --limit 10 --method ours=mtp copy=prompt_lookup eagle=eagle@runs/eagle \\
        --num-drafts 2 4 8 --repeats 3 --work /tmp/compare --out experiments/results/comparison.json

A method is NAME=DRAFTER or NAME=DRAFTER@HEAD, with HEAD a folder or a shipped name. Each is run with each of --num-drafts (a Medusa with as
many as it has heads, at most). What is in the result file is not run again, and a run that was stopped goes on where it was. `mtp-jax report`
makes tables and plots of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.decoding import generate
from mtp_jax.evaluation import acceptance, roofline

STATE_SLOTS = (512, 4096)
PREFILL_ROUNDS = 5
SPLIT_PROMPTS = 3  # decoded step by step, for the share of drafting


@dataclass(frozen=True)
class Method:
    """One way to draft."""

    name: str
    drafter: config_lib.DrafterName
    head: str | None = None  # folder or shipped name

    @classmethod
    def parse(cls, text: str) -> Method:
        """NAME=DRAFTER[@HEAD].

        Raises:
          ValueError: another form, or no such drafter.
        """
        name, equals, rest = text.partition("=")
        drafter, _, head = rest.partition("@")
        if not (name and equals) or drafter not in generate.DRAFTERS:
            raise ValueError(f"--method {text!r}: must be NAME=DRAFTER or NAME=DRAFTER@HEAD with DRAFTER one of {', '.join(generate.DRAFTERS)}")
        return cls(name, drafter, head or None)


def compare(
    backbone: load.LoadedBackbone,
    methods: Sequence[Method],
    heads: dict[str, load.LoadedHead],
    prompts: Sequence[prompts_lib.Prompt],
    config: config_lib.DecodeConfig,
    num_drafts: Sequence[int],
    out: Path,
    work: Path,
    *,
    repeats: int = 1,
) -> dict[str, Any]:
    """Run all methods that `out` does not hold yet, and write it after each.

    Args:
      heads: by the method's name; those without a head are left out.
      config: budget and sampling; its num_draft and short_drafts are replaced.
      num_drafts: each M that every method is run with.
      work: folder for journals.
      repeats: runs over all prompts; wall clock is the median of them.

    Raises:
      ValueError: `out` was made with other settings.
    """
    settings = {
        "backbone": backbone.name,
        "prompts": {"count": len(prompts), "tasks": sorted({prompt.task for prompt in prompts}), "digest": prompts_lib.digest(prompts)},
        "decode": {name: getattr(config, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "accept", "seed")},
        "repeats": repeats,
        "machine": {"processor": processor(), "cores": os.cpu_count(), "platform": jax.devices()[0].platform, "python": platform.python_version()},
        "jax": jax.__version__,
    }
    result = json.loads(out.read_text()) if out.exists() else {"settings": settings, "methods": {}}
    if result["settings"] != settings:
        raise ValueError(f"{out}: was made with other settings; choose another --out")
    for method in methods:
        head = heads.get(method.name)
        for num_draft in num_drafts:
            key = f"{method.name}, M = {num_draft}"
            most = getattr(head.config, "num_draft", 0) if head is not None else 0
            if key in result["methods"] or 0 < most < num_draft:
                continue
            result["methods"][key] = _measure(backbone, method, head, prompts, config, num_draft, work, repeats)
            files.write_json(out, result)
            values = result["methods"][key]["overall"]
            shared.say(f"{key}: {values['tokens_per_step']:.2f} tokens per step, {values['speedup']:.2f}x, {values['identical']}/{values['prompts']} identical")
    return result


def _measure(
    backbone: load.LoadedBackbone,
    method: Method,
    head: load.LoadedHead | None,
    prompts: Sequence[prompts_lib.Prompt],
    config: config_lib.DecodeConfig,
    num_draft: int,
    work: Path,
    repeats: int,
) -> dict[str, Any]:
    short = tuple(drafts for drafts in config_lib.DRAFT_LENGTHS[method.drafter][1] if drafts < num_draft)
    config = config_lib.DecodeConfig(**(config_lib.to_dict(config) | {"num_draft": num_draft, "short_drafts": short}))
    runs = []
    for repeat in range(repeats):
        journal = work / f"{''.join(c if c.isalnum() else '_' for c in method.name)}_{num_draft}_{repeat}.jsonl"
        with shared.progress(f"{method.name}, M = {num_draft}, run {repeat + 1} of {repeats}") as report:
            runs.append(
                acceptance.evaluate(
                    backbone, head, prompts, config, drafter=method.drafter, journal=journal, progress=lambda done, total: report(done, total, "")
                )
            )
    measured = runs[0]
    for part, others in [(measured["overall"], [run["overall"] for run in runs])] + [
        (values, [run["tasks"][task] for run in runs]) for task, values in measured["tasks"].items()
    ]:
        part["speedups"] = [other["speedup"] for other in others]
        part["speedup"] = round(statistics.median(part["speedups"]), 4)
        part["identical"] = min(other["identical"] for other in others)
        part["passes_per_100_tokens"] = round(100 / part["tokens_per_step"], 2) if part["tokens_per_step"] else None
        for name in ("vanilla_tokens_per_second", "tokens_per_second"):
            part.pop(name)  # absolute times of one run mean little
    return {
        "name": method.name,
        "drafter": method.drafter,
        "num_draft": num_draft,
        "short_drafts": list(short),
        "overall": measured["overall"],
        "tasks": measured["tasks"],
        "costs": _costs(backbone, method, head, prompts, config, measured["overall"]["tokens_per_step"]),
    }


def _costs(
    backbone: load.LoadedBackbone,
    method: Method,
    head: load.LoadedHead | None,
    prompts: Sequence[prompts_lib.Prompt],
    config: config_lib.DecodeConfig,
    tokens_per_step: float,
) -> dict[str, Any]:
    vanilla = generate.make_runtime(backbone)
    drafted = generate.attach(vanilla, head, method.drafter)
    assert drafted.drafter is not None
    config = generate.with_stop_tokens(config, backbone)
    ids = sorted((generate.encode_prompt(backbone, prompt.text) for prompt in prompts), key=len)
    typical = ids[len(ids) // 2]
    split = [generate.run(drafted, [tokens], config, split_times=True, warm_up=True) for tokens in ids[len(ids) // 2 :][:SPLIT_PROMPTS]]
    draft, whole = sum(run.draft_seconds or 0.0 for run in split), sum(run.decode_seconds for run in split)
    states = {str(slots): state_bytes(drafted, slots) for slots in STATE_SLOTS}
    return {
        "parameter_bytes": drafted.drafter_bytes()["parameters"],
        "state_bytes": states,
        "draft_share": round(draft / whole, 4) if whole else 0.0,
        "prefill_added_ms": round(prefill_added(vanilla, drafted, typical, config), 3),
        "prefill_tokens": len(typical),
        "bytes_per_token": round(bytes_per_step(backbone, method, head, config) / tokens_per_step) if tokens_per_step else None,
    }


def state_bytes(runtime: generate.Runtime, slots: int) -> int:
    """Bytes of the drafter's state for one row of so many slots; nothing is allocated."""
    drafter = runtime.drafter
    assert drafter is not None
    state = jax.eval_shape(lambda: drafter.init(1, slots))
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def prefill_added(vanilla: generate.Runtime, drafted: generate.Runtime, prompt: list[int], config: config_lib.DecodeConfig) -> float:
    """Milliseconds that the drafter adds to the prefill of a prompt: median of the differences of runs in turn."""
    jobs = [generate.make_job(runtime, [prompt], config) for runtime in (vanilla, drafted)]
    for job in jobs:
        jax.block_until_ready(job.prefill())
    differences = []
    for _ in range(PREFILL_ROUNDS):
        times = []
        for job in jobs:
            start = time.perf_counter()
            jax.block_until_ready(job.prefill())
            times.append(time.perf_counter() - start)
        differences.append((times[1] - times[0]) * 1e3)
    return statistics.median(differences)


def bytes_per_step(backbone: load.LoadedBackbone, method: Method, head: load.LoadedHead | None, config: config_lib.DecodeConfig, num_slots: int = 512) -> int:
    """Bytes that one step reads at least, at 512 slots: a verify pass, and M draft steps if the drafter runs one after the other."""
    size = np.dtype(backbone.config.dtype).itemsize
    work = roofline.backbone_work(backbone.params, backbone.config, batch=1, width=config.num_draft + 1, num_slots=num_slots)
    read = work.elements
    if head is not None:
        steps = min(config.num_draft, 4) if method.drafter == "hybrid" else config.num_draft
        read += roofline.head_work(head.params, head.config, backbone.config, batch=1, num_slots=num_slots).times(steps).elements
    elif method.drafter == "early_exit":
        share = (config.exit_layer or backbone.config.num_layers // 2) / backbone.config.num_layers
        read += config.num_draft * round(share * (work.layers + work.cache) + work.unembedding)
    return read * size


def processor() -> str:
    """Name of the processor and its widest vectors."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), platform.processor())
    vectors = next((name for name in ("avx512f", "avx2") if f" {name} " in text), "")
    return f"{model} {vectors}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help='JSON lines with "prompt" and perhaps "task"')
    parser.add_argument("--limit", type=int, default=10, help="prompts of each task, drawn by --seed")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are not drawn")
    parser.add_argument("--method", nargs="+", required=True, metavar="NAME=DRAFTER[@HEAD]")
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[4])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--accept", choices=("match", "rejection"), default="match")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the drawing, and of sampled answers")
    parser.add_argument("--work", type=Path, required=True, help="folder for journals; kept, so that a stopped run goes on")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        methods = [Method.parse(text) for text in args.method]
        backbone = shared.load_backbone(args.backbone)
        heads = {}
        for method in methods:
            if method.drafter not in config_lib.HEADLESS:
                heads[method.name] = load.load_head(method.head or shared.head_name(args.backbone, "auto") or "", backbone)
        prompts = draw(backbone, prompts_lib.read(args.prompts), args.limit, args.max_prompt_tokens, args.seed)
        config = config_lib.DecodeConfig(max_new_tokens=args.max_new_tokens, temperature=args.temperature, accept=args.accept, seed=args.seed)
        args.work.mkdir(parents=True, exist_ok=True)
        compare(backbone, methods, heads, prompts, config, args.num_drafts, args.out, args.work, repeats=args.repeats)
    except (ValueError, OSError) as error:  # every error of the package about what it was given is one
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return 0


def draw(backbone: load.LoadedBackbone, prompts: Sequence[prompts_lib.Prompt], limit: int, max_tokens: int, seed: int) -> list[prompts_lib.Prompt]:
    """`limit` prompts of each task that are no longer than max_tokens, drawn by the seed, in the order of the files."""
    chosen: list[int] = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        members = [i for i, prompt in enumerate(prompts) if prompt.task == task]
        order = np.random.default_rng((seed, len(chosen))).permutation(members).tolist()
        fitting = (i for i in order if len(generate.encode_prompt(backbone, prompts[i].text)) <= max_tokens)
        chosen += sorted(index for _, index in zip(range(limit), fitting, strict=False))
    return [prompts[i] for i in chosen]


if __name__ == "__main__":
    sys.exit(main())
