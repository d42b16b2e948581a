"""LOSSY: CALM's early exit by confidence beside vanilla decoding. Its text is not the backbone's; how far from it is what this measures.

    python experiments/lossy_exit.py --prompts *_test.jsonl --limit 10 --thresholds 0.3 0.6 0.9 --out experiments/results/lossy_exit.json
    python experiments/lossy_exit.py --table experiments/results/lossy_exit.json

What the numbers mean (of all prompts of a threshold, and of each task):

    layers                 mean share of the backbone's layers that a new token was computed by
    checks                 mean number of products with the unembedding for a new token; vanilla has one
    identical              texts whose tokens are vanilla's, every one
    common_prefix          tokens before the first difference / tokens of vanilla's text, mean over prompts
    teacher_forced         share of tokens of vanilla's text that the mode chooses when it reads vanilla's text, with K/V of its own making
    speedup                vanilla's seconds / the mode's, prefill included: sums over prompts of the median round
    speedup_per_token      the same for seconds per token written: a text that stops sooner or later is no gain or loss

Every prompt is decoded in both ways in one process, once to compile and then --rounds times in turn, order alternating. What is in the journal
beside --out is not decoded again. Every line that this prints says LOSSY.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compare

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.decoding import generate, lossy_exit
from mtp_jax.evaluation import acceptance, journal

NOTE = "LOSSY: not the backbone's own text; a baseline to compare with"


def measure(
    backbone: load.LoadedBackbone,
    prompts: Sequence[prompts_lib.Prompt],
    config: config_lib.DecodeConfig,
    exits: Sequence[int],
    thresholds: Sequence[float],
    out: Path,
    *,
    rounds: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Decode all prompts that the journal beside `out` does not hold yet, and write `out`.

    Args:
      config: budget and stop tokens; stop tokens left empty mean the tokenizer's.
      exits: layers before each exit (see decoding/lossy_exit.py).
      thresholds: each is a run of its own over all prompts.
      rounds: timed runs of each prompt and threshold, after one that is not.
      say: gets a line for each prompt.

    Raises:
      ConfigError: exits or thresholds against their rules.
      JournalError: the journal is of a run with other settings.
    """
    num_layers = backbone.config.num_layers
    exits, thresholds = lossy_exit.check_exits(exits, num_layers), [lossy_exit.check_threshold(threshold) for threshold in thresholds]
    config = generate.with_stop_tokens(config, backbone)
    settings = {
        "mode": NOTE,
        "backbone": backbone.name,
        "weights": acceptance.weights_digest(backbone, None),
        "num_layers": num_layers,
        "exits": list(exits),
        "thresholds": thresholds,
        "prompts": {"count": len(prompts), "tasks": sorted({prompt.task for prompt in prompts}), "digest": prompts_lib.digest(prompts)},
        "max_new_tokens": config.max_new_tokens,
        "dtype": backbone.config.dtype,
        "rounds": rounds,
        **compare.where_it_ran(),
    }
    path = journal.beside(out)
    records = journal.begin(path, settings)
    runtime = generate.make_runtime(backbone)
    for index in range(len(records), len(prompts)):  # a line of the journal for each prompt, in order
        ids = generate.encode_prompt(backbone, prompts[index].text)
        record = {"task": prompts[index].task, "found": [_one(runtime, ids, config, exits, threshold, rounds, index) for threshold in thresholds]}
        records.append(record)
        journal.add(path, record)
        shares = ", ".join(f"{found['layers']:.2f}" for found in record["found"])
        say(f"LOSSY prompt {index + 1} of {len(prompts)}: share of layers {shares}")
    result = {"settings": settings, "thresholds": [_summary(records, number, threshold) for number, threshold in enumerate(thresholds)]}
    files.write_json(out, result)
    return result


def _one(
    runtime: generate.Runtime, ids: list[int], config: config_lib.DecodeConfig, exits: tuple[int, ...], threshold: float, rounds: int, index: int
) -> dict[str, Any]:
    """One prompt at one threshold, JSON-ready; shares are of this prompt."""

    def vanilla() -> list[int]:
        return generate.run(runtime, [ids], config).outputs[0].tokens

    def lossy(text: list[int] | None = None) -> lossy_exit.LossyOutput:
        return lossy_exit.run(runtime, [ids], config, exits=exits, threshold=threshold, text=text)

    expected, found = vanilla(), lossy()
    forced = lossy(expected)
    seconds: dict[str, list[float]] = {"vanilla": [], "lossy": []}
    ways = {"vanilla": vanilla, "lossy": lossy}
    for number in range(rounds):
        for name in list(ways)[:: -1 if (index + number) % 2 else 1]:
            start = time.perf_counter()
            ways[name]()  # gives lists: done on return
            seconds[name].append(time.perf_counter() - start)
    num_layers = runtime.step_module.config.num_layers
    prefix = acceptance.first_difference(expected, found.tokens)
    return {
        "layers": statistics.mean(found.exit_layers) / num_layers,
        "checks": statistics.mean((*exits, num_layers).index(layer) + 1 for layer in found.exit_layers),
        "tokens": len(found.tokens),
        "vanilla_tokens": len(expected),
        "identical": prefix is None,
        "common_prefix": 1.0 if prefix is None else prefix / len(expected),
        "agreeing": sum(one == other for one, other in zip(expected, forced.tokens, strict=True)),
        "vanilla_seconds": statistics.median(seconds["vanilla"]),
        "lossy_seconds": statistics.median(seconds["lossy"]),
    }


