"""One change at a time to the head and its training, on one budget, judged by acceptance as decoded.

    python experiments/ablate.py --rollouts train.jsonl --test test.jsonl --work /tmp/ablate --out experiments/results/ablations.json
    python experiments/ablate.py ... --only base "pointer: off" --seeds 2

Every variant trains afresh for the same number of steps on the same features of the same rollouts, and is then walked over the
test rollouts (greedy answers of the backbone to held-out prompts), which gives the tokens per step that the decoder would
reach. Variants that are in the result file already are not run again, so a run that was stopped goes on. `--table` prints the
result as Markdown.

What a HeadConfig or a TrainConfig can say is said there; the other variants replace a part of the head's module while they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.decoding import generate
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.models import layers
from mtp_jax.training import data, features, fit, walk

LAYERS, MAX_LENGTH = (6, 12, 20, 28, 29), 320  # backbone layers whose keys and values are kept
BASE_HEAD: dict[str, Any] = {"donors": (29,), "pointer_donors": (29, 20, 12, 6), "draft_vocab_size": 4096, "input_norms": False}
BASE_TRAIN: dict[str, Any] = {"optimizer": "muon", "learning_rate": 2e-2, "batch_size": 16, "rows_per_sequence": 32, "max_length": MAX_LENGTH}
SAMPLED_SHARE = 0.25  # of the training prompts, which are answered at temperature 1 as well
ANSWER_TOKENS = 80


class HiddenAlone(head_lib.Head):
    """Does not see the token whose successor it drafts."""

    def _enter(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        return self._dense(self.config.width, "pre")(hidden)


class NormedRecurrence(head_lib.Head):
    """The head's own hidden state is normed, as the backbone's is that it takes the place of."""

    def _recur(self, n: jax.Array) -> jax.Array:
        return self._norm("recurrent_norm", super()._recur(n))


class PointerPerHead(head_lib.Head):
    """Every key head points on its own, and the weights are averaged; otherwise their scores are."""

    def _point(self, n: jax.Array, keys: Any, last_slot: jax.Array, position: jax.Array, positions: Any) -> tuple[jax.Array, jax.Array]:
        cfg, bb = self.config, self.backbone
        scores, mask = 0.0, None
        for donor in cfg.pointer_donors:
            q = self._queries(n, bb.kv_heads_of(donor), donor, position, f"pointer_{donor}_q")
            scores += jnp.einsum("BTKH,BKSH->BKTS", q, keys[donor]).astype(jnp.float32) * bb.attention_scale_of(donor)
            mask = layers.visible(last_slot, keys[donor].shape[2], last_slot + 1, bb.window(donor))
        assert mask is not None
        gate = jax.nn.sigmoid(self._gate(n, 1))[..., 0]
        return layers.masked_softmax(jnp.asarray(scores), mask[:, None]).mean(axis=1), gate


class EvenGate(head_lib.Head):
    """The pointer starts with half of the weight."""

    def _gate(self, n: jax.Array, heads: int) -> jax.Array:
        return super()._gate(n, heads) - head_lib.GATE_BIAS


@dataclass(frozen=True)
class Variant:
    """What one variant changes."""

    head: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    module: type[head_lib.Head] = head_lib.Head
    share: float = 1.0  # of the training sequences
    sampled: bool = False  # trained on sampled answers to SAMPLED_SHARE of the prompts
    task: str | None = None  # trained on this task's sequences alone


VARIANTS: dict[str, Variant] = {
    "base": Variant(),
    "pointer: off": Variant(head={"pointer": False, "pointer_donors": ()}),
    "pointer: last layer's keys only": Variant(head={"pointer_donors": (29,)}),
    "pointer: two": Variant(head={"pointer_heads": 2}),
    "pointer: every key head on its own": Variant(module=PointerPerHead),
    "pointer: gate starts at 1/2": Variant(module=EvenGate),
    "input: hidden state alone": Variant(module=HiddenAlone),
    "input: each normed": Variant(head={"input_norms": True}),
    "recurrence: normed": Variant(module=NormedRecurrence),
    "head: half as wide": Variant(head={"width": 288, "num_heads": 9, "mlp_width": 768}),
    "donors: the last layer twice": Variant(head={"donors": (29, 29)}),
    "donors: last two layers": Variant(head={"donors": (28, 29)}),
    "donors: four, spread": Variant(head={"donors": (6, 12, 20, 29)}),
    "draft vocabulary: 8192": Variant(head={"draft_vocab_size": 8192}),
    "draft vocabulary: 16384": Variant(head={"draft_vocab_size": 16384}),
    "draft vocabulary: all 49152": Variant(head={"draft_vocab_size": 49152}),
    "optimizer: AdamW 1e-3": Variant(train={"optimizer": "adamw", "learning_rate": 1e-3}),
    "optimizer: AdamW 5e-3": Variant(train={"optimizer": "adamw", "learning_rate": 5e-3}),
    "learning rate: 1e-2": Variant(train={"learning_rate": 1e-2}),
    "learning rate: 4e-2": Variant(train={"learning_rate": 4e-2}),
    "learning rate: 8e-2": Variant(train={"learning_rate": 8e-2}),
    "rows: answers only": Variant(train={"rows": "answer"}),
    "step decay: 1.0": Variant(train={"step_decay": 1.0}),
    "step decay: 0.6": Variant(train={"step_decay": 0.6}),
    "trained on 2 drafts": Variant(train={"num_draft": 2}),
    "trained on 6 drafts": Variant(train={"num_draft": 6}),
    "loss: hard cross-entropy": Variant(train={"loss": ("hard_ce",)}),
    "loss: total variation": Variant(train={"loss": ("tv",)}),
    "loss: LK hybrid": Variant(train={"loss": ("lk_hybrid",)}),
    "loss: 0.9 smooth-L1 of hidden states": Variant(train={"loss": ("hidden:0.9", "soft_ce:0.1")}),
    "after a miss: drop": Variant(train={"after_miss": "drop"}),
    "trained on smart_reply alone": Variant(task="smart_reply"),
    "trained on proofread alone": Variant(task="proofread"),
    "data: 1/2": Variant(share=0.5),
    "data: 1/4": Variant(share=SAMPLED_SHARE),
    "data: 1/4, sampled answers": Variant(sampled=True),
    "data: 1/8": Variant(share=0.125),
    "three that helped: norms, 4e-2, answers": Variant(head={"input_norms": True}, train={"learning_rate": 4e-2, "rows": "answer"}),
}


@dataclass(frozen=True)
class Rollouts:
    """Sequences and what the backbone makes of them."""

    examples: list[data.Example]
    store: features.FeatureStore

    def share(self, share: float, least: int) -> Rollouts:
        """Some of them, drawn the same for every seed; a smaller share is part of a larger one."""
        order = np.random.default_rng(0).permutation(len(self.examples))
        return self.at(order[: max(round(share * len(self.examples)), least)])

    def of(self, task: str) -> Rollouts:
        return self.at(np.array([i for i, example in enumerate(self.examples) if example.task == task]))

    def at(self, chosen: np.ndarray) -> Rollouts:
        """Each keeps its place in the store's arrays."""
        return Rollouts([self.examples[i] for i in chosen], dataclasses.replace(self.store, offsets=self.store.offsets[chosen]))


