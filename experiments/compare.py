"""Drafters side by side: the same prompts, the same loop, one process.

    python experiments/compare.py --prompts *_test.jsonl --limit 10 long=2 --method ours=mtp copy=prompt_lookup eagle=eagle@runs/eagle \\
        --num-drafts 2 4 8 --repeats 3 --work /tmp/compare --out experiments/results/comparison.json

A method is NAME=DRAFTER or NAME=DRAFTER@HEAD, with HEAD a folder or a shipped name; or NAME=DRAFTER@HEAD,TASK:HEAD,.. with a head of their
own for some tasks. Each is run with each of --num-drafts (a Medusa with as many as it has heads, at most). Every prompt is decoded by vanilla and by
all of them in turn, in an order drawn anew, before the next prompt is, so that a machine that slows down or warms up hits all alike.

What is in the result file is not run again, and a run that was stopped goes on where it was. `mtp-jax report` makes tables and plots of the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.decoding import generate
from mtp_jax.evaluation import acceptance, journal, roofline

STATE_SLOTS = (512, 4096)
PREFILL_ROUNDS = 5
SPLIT_PROMPTS = 3  # decoded step by step, for the share of drafting
VANILLA = "vanilla"


@dataclass(frozen=True)
class Method:
    """One way to draft."""

    name: str
    drafter: config_lib.DrafterName
    heads: dict[str, str] = field(default_factory=dict)  # folder or shipped name, by task; "" is for every other task

    @classmethod
    def parse(cls, text: str) -> Method:
        """NAME=DRAFTER[@HEAD[,TASK:HEAD ..]].

        Raises:
          ValueError: another form, or no such drafter.
        """
        name, equals, rest = text.partition("=")
        drafter, at, listed = rest.partition("@")
        heads = {task: head for task, _, head in (item.rpartition(":") for item in listed.split(","))} if at else {}
        if not (name and equals) or drafter not in generate.DRAFTERS or (heads and "" not in heads) or not all(heads.values()):
            form = "NAME=DRAFTER or NAME=DRAFTER@HEAD or NAME=DRAFTER@HEAD,TASK:HEAD,.."
            raise ValueError(f"--method {text!r}: must be {form} with DRAFTER one of {', '.join(generate.DRAFTERS)}")
        return cls(name, drafter, heads)


@dataclass(frozen=True)
class Variant:
    """A method with a number of drafts."""

    method: Method
    heads: dict[str, load.LoadedHead]  # by task, as the method's; none if the drafter needs none
    config: config_lib.DecodeConfig

    @property
    def key(self) -> str:
        return f"{self.method.name}, M = {self.config.num_draft}"

    @property
    def head(self) -> load.LoadedHead | None:
        return self.heads.get("")

    def attach(self, vanilla: generate.Runtime) -> dict[str, generate.Runtime]:
        """Runtimes by task, as `heads`."""
        return {task: generate.attach(vanilla, head, self.method.drafter) for task, head in (self.heads or {"": None}).items()}


def compare(
    backbone: load.LoadedBackbone,
    methods: Sequence[Method],
    heads: dict[str, dict[str, load.LoadedHead]],
    prompts: Sequence[prompts_lib.Prompt],
    config: config_lib.DecodeConfig,
    num_drafts: Sequence[int],
    out: Path,
    work: Path,
    *,
    repeats: int = 1,
    repeat_max_tokens: int | None = None,
) -> dict[str, Any]:
    """Run all methods that `out` does not hold yet, and write it.

    Args:
      heads: by the method's name, then by task; methods without a head are left out.
      config: budget and sampling; its num_draft and short_drafts are replaced.
      num_drafts: each M that every method is run with.
      work: folder for journals.
      repeats: runs over the prompts; the seconds of a prompt are the median of its runs.
      repeat_max_tokens: longer prompts are run once, whatever `repeats`; None is no such limit.

    Raises:
      ValueError: `out` was made with other settings, or a journal with other heads.
    """
    config = generate.with_stop_tokens(config, backbone)
    settings = {
        "backbone": backbone.name,
        "prompts": {"count": len(prompts), "tasks": sorted({prompt.task for prompt in prompts}), "digest": prompts_lib.digest(prompts)},
        "decode": {name: getattr(config, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "accept", "seed")},
        "repeats": repeats,
        "repeat_max_tokens": repeat_max_tokens,
        **where_it_ran(),
    }
    result = json.loads(out.read_text()) if out.exists() else {"settings": settings, "methods": {}}
    if result["settings"] != settings:
        raise ValueError(f"{out}: was made with other settings; choose another --out")
    todo = [
        variant
        for method in methods
        for num_draft in num_drafts
        if (variant := _variant(method, heads.get(method.name, {}), config, num_draft)) is not None and variant.key not in result["methods"]
    ]
    if not todo:
        return result
    ids = [generate.encode_prompt(backbone, prompt.text) for prompt in prompts]
    generate.check_prompts(ids, backbone.config, config.max_new_tokens)
    digests = {variant.key: [acceptance.weights_digest(backbone, head) for head in variant.heads.values()] for variant in todo}
    path = work / f"{hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()[:12]}.jsonl"
    work.mkdir(parents=True, exist_ok=True)
    # not the repeats: those that are done serve a run with fewer or more of them, too
    records = journal.begin(path, {name: value for name, value in settings.items() if not name.startswith("repeat")} | {"heads": digests})
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    again = [i for i in by_length if repeat_max_tokens is None or len(ids[i]) <= repeat_max_tokens]
    rounds = [(repeat, i) for repeat in range(repeats) for i in (again if repeat else by_length)]
    records = [record for record in records if (record["repeat"], record["prompt"]) in set(rounds)]
    vanilla = generate.make_runtime(backbone)
    runtimes = {variant.key: variant.attach(vanilla) for variant in todo}
    _decode_all(vanilla, runtimes, {variant.key: variant.config for variant in todo} | {VANILLA: config}, prompts, ids, rounds, path, records)
    for variant in todo:
        jax.clear_caches()
        values = _summary(variant, _pairs(variant.key, prompts, records))
        overall = values["overall"]
        values["costs"] = _costs(backbone, variant, vanilla, runtimes.pop(variant.key), ids, overall["tokens_per_step"])
        result["methods"][variant.key] = values
        files.write_json(out, result)
        same = f"{overall['identical']}/{overall['prompts']} identical"
        shared.say(f"{variant.key}: {overall['tokens_per_step']:.2f} tokens per step, {overall['speedup']:.2f}x, {same}")
    return result


def _variant(method: Method, heads: dict[str, load.LoadedHead], config: config_lib.DecodeConfig, num_draft: int) -> Variant | None:
    """None if its heads cannot draft so many."""
    if any(0 < getattr(head.config, "num_draft", 0) < num_draft for head in heads.values()):
        return None
    short = tuple(drafts for drafts in config_lib.DRAFT_LENGTHS[method.drafter][1] if drafts < num_draft)
    return Variant(method, heads, dataclasses.replace(config, num_draft=num_draft, short_drafts=short))


def _decode_all(
    vanilla: generate.Runtime,
    runtimes: dict[str, dict[str, generate.Runtime]],
    configs: dict[str, config_lib.DecodeConfig],
    prompts: Sequence[prompts_lib.Prompt],
    ids: Sequence[list[int]],
    rounds: Sequence[tuple[int, int]],
    path: Path,
    records: list[dict[str, Any]],
) -> None:
    """Decode the prompt of each (repeat, prompt) in all ways; what `records` lacks is put in, and in the journal they come from."""
    done = {(record["repeat"], record["prompt"]) for record in records}
    warmed: set[tuple[Any, ...]] = set()
    before = None
    with shared.progress("compare") as report:
        for repeat, index in rounds:
            if (repeat, index) in done:
                continue
            now = acceptance.shape_of([ids[index]], configs[VANILLA].max_new_tokens, 0)
            if now != before:  # the programs of every method at every length are more memory maps than Linux allows a process
                jax.clear_caches()
                warmed.clear()
            before, results = now, {}
            for key in np.random.default_rng((repeat, index)).permutation([VANILLA, *runtimes]).tolist():
                by_task, config = {"": vanilla} if key == VANILLA else runtimes[key], configs[key]
                task = prompts[index].task if prompts[index].task in by_task else ""
                num_draft = 0 if key == VANILLA else config.num_draft
                shape = (key, task, *acceptance.shape_of([ids[index]], config.max_new_tokens, num_draft))
                run = generate.run(by_task[task], [ids[index]], config, warm_up=shape not in warmed, row_numbers=[index])
                warmed.add(shape)
                results[key] = {"output": dataclasses.asdict(run.outputs[0]), "seconds": run.prefill_seconds + run.decode_seconds}
            records.append({"repeat": repeat, "prompt": index, "results": results})
            journal.add(path, records[-1])
            report(len(records), len(rounds), "")


def _pairs(key: str, prompts: Sequence[prompts_lib.Prompt], records: Sequence[dict[str, Any]]) -> list[list[acceptance.Pair]]:
    """Of each prompt, every run beside vanilla's."""
    found: list[list[acceptance.Pair]] = [[] for _ in prompts]
    for record in sorted(records, key=lambda record: record["repeat"]):
        plain, fast, index = record["results"][VANILLA], record["results"][key], record["prompt"]
        outputs = ([generate.Output(**one["output"])] for one in (plain, fast))
        found[index].append(acceptance.Pair(prompts[index].task, [index], *outputs, plain["seconds"], fast["seconds"]))
    return found