def _summary(records: Sequence[dict[str, Any]], number: int, threshold: float) -> dict[str, Any]:
    found = [(record["task"], record["found"][number]) for record in records]
    tasks = {name: _figures([one for task, one in found if task == name]) for name in sorted({task for task, _ in found})}
    return {"mode": "LOSSY", "threshold": threshold, "overall": _figures([one for _, one in found]), "tasks": tasks}


def _figures(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(one[name] for one in found)

    def per_token(name: str) -> float:
        return round(sum(one[name] * one["tokens"] for one in found) / total("tokens"), 4)

    return {
        "prompts": len(found),
        "tokens": total("tokens"),
        "layers": per_token("layers"),
        "checks": per_token("checks"),
        "identical": total("identical"),
        "identical_share": round(total("identical") / len(found), 4),
        "common_prefix": round(total("common_prefix") / len(found), 4),
        "teacher_forced": round(total("agreeing") / total("vanilla_tokens"), 4),
        "vanilla_seconds": round(total("vanilla_seconds"), 4),
        "lossy_seconds": round(total("lossy_seconds"), 4),
        "speedup": round(total("vanilla_seconds") / total("lossy_seconds"), 4),
        "speedup_per_token": round(total("vanilla_seconds") / total("vanilla_tokens") * total("tokens") / total("lossy_seconds"), 4),
    }


def table(result: dict[str, Any]) -> str:
    """Markdown, a row for each task and threshold."""
    header = [
        "threshold", "task", "prompts", "layers computed", "unembeddings a token", "identical to vanilla", "common prefix", "teacher-forced agreement",
        "wall clock", "wall clock a token",
    ]  # fmt: skip
    lines = ["| mode | " + " | ".join(header) + " |", "|" + "---|" * (len(header) + 1)]
    for entry in result["thresholds"]:
        for task, values in [*entry["tasks"].items(), ("all", entry["overall"])]:
            cells = [f"{entry['threshold']:g}", task, str(values["prompts"]), f"{values['layers']:.2f}", f"{values['checks']:.2f}"]
            cells += [f"{values['identical']} / {values['prompts']}", f"{values['common_prefix']:.2f}", f"{values['teacher_forced']:.2f}"]
            cells += [f"{values['speedup']:.2f}x", f"{values['speedup_per_token']:.2f}x"]
            lines.append("| LOSSY | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=Path, nargs="+", help='JSON lines with "prompt" and perhaps "task"')
    parser.add_argument("--limit", nargs="+", default=["10"], metavar="N [TASK=N]", help="prompts of each task, drawn by --seed; other numbers for some tasks")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are not drawn")
    parser.add_argument("--exits", type=int, nargs="+", help="layers before each exit; by default a quarter, half and three quarters of them")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="RESULT", help="print a result as Markdown and do nothing else")
    args = parser.parse_args(argv)
    if args.table is None and (args.prompts is None or args.out is None):
        parser.error("LOSSY: needs --prompts and --out, or --table")
    try:
        if args.table is not None:
            print(table(json.loads(args.table.read_text())))
            return 0
        backbone = shared.load_backbone(args.backbone)
        layers = backbone.config.num_layers
        exits = args.exits or sorted({max(layers * quarter // 4, 1) for quarter in (1, 2, 3)})
        prompts = compare.draw(backbone, prompts_lib.read(args.prompts), compare.limits(args.limit), args.max_prompt_tokens, args.seed)
        config = config_lib.DecodeConfig(max_new_tokens=args.max_new_tokens)
        result = measure(backbone, prompts, config, exits, args.thresholds, args.out, rounds=args.rounds, say=shared.say)
        for entry in result["thresholds"]:
            values = entry["overall"]
            agreement = f"{values['identical']}/{values['prompts']} identical, teacher-forced agreement {values['teacher_forced']:.2f}"
            shared.say(f"LOSSY threshold {entry['threshold']:g}: {values['layers']:.2f} of the layers, {agreement}, {values['speedup']:.2f}x")
    except (ValueError, OSError) as error:  # every error of the package about what it was given is one
        print(f"lossy_exit, LOSSY: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
