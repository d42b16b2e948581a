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

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Flags that describe a head to be trained."""

    form: Literal["light", "assistant", "standalone", "eagle", "eagle3", "deepseek", "own_cache", "medusa"] = "light"
    """Form of the head. light: as few layers as you name, the backbone's unembedding, a pointer. assistant: that of Gemma 4's assistants, which
    `mtp-jax export` writes for transformers: four layers 256 wide, more norms, its own table over all tokens, no pointer. Flags below change it.
    The others are baselines, which read no K/V of the backbone. standalone: a small language model, two layers half as wide. eagle, eagle3,
    deepseek: EAGLE-1, EAGLE-3, and the module of DeepSeek-V3, with K/V of their own. own_cache: light, with K/V of its own. medusa: --num-draft
    heads on one state. Decode with --drafter of the same name."""
    donors: Annotated[tuple[int, ...], tyro.conf.arg(metavar="LAYER ...", help_behavior_hint="")] = ()
    """Backbone layers whose keys and values the head attends to, one per head layer. Default: one head layer on the last full-attention layer."""
    width: Annotated[int | None, shared.Unset] = None
    """Width of the head. Default: the backbone's; with --form assistant 256."""
    mlp_width: Annotated[int | None, shared.Unset] = None
    """Width of the head's MLP. Default: the backbone's; with --form assistant eight times --width."""
    num_heads: Annotated[int | None, shared.Unset] = None
    """Query heads of the head's attention, a multiple of the backbone's key heads. Default: the backbone's; with --form assistant the least
    multiple from 4 up."""
    num_kv_heads: Annotated[int | None, shared.Unset] = None
    """Key heads of a baseline's own attention; --num-heads is a multiple of them. Default: the backbone's."""
    head_dim: Annotated[int | None, shared.Unset] = None
    """Width of one head of a baseline's own attention. Default: the backbone's."""
    num_layers: Annotated[int | None, shared.Unset] = None
    """Layers of a standalone model. Default: 2."""
    taps: Annotated[tuple[int, ...], tyro.conf.arg(metavar="LAYERS ...", help_behavior_hint="")] = ()
    """With --form eagle3: the backbone's states after so many layers, ascending, are what it reads. Default: 2, half of them, and all but 3."""
    draft_vocab_size: Annotated[int | None, shared.Unset] = None
    """Tokens the head can draft: the most frequent ones of the rollouts. Default: 8192; with --form assistant or standalone all."""
    query_position: Literal["pending", "last"] = "pending"
    """Position of the head's queries: that of the pending token, or of the last one in the cache."""
    input_norms: bool = True
    """Norm the token's embedding and the hidden state before they are joined (--form light only)."""
    pointer: bool = True
    """Let the head copy tokens from the text as well (--form light and own_cache only)."""
    pointer_donors: Annotated[tuple[int, ...], tyro.conf.arg(metavar="LAYER ...", help_behavior_hint="")] = ()
    """Backbone layers whose keys the pointer reads. Default: four, the last of --donors and others of its kind, spread below it."""
    pointer_heads: int = 1
    """Independent pointers."""

    def head_config(self, backbone: config_lib.BackboneConfig, num_draft: int = 4) -> config_lib.HeadConfig | config_lib.BaselineConfig:
        """The head these flags describe; what is left out comes from the backbone.

        Args:
          num_draft: heads of a Medusa.

        Raises:
          UsageError: a flag that this form has no use for.
          ConfigError: no such head, or none for this backbone.
        """
        self.check_form()
        if self.form not in ("light", "assistant"):
            return self._baseline_config(backbone, self.form, num_draft)
        chosen: dict[str, Any] = {"query_position": self.query_position}
        for name in ("donors", "width", "mlp_width", "num_heads", "draft_vocab_size", "pointer_donors"):
            value = getattr(self, name)
            if value is not None and value != ():
                chosen[name] = value
        if self.form == "assistant":
            return config_lib.assistant_head_config_for(backbone, **chosen)
        chosen |= {"input_norms": self.input_norms, "pointer": self.pointer, "pointer_heads": self.pointer_heads}
        return config_lib.head_config_for(backbone, **chosen)

    def _baseline_config(self, backbone: config_lib.BackboneConfig, kind: config_lib.BaselineKind, num_draft: int) -> config_lib.BaselineConfig:
        chosen: dict[str, Any] = {}
        for name in ("width", "mlp_width", "num_heads", "num_kv_heads", "head_dim", "num_layers", "draft_vocab_size"):
            if getattr(self, name) is not None:
                chosen[name] = getattr(self, name)
        if self.taps:
            chosen["taps"] = self.taps
        if kind == "own_cache":
            chosen["pointer_heads"] = self.pointer_heads if self.pointer else 0
        if kind == "medusa":
            chosen["num_draft"] = num_draft
        return config_lib.baseline_config_for(backbone, kind, **chosen)

    def check_form(self) -> None:
        """Raise UsageError for a flag that this form has no use for."""
        mtp = self.form in ("light", "assistant")
        if not mtp and (self.donors or self.query_position != "pending"):
            flag = "--donors" if self.donors else "--query-position"
            raise shared.UsageError(f"{flag}: --form {self.form} reads no K/V of the backbone")
        if (self.form not in ("light", "own_cache") and self.pointer_heads != 1) or (self.form != "light" and self.pointer_donors):
            flag = "--pointer-donors" if self.pointer_donors else "--pointer-heads"
            raise shared.UsageError(f"{flag}: --form {self.form} {'points at its own keys' if self.form == 'own_cache' else 'has no pointer'}")
        if not self.input_norms and self.form != "light":
            raise shared.UsageError(f"--no-input-norms: --form {self.form} has no such choice")
        if self.taps and self.form != "eagle3":
            raise shared.UsageError(f"--taps: --form {self.form} reads the backbone's last state alone, or none")
        for name in ("num_kv_heads", "head_dim", "num_layers"):
            if mtp and getattr(self, name) is not None:
                raise shared.UsageError(f"--{name.replace('_', '-')}: --form {self.form} has no K/V of its own")