def _summary(variant: Variant, prompts: Sequence[Sequence[acceptance.Pair]]) -> dict[str, Any]:
    """Figures of the first runs, with the median seconds of each prompt's runs; what is not identical in one run is not.

    `speedups` are those of each run, over the `repeated` prompts that are in all of them.
    """

    def over(task: str | None) -> dict[str, Any]:
        chosen = [runs for runs in prompts if task in (None, runs[0].task)]
        count = max(len(runs) for runs in chosen)
        repeated = [runs for runs in chosen if len(runs) == count]
        values = acceptance.summary([_median(runs) for runs in chosen], variant.config.num_draft)
        values["identical"] = sum(all(run.vanilla[0].tokens == run.drafted[0].tokens for run in runs) for runs in chosen)
        values["repeated"] = len(repeated)
        values["speedups"] = [acceptance.summary([runs[i] for runs in repeated], variant.config.num_draft)["speedup"] for i in range(count)]
        values["passes_per_100_tokens"] = round(100 / values["tokens_per_step"], 2) if values["tokens_per_step"] else None
        return {name: value for name, value in values.items() if "tokens_per_second" not in name}  # absolute times mean little

    tasks = list(dict.fromkeys(pair.task for pair, *_ in prompts))
    return {
        "name": variant.method.name,
        "drafter": variant.method.drafter,
        "num_draft": variant.config.num_draft,
        "short_drafts": list(variant.config.short_drafts),
        "heads": {task or "every other task": trained_how(head) for task, head in variant.heads.items()},
        "overall": over(None),
        "tasks": {task: over(task) for task in tasks},
    }


