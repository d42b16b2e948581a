"""`mtp-jax train`: a head from rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mtp_jax import config as config_lib
from mtp_jax.commands import shared

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone
    from mtp_jax.training.data import Example
    from mtp_jax.training.features import FeatureStore

_BYTES_PER_VALUE = 2  # features are stored in float16


@dataclass(frozen=True, kw_only=True)
class Train(shared.BackboneFlags):
    """Train a head on rollouts. The backbone stays frozen; only the head is learnt and stored.

    Interrupted? The same command with --resume goes on from the newest checkpoint, bit for bit."""

    rollouts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]
    """Files written by `mtp-jax rollout` for this backbone."""
    out: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """Run folder to make. It will hold run.json, metrics.jsonl, checkpoints/ and head/ (pass the folder to --head)."""
    resume: shared.Switch = False
    """Go on with the run in --out."""
    features: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep what the head reads of the backbone in this folder: computed once (if it is not there), read in every step. Much faster, costs disk space."""
    held_out: int = 64
    """Rollouts set aside; the acceptance on them, as decoded, is measured at each checkpoint. 0 for none."""

    init: Annotated[str | None, tyro.conf.arg(metavar="HEAD")] = None
    """Start from this head (a folder, or a shipped name) and its draft vocabulary, and go on training it. Its shape replaces the flags below."""

    form: Literal["light", "assistant"] = "light"
    """Form of the head. light: as few layers as you name, the backbone's unembedding, a pointer. assistant: that of Gemma 4's assistants, which
    `mtp-jax export` writes for transformers: four layers 256 wide, more norms, its own table over all tokens, no pointer. Flags below change it."""
    donors: Annotated[tuple[int, ...], tyro.conf.arg(metavar="LAYER ...", help_behavior_hint="")] = ()
    """Backbone layers whose keys and values the head attends to, one per head layer. Default: one head layer on the last full-attention layer."""
    width: Annotated[int | None, shared.Unset] = None
    """Width of the head. Default: the backbone's; with --form assistant 256."""
    mlp_width: Annotated[int | None, shared.Unset] = None
    """Width of the head's MLP. Default: the backbone's; with --form assistant eight times --width."""
    num_heads: Annotated[int | None, shared.Unset] = None
    """Query heads of the head's attention, a multiple of the backbone's key heads. Default: the backbone's; with --form assistant the least
    multiple from 4 up."""
    draft_vocab_size: Annotated[int | None, shared.Unset] = None
    """Tokens the head can draft: the most frequent ones of the rollouts. Default: 8192; with --form assistant all."""
    query_position: Literal["pending", "last"] = "pending"
    """Position of the head's queries: that of the pending token, or of the last one in the cache."""
    pointer: bool = True
    """Let the head copy tokens from the text as well (--form light only)."""
    pointer_donors: Annotated[tuple[int, ...], tyro.conf.arg(metavar="LAYER ...", help_behavior_hint="")] = ()
    """Backbone layers whose keys the pointer reads. Default: the last of --donors."""
    pointer_heads: int = 1
    """Independent pointers."""
    config: Annotated[config_lib.TrainConfig, tyro.conf.arg(name="")] = field(default_factory=config_lib.TrainConfig)

    def run(self) -> dict[str, Any]:
        """Returns the head's folder and the final metrics."""
        self._check()
        backbone = shared.load_backbone(self.backbone)
        from mtp_jax.checkpoints import load
        from mtp_jax.training import data, fit

        examples = data.read_rollouts(self.rollouts, vocab_size=backbone.config.vocab_size)
        if self.held_out >= len(examples):
            raise shared.UsageError(f"--held-out {self.held_out}: there are only {len(examples)} rollouts; some must be left to train on")
        training, held_out = fit.split_held_out(examples, self.held_out, self.config.seed)
        init = None if self.init is None else load.load_head(self.init, backbone)
        head_config = self.head_config(backbone.config) if init is None else init.config
        shared.say(f"{len(training)} rollouts to train on, {len(held_out)} held out; head: {head_config}")
        store = None if self.features is None else self._features(self.features, backbone, training, head_config)
        final: dict[str, Any] = {}
        measured: dict[str, Any] = {}
        with shared.progress("train") as show:

            def report(step: int, metrics: dict[str, Any]) -> None:
                final.clear()
                final.update(metrics, step=step)
                measured.update(metrics.get("held_out", {}))
                show(step, self.config.steps, _note(metrics, measured))

            head = fit.fit(
                backbone, training, head_config, self.config, self.out, resume=self.resume, features=store, held_out=held_out, init=init, report=report
            )
        final = final or dict(head.card.get("metrics", {}), step=head.card.get("step"))  # resumed a run that was finished
        folder = self.out / "head"
        shared.say(f"head written to {folder}; use it with --head {self.out}")
        return {"head": str(folder), "run": str(self.out), "metrics": final}

    def head_config(self, backbone: config_lib.BackboneConfig) -> config_lib.HeadConfig:
        """The head these flags describe; what is left out comes from the backbone."""
        chosen: dict[str, Any] = {"query_position": self.query_position}
        for name in ("donors", "width", "mlp_width", "num_heads", "draft_vocab_size", "pointer_donors"):
            value = getattr(self, name)
            if value is not None and value != ():
                chosen[name] = value
        if self.form == "assistant":
            return config_lib.assistant_head_config_for(backbone, **chosen)
        chosen |= {"pointer": self.pointer, "pointer_heads": self.pointer_heads}
        return config_lib.head_config_for(backbone, **chosen)

    def _check(self) -> None:
        if self.form == "assistant" and (self.pointer_donors or self.pointer_heads != 1):
            flag = "--pointer-donors" if self.pointer_donors else "--pointer-heads"
            raise shared.UsageError(f"{flag}: --form assistant has no pointer")
        if not self.rollouts:
            raise shared.UsageError("--rollouts: give at least one file")
        if self.held_out < 0:
            raise shared.UsageError(f"--held-out {self.held_out}: must not be negative")

    def _features(self, folder: Path, backbone: LoadedBackbone, examples: list[Example], head: config_lib.HeadConfig) -> FeatureStore:
        """Open the feature folder, after computing it if it is not there."""
        from mtp_jax.models.backbone import Backbone
        from mtp_jax.training import features

        keys, values = head.layers_read, tuple(sorted(set(head.donors)))
        if not (folder / "manifest.json").exists():
            config = backbone.config
            per_token = _BYTES_PER_VALUE * (config.width + sum(config.kv_heads_of(layer) * config.head_dim_of(layer) for layer in (*keys, *values)))
            tokens = sum(min(len(example.tokens), self.config.max_length) for example in examples)
            shared.say(f"features: {per_token:,} bytes a token, {tokens:,} tokens, {per_token * tokens / 1e6:,.1f} MB in {folder}")
            with shared.progress("features") as report:
                features.build(
                    folder,
                    Backbone(backbone.config),
                    backbone.params,
                    examples,
                    backbone_fingerprint=backbone.fingerprint,
                    key_layers=keys,
                    value_layers=values,
                    max_length=self.config.max_length,
                    progress=lambda done, total: report(done, total, ""),
                )
        return features.open_store(
            folder, examples, backbone_fingerprint=backbone.fingerprint, key_layers=keys, value_layers=values, max_length=self.config.max_length
        )


def _note(metrics: dict[str, Any], measured: dict[str, Any]) -> str:
    accept = " ".join(f"{rate:.2f}" for rate in metrics["accept"])
    held_out = f", held-out tokens/step {measured['tokens_per_step']:.2f}" if measured else ""
    return f"loss {metrics['loss']:.3f}, accept@k {accept}{held_out}"