@dataclass(frozen=True, kw_only=True)
class Train(HeadShape, shared.BackboneFlags):
    """Train a head on rollouts. The backbone stays frozen; only the head is learnt and stored.

    Interrupted? The same command with --resume goes on from the newest checkpoint, bit for bit. On several devices: --mesh, and `mtp-jax plan`
    tells what fits. On several machines: the same command on each, with --distributed."""

    rollouts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]
    """Files written by `mtp-jax rollout` for this backbone."""
    out: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """Run folder to make. It will hold run.json, metrics.jsonl, checkpoints/ and head/: of all checkpoints the head that is best on what is held
    out (pass the folder to --head)."""
    resume: shared.Switch = False
    """Go on with the run in --out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the backbone's parameters and products, and of the head's products. The head's own parameters are kept in float32 while it is trained."""
    features: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep what the head reads of the backbone in this folder: computed once (if it is not there), read in every step. Much faster, costs disk space."""
    features_dtype: Annotated[Literal["float16", "bfloat16", "float32"] | None, shared.Unset] = None
    """What they are stored in. Default: what they are, or float16 when --features has to compute them."""
    held_out: int = 64
    """Rollouts set aside; the acceptance on them, as decoded, is measured at each checkpoint. 0 for none."""
    decode_prompts: int = 4
    """So many held-out prompts are really decoded at each checkpoint, and compared with what is measured on them. By one process only."""
    peak_tflops: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """What one device can do, in 1e12 multiplications and additions a second, by its data sheet; the share that is used is then shown (mfu)."""
    tensorboard: shared.Switch = False
    """Write the metrics for TensorBoard, too, into --out (needs tensorboardX: pip install 'mtp-jax[train]')."""
    distributed: shared.Switch = False
    """This is one process of several, which make one mesh. Each finds the others by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID,
    or, on TPU slices and under Slurm, by itself. --out must be one folder for all."""
    init: Annotated[str | None, tyro.conf.arg(metavar="HEAD")] = None
    """Start from this head (a folder, or a shipped name) and its draft vocabulary, and go on training it. Its shape replaces the flags of a head."""
    config: Annotated[config_lib.TrainConfig, tyro.conf.arg(name="")] = field(default_factory=config_lib.TrainConfig)

    def run(self) -> dict[str, Any]:
        """Returns the head's folder and the final metrics."""
        self._check()
        from mtp_jax.checkpoints import load
        from mtp_jax.training import data, fit, sharding

        sharding.start(self.distributed)
        mesh = sharding.make_mesh(self.config.mesh)
        places = None if mesh.size == 1 else sharding.of_backbone(load.read_config(self.backbone, dtype=self.dtype), mesh)
        backbone = shared.load_backbone(self.backbone, dtype=self.dtype, sharding=places)
        examples = data.read_rollouts(self.rollouts, vocab_size=backbone.config.vocab_size)
        found, examples = len(examples), data.within(examples, self.config.max_length)
        if len(examples) < found and sharding.is_first():
            shared.say(f"{found - len(examples)} of {found} rollouts left out: their answers begin beyond --max-length {self.config.max_length}")
        if self.held_out >= len(examples):
            raise shared.UsageError(f"--held-out {self.held_out}: there are only {len(examples)} rollouts; some must be left to train on")
        training, held_out = fit.split_held_out(examples, self.held_out, self.config.seed)
        init = None if self.init is None else load.load_head(self.init, backbone)
        head_config = self.head_config(backbone.config, self.config.num_draft) if init is None else init.config
        say = shared.say if sharding.is_first() else lambda text: None
        say(f"{len(training)} rollouts to train on, {len(held_out)} held out; head: {head_config}")
        store = None if self.features is None else self._features(self.features, backbone, training, head_config)
        final: dict[str, Any] = {}
        measured: dict[str, Any] = {}
        with shared.progress("train") as show:

            def report(step: int, metrics: dict[str, Any]) -> None:
                final.clear()
                final.update(metrics, step=step)
                measured.update(metrics.get("held_out", {}))
                if sharding.is_first():
                    show(step, self.config.steps, _note(metrics, measured))

            head = fit.fit(
                backbone,
                training,
                head_config,
                self.config,
                self.out,
                resume=self.resume,
                features=store,
                held_out=held_out,
                init=init,
                report=report,
                decode_prompts=self.decode_prompts,
                peak_tflops=self.peak_tflops,
                tensorboard=self.tensorboard,
            )
        final = final or dict(head.card.get("metrics", {}), step=head.card.get("step"))  # resumed a run that was finished
        folder = self.out / "head"
        say(f"head of step {head.card.get('step')} written to {folder}; use it with --head {self.out}")
        return {"head": str(folder), "run": str(self.out), "best_step": head.card.get("step"), "metrics": final}

    def _check(self) -> None:
        self.check_form()
        if not self.rollouts:
            raise shared.UsageError("--rollouts: give at least one file")
        for name in ("held_out", "decode_prompts"):
            if getattr(self, name) < 0:
                raise shared.UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise shared.UsageError(f"--peak-tflops {self.peak_tflops}: must be positive")

    def _features(
        self, folder: Path, backbone: LoadedBackbone, examples: list[Example], head: config_lib.HeadConfig | config_lib.BaselineConfig
    ) -> FeatureStore:
        """Open the feature folder, after computing it if it is not there."""
        import jax

        from mtp_jax.models.backbone import Backbone
        from mtp_jax.training import features

        keys, values = head.layers_read, tuple(sorted(set(head.donors)))
        wanted: dict[str, Any] = {
            "backbone_fingerprint": backbone.fingerprint,
            "key_layers": keys,
            "value_layers": values,
            "max_length": self.config.max_length,
        }
        if not (folder / "manifest.json").exists():
            if jax.process_count() > 1:
                raise shared.UsageError(f"--features {folder}: not there yet; compute it with one process (the same command with --steps 1, and another --out)")
            config = backbone.config
            module = Backbone(config, taps=head.taps)
            numbers = module.hidden_width + sum(config.kv_heads_of(layer) * config.head_dim_of(layer) for layer in (*keys, *values))
            dtype = self.features_dtype or "float16"
            per_token = _BYTES[dtype] * numbers
            tokens = sum(min(len(example.tokens), self.config.max_length) for example in examples)
            shared.say(f"features: {per_token:,} bytes a token, {tokens:,} tokens, {per_token * tokens / 1e6:,.1f} MB in {folder}")
            with shared.progress("features") as report:
                features.build(
                    folder,
                    module,
                    backbone.params,
                    examples,
                    **wanted,
                    dtype=dtype,
                    progress=lambda done, total: report(done, total, ""),
                )
        return features.open_store(folder, examples, **wanted, taps=head.taps, dtype=self.features_dtype, backbone_dtype=self.dtype)


def _note(metrics: dict[str, Any], measured: dict[str, Any]) -> str:
    accept = " ".join(f"{rate:.2f}" for rate in metrics["accept"])
    speed = f"{metrics['tokens_per_second']:,.0f} tokens/s, " + (
        f"mfu {metrics['mfu']:.1%}" if "mfu" in metrics else f"{metrics['flops_per_second']:.2g} FLOP/s"
    )
    held_out = f", held-out tokens/step {measured['tokens_per_step']:.2f}" if measured else ""
    return f"loss {metrics['loss']:.3f}, accept@k {accept}, {speed}{held_out}"
