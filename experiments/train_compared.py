"""Train every method of the comparison that learns: the same rollouts, steps, rows and seed for all, a learning rate of its own for each.

    python experiments/train_compared.py --rollouts train.jsonl --work /tmp/compared
    python experiments/compare.py --method $(python experiments/train_compared.py --work /tmp/compared --list) --prompts ...

Rates are the best of three or more by the mean share of first drafts that were right in short runs of each (LOG.md). Learned from are
--sequences of the rollouts, drawn by seed 0, and --held-out others tell how good a head has become. A standalone drafter is trained for each
task, too: from the general one, on the task's share of the same rollouts, a quarter as many steps more. A method that is trained is
not trained again, and one that was stopped goes on; two processes with different --only share the work once the features are there.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ablate import MAX_LENGTH, Rollouts

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import load
from mtp_jax.commands import shared
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.training import data, features, fit

KEY_LAYERS, VALUE_LAYERS, TAPS = (6, 12, 20, 29), (29,), (2, 15, 27)  # of SmolLM2-135M, which all methods together read
DRAFT_VOCAB = {"draft_vocab_size": 4096}
TASKS = ("smart_reply", "notif_summ", "proofread", "rewrite")  # that have a standalone drafter of their own
TASK_RATE = 1e-2


@dataclass(frozen=True)
class Method:
    """What is trained, and how it is decoded."""

    drafter: config_lib.DrafterName
    learning_rate: float
    head: dict[str, Any] = field(default_factory=dict)

    def config(self, backbone: config_lib.BackboneConfig) -> config_lib.HeadConfig | config_lib.BaselineConfig:
        chosen = DRAFT_VOCAB | self.head
        if self.drafter == "mtp":
            return config_lib.head_config_for(backbone, donors=VALUE_LAYERS, **chosen)
        return config_lib.baseline_config_for(backbone, self.drafter, **chosen)  # type: ignore[arg-type]


METHODS = {
    "mtp": Method("mtp", 4e-2, {"pointer_donors": KEY_LAYERS[::-1]}),
    "mtp_no_pointer": Method("mtp", 8e-2, {"pointer": False, "pointer_donors": ()}),
    "own_cache": Method("own_cache", 4e-2),
    "standalone": Method("standalone", 8e-2),
    "eagle": Method("eagle", 8e-2),
    "eagle3": Method("eagle3", 8e-2, {"taps": TAPS}),
    "deepseek": Method("deepseek", 8e-2),
    "medusa": Method("medusa", 8e-2),
}
UNTRAINED = ("mtp_shipped=mtp", "prompt_lookup=prompt_lookup", "early_exit=early_exit", "jacobi=jacobi")


def arguments(work: Path) -> list[str]:
    """What compare.py takes after --method."""
    trained = [f"{name}={method.drafter}@{work / 'runs' / name}" for name, method in METHODS.items()]
    per_task = ",".join(f"{task}:{work / 'runs' / f'standalone_{task}'}" for task in TASKS)
    return [*trained, f"hybrid=hybrid@{work / 'runs' / 'mtp'}", f"standalone_per_task=standalone@{work / 'runs' / 'standalone'},{per_task}", *UNTRAINED]


def with_features(examples: list[data.Example], folder: Path, backbone: load.LoadedBackbone) -> Rollouts:
    """Features as they stand in the folder; computed if they do not."""
    wanted: dict[str, Any] = {"backbone_fingerprint": backbone.fingerprint, "key_layers": KEY_LAYERS, "value_layers": VALUE_LAYERS, "max_length": MAX_LENGTH}
    if not (folder / "manifest.json").exists():
        with shared.progress("features") as show:
            module = backbone_lib.Backbone(backbone.config, taps=TAPS)
            features.build(folder, module, backbone.params, examples, **wanted, progress=lambda done, total: show(done, total, ""))
    return Rollouts(examples, features.open_store(folder, examples, **wanted, taps=TAPS))


def train(
    name: str,
    learning_rate: float,
    steps: int,
    work: Path,
    backbone: load.LoadedBackbone,
    rollouts: Rollouts,
    held_out: list[data.Example],
    head: config_lib.HeadConfig | config_lib.BaselineConfig,
    init: load.LoadedHead | None = None,
) -> None:
    """Train one head into work/runs/name, or go on with it."""
    folder = work / "runs" / name
    config = config_lib.TrainConfig(
        optimizer="muon",
        learning_rate=learning_rate,
        steps=steps,
        batch_size=16,
        rows_per_sequence=32,
        max_length=MAX_LENGTH,
        checkpoint_every=steps,
        seed=0 if init is None else 1,
    )
    measured: dict[str, Any] = {}
    seconds = 0.0
    with shared.progress(name) as show:

        def report(step: int, metrics: dict[str, Any]) -> None:
            nonlocal seconds
            seconds += metrics["seconds"]
            measured.update(metrics.get("held_out", {}))
            show(step, steps, f"loss {metrics['loss']:.3f}")

        resume = (folder / "run.json").exists()
        fit.fit(backbone, rollouts.examples, head, config, folder, resume=resume, features=rollouts.store, held_out=held_out, init=init, report=report)
    if measured:
        shared.say(f"{name}: {measured['tokens_per_step']:.3f} tokens per step on what is held out; {len(rollouts.examples)} sequences, {seconds:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=Path, nargs="+", help="files written by `mtp-jax rollout` for SmolLM2-135M-Instruct")
    parser.add_argument("--work", type=Path, required=True, help="folder for features and runs; kept, so that a stopped run goes on")
    parser.add_argument("--sequences", type=int, default=1536)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", nargs="+", choices=[*METHODS, "per_task"], default=[*METHODS, "per_task"], metavar="METHOD")
    parser.add_argument("--list", action="store_true", help="print what compare.py takes after --method, and do nothing else")
    args = parser.parse_args()
    if args.list:
        print(*arguments(args.work))
        return 0
    if not args.rollouts:
        parser.error("--rollouts: give at least one file")
    backbone = shared.load_backbone("smollm2-135m-instruct")
    everything = data.within(data.read_rollouts(args.rollouts, vocab_size=backbone.config.vocab_size), MAX_LENGTH)
    order = np.random.default_rng(0).permutation(len(everything))[: args.sequences + args.held_out]
    held_out = [everything[i] for i in order[: args.held_out]]
    args.work.mkdir(parents=True, exist_ok=True)
    rollouts = with_features([everything[i] for i in order[args.held_out :]], args.work / "features", backbone)
    for name, method in METHODS.items():
        if name in args.only:
            train(name, method.learning_rate, args.steps, args.work, backbone, rollouts, held_out, method.config(backbone.config))
    if "per_task" in args.only:
        general = load.load_head(str(args.work / "runs" / "standalone"), backbone)
        for task in TASKS:
            of_task = [example for example in held_out if example.task == task]
            train(f"standalone_{task}", TASK_RATE, max(args.steps // 4, 1), args.work, backbone, rollouts.of(task), of_task, general.config, general)
    return 0


if __name__ == "__main__":
    sys.exit(main())