def run(
    name: str, seed: int, steps: int, work: Path, backbone: load.LoadedBackbone, greedy: Rollouts, sampled: Rollouts | None, test: list[data.Example]
) -> dict[str, Any]:
    """Train one variant and walk it over the test rollouts."""
    variant = VARIANTS[name]
    head_config = config_lib.head_config_for(backbone.config, **(BASE_HEAD | variant.head))
    config = config_lib.TrainConfig(**(BASE_TRAIN | variant.train), steps=steps, seed=seed, checkpoint_every=steps)
    if variant.sampled:
        assert sampled is not None
        rollouts = sampled
    else:
        rollouts = greedy.share(variant.share, config.batch_size)
    if variant.task is not None:
        rollouts = rollouts.of(variant.task)
    folder = work / "runs" / f"{''.join(c if c.isalnum() else '_' for c in name)}_{seed}"
    with mock.patch.object(head_lib, "Head", variant.module), shared.progress(f"{name}, seed {seed}") as show:
        trained = fit.fit(
            backbone,
            rollouts.examples,
            head_config,
            config,
            folder,
            resume=(folder / "run.json").exists(),
            features=rollouts.store,
            report=lambda step, values: show(step, config.steps, f"loss {values['loss']:.3f}"),
        )
    module, frozen = variant.module(head_config, backbone.config), fit.make_frozen(backbone, trained.draft_ids)
    deployed = dataclasses.replace(config, num_draft=4, batch_size=8)
    tasks = sorted({example.task for example in test})
    measured = {task: walk.measure(module, trained.params, frozen, backbone, [e for e in test if e.task == task], deployed) for task in tasks}
    tokens_of, steps_of = sum(m.tokens for m in measured.values()), sum(m.steps for m in measured.values())
    accepted = np.sum([m.accepted for m in measured.values()], axis=0).astype(int).tolist()
    return {
        "seconds": round(sum(json.loads(line)["seconds"] for line in files.whole_lines(folder / "metrics.jsonl")), 1),  # of a resumed run, too
        "sequences": len(rollouts.examples),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        **walk.Acceptance(steps_of, tokens_of, accepted).as_dict(),
        "tasks": {task: round(m.tokens_per_step, 4) for task, m in measured.items()},
    }


