"""One change at a time to the head and its training, on one budget, judged by acceptance as decoded.

    python experiments/ablate.py --rollouts train.jsonl --test test.jsonl --work /tmp/ablate --out experiments/results/ablations.json
    python experiments/ablate.py ... --only base lr_2e-3 pointer_off --seeds 2

Every variant trains afresh for the same number of steps on the same features of the same rollouts, and is then walked over the
test rollouts (greedy answers of the backbone to held-out prompts), which gives the tokens per step that the decoder would
reach. Variants that are in the result file already are not run again, so a run that was stopped goes on. `--table` prints the
result as Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, features, fit, walk

KEY_LAYERS, VALUE_LAYERS, MAX_LENGTH = (6, 12, 20, 29), (29,), 320
BASE_HEAD: dict[str, Any] = {"donors": (29,), "pointer_donors": (29, 20, 12, 6), "draft_vocab_size": 4096}
BASE_TRAIN: dict[str, Any] = {"optimizer": "muon", "learning_rate": 5e-3, "batch_size": 16, "rows_per_sequence": 32, "max_length": MAX_LENGTH}


@dataclass(frozen=True)
class Variant:
    """What one variant changes."""

    head: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0  # of the training sequences
    task: str | None = None  # trained on this task's sequences alone


VARIANTS: dict[str, Variant] = {
    "base": Variant(),
    "pointer: off": Variant(head={"pointer": False, "pointer_donors": ()}),
    "pointer: last layer's keys only": Variant(head={"pointer_donors": (29,)}),
    "pointer: two": Variant(head={"pointer_heads": 2}),
    "MLP: half as wide": Variant(head={"mlp_width": 768}),
    "head: half as wide": Variant(head={"width": 288, "num_heads": 9, "mlp_width": 768}),
    "donors: the last layer twice": Variant(head={"donors": (29, 29)}),
    "donors: last two layers": Variant(head={"donors": (28, 29)}),
    "donors: four, spread": Variant(head={"donors": (6, 12, 20, 29)}),
    "query position: last": Variant(head={"query_position": "last"}),
    "draft vocabulary: 8192": Variant(head={"draft_vocab_size": 8192}),
    "draft vocabulary: 16384": Variant(head={"draft_vocab_size": 16384}),
    "draft vocabulary: 2048": Variant(head={"draft_vocab_size": 2048}),
    "optimizer: AdamW 1e-3": Variant(train={"optimizer": "adamw", "learning_rate": 1e-3}),
    "learning rate: 1e-2": Variant(train={"learning_rate": 1e-2}),
    "learning rate: 2.5e-3": Variant(train={"learning_rate": 2.5e-3}),
    "rows: answers only": Variant(train={"rows": "answer"}),
    "step decay: 1.0": Variant(train={"step_decay": 1.0}),
    "step decay: 0.6": Variant(train={"step_decay": 0.6}),
    "trained on 2 drafts": Variant(train={"num_draft": 2}),
    "loss: hard cross-entropy": Variant(train={"loss": ("hard_ce",)}),
    "loss: total variation": Variant(train={"loss": ("tv",)}),
    "loss: LK hybrid": Variant(train={"loss": ("lk_hybrid",)}),
    "loss: 0.9 smooth-L1 of hidden states": Variant(train={"loss": ("hidden:0.9", "soft_ce:0.1")}),
    "after a miss: drop": Variant(train={"after_miss": "drop"}),
    "after a miss: weigh": Variant(train={"after_miss": "weigh"}),
    "normalise: by sequence": Variant(train={"normalise": "sequences"}),
    "data: 1/2": Variant(share=0.5),
    "data: 1/4": Variant(share=0.25),
    "data: 1/8": Variant(share=0.125),
    "trained on smart_reply alone": Variant(task="smart_reply"),
    "trained on proofread alone": Variant(task="proofread"),
}


def run(
    name: str, seed: int, args: argparse.Namespace, backbone: load.LoadedBackbone, store: features.FeatureStore, train: list[Any], test: list[Any]
) -> dict[str, Any]:
    """Train one variant and walk it over the test rollouts."""
    variant = VARIANTS[name]
    head_config = config_lib.head_config_for(backbone.config, **(BASE_HEAD | variant.head))
    config = config_lib.TrainConfig(**(BASE_TRAIN | variant.train), steps=args.steps, seed=seed, checkpoint_every=args.steps)
    order = np.random.default_rng(0).permutation(len(train))  # the same for every seed
    chosen = order[: max(round(variant.share * len(train)), config.batch_size)]
    if variant.task is not None:
        chosen = np.array([i for i in chosen if train[i].task == variant.task])
    examples, part = [train[i] for i in chosen], _subset(store, chosen)
    stored = set(head_config.donors) <= set(VALUE_LAYERS)  # otherwise the backbone runs in every step
    folder = args.work / "runs" / f"{''.join(c if c.isalnum() else '_' for c in name)}_{seed}"
    began = time.perf_counter()
    with shared.progress(f"{name}, seed {seed}") as show:
        trained = fit.fit(
            backbone,
            examples,
            head_config,
            config,
            folder,
            resume=(folder / "run.json").exists(),
            features=part if stored else None,
            report=lambda step, values: show(step, config.steps, f"loss {values['loss']:.3f}"),
        )
    seconds = time.perf_counter() - began
    module, frozen = head_lib.Head(head_config, backbone.config), fit.make_frozen(backbone, trained.draft_ids)
    deployed = dataclasses.replace(config, num_draft=4, batch_size=8)
    tasks = sorted({example.task for example in test})
    measured = {task: walk.measure(module, trained.params, frozen, backbone, [e for e in test if e.task == task], deployed) for task in tasks}
    steps, tokens = sum(m.steps for m in measured.values()), sum(m.tokens for m in measured.values())
    accepted = np.sum([m.accepted for m in measured.values()], axis=0).astype(int).tolist()
    return {
        "seconds": round(seconds, 1),
        "sequences": len(examples),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        **walk.Acceptance(steps, tokens, accepted).as_dict(),
        "tasks": {task: round(m.tokens_per_step, 4) for task, m in measured.items()},
    }


def _subset(store: features.FeatureStore, chosen: np.ndarray) -> features.FeatureStore:
    """The store as if it had been made of these sequences: each keeps its place in the arrays."""
    return dataclasses.replace(store, offsets=store.offsets[chosen])


def markdown(result: dict[str, Any]) -> str:
    """One line a variant: tokens per step of every seed, and the difference of the means to the base."""
    found = result["variants"]
    base = np.mean([run["tokens_per_step"] for run in found["base"].values()]) if "base" in found else np.nan
    lines = ["| variant | tokens per step, by seed | against base | parameters |", "|---|---|---|---|"]
    for name, seeds in found.items():
        values = [run["tokens_per_step"] for run in seeds.values()]
        millions = next(iter(seeds.values()))["parameters"] / 1e6
        lines.append(f"| {name} | {' '.join(f'{value:.3f}' for value in values)} | {np.mean(values) - base:+.3f} | {millions:.2f} M |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Every variant's tokens per step against the base's, and the curve over the share of the training data."""
    from matplotlib import pyplot

    means = {name: float(np.mean([run["tokens_per_step"] for run in runs.values()])) for name, runs in result["variants"].items() if runs}
    shares = {VARIANTS[name].share: mean for name, mean in means.items() if VARIANTS[name].share < 1} | {1.0: means["base"]}
    others = {name: mean - means["base"] for name, mean in means.items() if name != "base" and VARIANTS[name].share == 1}
    figure, (bars, curve) = pyplot.subplots(1, 2, figsize=(11, 0.28 * len(others) + 1.5), width_ratios=(3, 2), layout="constrained")
    ranked = sorted(others, key=others.__getitem__)
    bars.barh(ranked, [others[name] for name in ranked], color=["tab:green" if others[name] > 0 else "tab:red" for name in ranked])
    bars.axvline(0, color="black", linewidth=0.8)
    bars.set_xlabel(f"tokens per step against the base's {means['base']:.2f}")
    curve.plot(sorted(shares), [shares[share] for share in sorted(shares)], marker="o")
    curve.set_xscale("log", base=2)
    curve.set_xlabel(f"share of {result['settings']['train_data']['sequences']:,} training sequences")
    curve.set_ylabel("tokens per step")
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=path.suffix, delete=False) as file:
        figure.savefig(file.name)
    Path(file.name).replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=Path, nargs="+", required=True)
    parser.add_argument("--test", type=Path, nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for features and runs; kept, so that a stopped run goes on")
    parser.add_argument("--features", type=Path, help="features of the rollouts, as `mtp-jax train --features` keeps them; default: in --work")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=4096, help="training rollouts, the same for all variants")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], metavar="VARIANT", help="default: all")
    parser.add_argument("--table", action="store_true", help="print the result file as Markdown and do nothing else")
    parser.add_argument("--plot", type=Path, help="draw the result file into this .svg or .png and do nothing else (needs matplotlib)")
    args = parser.parse_args()
    if args.table or args.plot:
        result = json.loads(args.out.read_text())
        if args.plot:
            plot(result, args.plot)
        if args.table:
            print(markdown(result))
        return 0
    unknown = [name for name in args.only if name not in VARIANTS]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: must be one of {', '.join(map(repr, VARIANTS))}")
    backbone = shared.load_backbone("smollm2-135m-instruct")
    everything = data.read_rollouts(args.rollouts, vocab_size=backbone.config.vocab_size)
    test = data.read_rollouts(args.test, vocab_size=backbone.config.vocab_size)
    folder = args.features or args.work / "features"
    wanted: dict[str, Any] = {"backbone_fingerprint": backbone.fingerprint, "key_layers": KEY_LAYERS, "value_layers": VALUE_LAYERS}
    wanted["max_length"] = MAX_LENGTH
    if not (folder / "manifest.json").exists():
        with shared.progress("features") as show:
            module = backbone_lib.Backbone(backbone.config)
            features.build(folder, module, backbone.params, everything, **wanted, progress=lambda done, total: show(done, total, ""))
    store = features.open_store(folder, everything, **wanted)
    chosen = np.random.default_rng(0).permutation(len(everything))[: args.sequences]
    train, store = [everything[i] for i in chosen], _subset(store, chosen)
    settings = {
        "backbone": backbone.name,
        "head": BASE_HEAD,
        "train": BASE_TRAIN | {"steps": args.steps},
        "train_data": {"sequences": len(train), "tokens": sum(len(e.tokens) for e in train), "fingerprint": data.fingerprint(train)},
        "test_data": {"sequences": len(test), "fingerprint": data.fingerprint(test)},
        "versions": {"mtp_jax": mtp_jax.__version__, "jax": jax.__version__},
    }
    settings = json.loads(json.dumps(settings))
    result = json.loads(args.out.read_text()) if args.out.exists() else {"settings": settings, "variants": {}}
    if result["settings"] != settings:
        print(f"{args.out}: was made with other settings; choose another --out", file=sys.stderr)
        return 1
    for seed in range(args.seeds):
        for name in args.only or VARIANTS:
            runs = result["variants"].setdefault(name, {})
            if str(seed) not in runs:
                runs[str(seed)] = run(name, seed, args, backbone, store, train, test)
                files.write_json(args.out, result)
                shared.say(f"{name}, seed {seed}: {runs[str(seed)]['tokens_per_step']:.3f} tokens per step")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