def _median(runs: Sequence[acceptance.Pair]) -> acceptance.Pair:
    """The first run, as long as the median one."""
    plain, fast = (statistics.median(getattr(run, name) for run in runs) for name in ("vanilla_seconds", "drafted_seconds"))
    return dataclasses.replace(runs[0], vanilla_seconds=plain, drafted_seconds=fast)


def trained_how(head: load.LoadedHead) -> dict[str, Any]:
    """What a head's card says of its training, in a few words."""
    config = head.card.get("train_config", {})
    named = {name: config[name] for name in ("optimizer", "learning_rate", "steps", "batch_size", "rows_per_sequence", "seed") if name in config}
    parameters = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    return {"name": head.name, "parameters": parameters, "draft_vocabulary": len(head.draft_ids)} | ({"training": named} if named else {})


def _costs(
    backbone: load.LoadedBackbone,
    variant: Variant,
    vanilla: generate.Runtime,
    by_task: dict[str, generate.Runtime],
    ids: Sequence[list[int]],
    tokens_per_step: float,
) -> dict[str, Any]:
    """Bytes of all heads; everything else is that of the head for most tasks."""
    drafted, config = by_task[""], variant.config
    ids = sorted(ids, key=len)
    typical = ids[len(ids) // 2]
    split = [generate.run(drafted, [tokens], config, split_times=True, warm_up=True) for tokens in ids[len(ids) // 2 :][:SPLIT_PROMPTS]]
    draft, whole = sum(run.draft_seconds or 0.0 for run in split), sum(run.decode_seconds for run in split)
    return {
        "parameter_bytes": sum(runtime.drafter_bytes()["parameters"] for runtime in by_task.values()),
        "state_bytes": {str(slots): state_bytes(drafted, slots) for slots in STATE_SLOTS},
        "draft_share": round(draft / whole, 4) if whole else 0.0,
        "prefill_added_ms": round(prefill_added(vanilla, drafted, typical, config), 3),
        "prefill_tokens": len(typical),
        "bytes_per_token": round(bytes_per_step(backbone, variant) / tokens_per_step) if tokens_per_step else None,
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


def bytes_per_step(backbone: load.LoadedBackbone, variant: Variant, num_slots: int = 512) -> int:
    """Bytes that one step reads at least, at 512 slots: a verify pass, and M draft steps if the drafter runs one after the other."""
    method, head, config = variant.method, variant.head, variant.config
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


def where_it_ran() -> dict[str, Any]:
    """Machine and versions, for a result's settings."""
    device = jax.devices()[0]
    return {
        "machine": {"processor": processor(), "cores": os.cpu_count(), "platform": device.platform, "device": device.device_kind},
        "versions": {"mtp_jax": mtp_jax.__version__, "jax": jax.__version__, "python": platform.python_version()},
    }


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
    parser.add_argument("--limit", nargs="+", default=["10"], metavar="N [TASK=N]", help="prompts of each task, drawn by --seed; other numbers for some tasks")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024, help="longer prompts are not drawn")
    parser.add_argument("--method", nargs="+", required=True, metavar="NAME=DRAFTER[@HEAD[,TASK:HEAD..]]")
    parser.add_argument("--num-drafts", type=int, nargs="+", default=[4])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--accept", choices=("match", "rejection"), default="match")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--repeat-max-tokens", type=int, help="longer prompts are run once, whatever --repeats")
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
                named = method.heads or {"": shared.head_name(args.backbone, "auto") or ""}
                heads[method.name] = {task: load.load_head(head, backbone) for task, head in named.items()}
        prompts = draw(backbone, prompts_lib.read(args.prompts), limits(args.limit), args.max_prompt_tokens, args.seed)
        config = config_lib.DecodeConfig(max_new_tokens=args.max_new_tokens, temperature=args.temperature, accept=args.accept, seed=args.seed)
        compare(backbone, methods, heads, prompts, config, args.num_drafts, args.out, args.work, repeats=args.repeats, repeat_max_tokens=args.repeat_max_tokens)
    except (ValueError, OSError) as error:  # every error of the package about what it was given is one
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return 0


def limits(texts: Sequence[str]) -> dict[str, int]:
    """Prompts by task, of N or TASK=N; "" is every other task.

    Raises:
      ValueError: another form, or no number for every other task.
    """
    found = {task: int(number) if number.isdecimal() else -1 for task, _, number in (text.rpartition("=") for text in texts)}
    if "" not in found or min(found.values()) < 0:
        raise ValueError(f"--limit {' '.join(texts)!r}: must be N, and then perhaps TASK=N, with whole numbers that are not negative")
    return found


def draw(backbone: load.LoadedBackbone, prompts: Sequence[prompts_lib.Prompt], limit: dict[str, int], max_tokens: int, seed: int) -> list[prompts_lib.Prompt]:
    """Prompts of each task that are no longer than max_tokens, drawn by the seed, in the order of the files.

    Raises:
      ValueError: a limit for a task that no prompt is of.
    """
    if missing := sorted(set(limit) - {"", *(prompt.task for prompt in prompts)}):
        raise ValueError(f"--limit {missing[0]}={limit[missing[0]]}: no prompt is of this task")
    chosen: list[int] = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        members = [i for i, prompt in enumerate(prompts) if prompt.task == task]
        order = np.random.default_rng((seed, len(chosen))).permutation(members).tolist()
        fitting = (i for i in order if len(generate.encode_prompt(backbone, prompts[i].text)) <= max_tokens)
        chosen += sorted(index for _, index in zip(range(limit.get(task, limit[""])), fitting, strict=False))
    return [prompts[i] for i in chosen]


if __name__ == "__main__":
    sys.exit(main())