def with_features(examples: list[data.Example], folder: Path, backbone: load.LoadedBackbone) -> Rollouts:
    """Features as they stand in the folder; computed if they do not."""
    wanted: dict[str, Any] = {"backbone_fingerprint": backbone.fingerprint, "key_layers": LAYERS, "value_layers": LAYERS, "max_length": MAX_LENGTH}
    if not (folder / "manifest.json").exists():
        with shared.progress("features") as show:
            module = backbone_lib.Backbone(backbone.config)
            features.build(folder, module, backbone.params, examples, **wanted, progress=lambda done, total: show(done, total, ""))
    return Rollouts(examples, features.open_store(folder, examples, **wanted))


def sample_answers(backbone: load.LoadedBackbone, examples: list[data.Example], path: Path, batch_size: int = 16) -> list[data.Example]:
    """The backbone's answers at temperature 1 to the same prompts (up to the first answer); read back if the file is there."""
    if not path.exists():
        runtime = generate.make_runtime(backbone)
        config = generate.with_stop_tokens(config_lib.DecodeConfig(max_new_tokens=ANSWER_TOKENS, temperature=1.0), backbone)
        prompts = [example.tokens[: int(np.argmax(example.answer))].tolist() for example in examples]
        lines = []
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        with shared.progress("sampled answers") as show:
            for start in range(0, len(order), batch_size):
                chosen = order[start : start + batch_size]
                outputs = generate.run(runtime, [prompts[i] for i in chosen], config, row_numbers=chosen).outputs
                for i, output in zip(chosen, outputs, strict=True):
                    mask = [0] * len(prompts[i]) + [1] * len(output.tokens)
                    lines.append(json.dumps({"task": examples[i].task, "tokens": prompts[i] + output.tokens, "answer_mask": mask}))
                show(start + len(chosen), len(order), "")
        files.write_text(path, "\n".join(lines) + "\n")
    return data.read_rollouts([path], vocab_size=backbone.config.vocab_size)


def markdown(result: dict[str, Any], *, by_task: bool = True) -> str:
    """One line a variant: tokens per step of every seed, the difference of the means to the base, and tokens per step by task (means)."""
    found = result["variants"]
    tasks = list(next(run for runs in found.values() for run in runs.values())["tasks"]) if by_task else []
    base = np.mean([run["tokens_per_step"] for run in found["base"].values()]) if "base" in found else np.nan
    columns = ["variant", "tokens per step, by seed", "against base", "parameters", *tasks]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, seeds in found.items():
        values = [run["tokens_per_step"] for run in seeds.values()]
        millions = next(iter(seeds.values()))["parameters"] / 1e6
        each = (f"{np.mean([run['tasks'][task] for run in seeds.values()]):.2f}" for task in tasks)
        cells = [name, " ".join(f"{value:.3f}" for value in values), f"{np.mean(values) - base:+.3f}", f"{millions:.2f} M", *each]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Every variant's tokens per step against the base's, and the curve over the share of the training data."""
    from matplotlib import pyplot

    means = {name: float(np.mean([run["tokens_per_step"] for run in runs.values()])) for name, runs in result["variants"].items() if runs}
    by_share = {VARIANTS[name].share: mean for name, mean in means.items() if name == "base" or name.startswith("data: ") and not VARIANTS[name].sampled}
    others = {name: mean - means["base"] for name, mean in means.items() if name != "base"}
    figure, (bars, curve) = pyplot.subplots(1, 2, figsize=(11, 0.28 * len(others) + 1.5), width_ratios=(3, 2), layout="constrained")
    ranked = sorted(others, key=others.__getitem__)
    bars.barh(ranked, [others[name] for name in ranked], color=["tab:green" if others[name] > 0 else "tab:red" for name in ranked])
    bars.axvline(0, color="black", linewidth=0.8)
    bars.set_xlabel(f"tokens per step against the base's {means['base']:.2f}")
    shares = sorted(by_share)
    curve.plot(shares, [by_share[share] for share in shares], marker="o")
    curve.set_xscale("log", base=2)
    curve.set_xlabel(f"share of {result['settings']['train_data']['sequences']:,} training sequences")
    curve.set_ylabel("tokens per step")
    whole = path.with_name(f"unfinished-{path.name}")
    figure.savefig(whole)
    whole.replace(path)


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
    args.work.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(everything))[: args.sequences]
    greedy = with_features(everything, args.features or args.work / "features", backbone).at(order)
    sampled = None
    if any(VARIANTS[name].sampled for name in args.only or VARIANTS):
        answers = sample_answers(backbone, greedy.share(SAMPLED_SHARE, 1).examples, args.work / "sampled.jsonl")
        sampled = with_features(answers, args.work / "sampled_features", backbone)
    train = greedy.examples
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
                runs[str(seed)] = run(name, seed, args.steps, args.work, backbone, greedy, sampled, test)
                files.write_json(args.out, result)
                shared.say(f"{name}, seed {seed}: {runs[str(seed)]['tokens_per_step']:.3f} tokens per step")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
