"""The training loop: batches in, a head out, resumable bit for bit.

A run folder holds

    run.json         configs, backbone and data fingerprints: what `resume` insists on
    checkpoints/N/   Orbax: head parameters, optimizer state, step, draft vocabulary
    metrics.jsonl    one line a step
    head/            the newest checkpoint's head, as `load_head` reads it

Batches are a function of the step alone, and the random numbers of a step too, so the checkpoint needs no other state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints.hf import read_json
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, walk
from mtp_jax.training import features as features_lib
from mtp_jax.training import loss as loss_lib
from mtp_jax.training import step as step_lib

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead


class RunError(ValueError):
    """A run folder does not fit what is asked of it."""


class NotFiniteError(RuntimeError):
    """The loss or a gradient stopped being a number."""


def fit(
    backbone: LoadedBackbone,
    examples: Sequence[data.Example],
    head_config: config_lib.HeadConfig,
    config: config_lib.TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    features: features_lib.FeatureStore | None = None,
    held_out: Sequence[data.Example] = (),
    init: LoadedHead | None = None,
    stop_after: int | None = None,
    report: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None,
) -> LoadedHead:
    """Train a head on the backbone's own answers.

    Args:
      backbone: frozen; only read.
      examples: training sequences.
      head_config: shape of the head; fits the backbone.
      config: of the run.
      out: run folder; must be new, or hold this very run when `resume`.
      resume: go on from the newest checkpoint.
      features: of `examples`, computed before; None runs the backbone in each step.
      held_out: sequences whose acceptance is measured at each checkpoint, as decoded (see walk.py).
      init: head to start from, its draft vocabulary included; `head_config` must be its config. None starts afresh.
      stop_after: leave after this step, as an interruption would (the schedule still is that of config.steps).
      report: called after each step with the step number (from 1) and its metrics.

    Raises:
      RunError: the folder holds another run, or one and `resume` is not set, or none and it is.
      NotFiniteError: naming the step and its sequences; the last good checkpoint stays.
    """
    head_config.check_fits(backbone.config)
    if init is not None and init.config != head_config:
        raise RunError(f"init: head {init.name!r} has another shape than head_config: take head_config from it")
    out = Path(out).resolve()
    _open_run(out, backbone, examples, head_config, config, init, resume)
    head = head_lib.Head(head_config, backbone.config)
    draft_ids = data.draft_vocabulary(examples, head_config.draft_vocab_size, backbone.config.vocab_size)
    state = step_lib.init_state(head, config)
    if init is not None:
        draft_ids, state = init.draft_ids, state.replace(head_params=jax.tree.map(jnp.array, init.params))
    with ocp.CheckpointManager(out / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)) as manager:
        if resume and manager.latest_step() is not None:
            restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(_to_save(state, draft_ids)))
            state, draft_ids = _from_saved(restored)
        _keep_metrics(out, int(state.step))
        frozen = make_frozen(backbone, draft_ids)
        source = _feature_source(backbone, head_config, features)
        for step in range(int(state.step), min(config.steps, stop_after or config.steps)):
            started = time.perf_counter()
            batch = data.batch_at(examples, config, step)
            state, metrics = step_lib.train_step(head, config, state, frozen, source(batch), batch)
            values = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm), "accept": np.asarray(metrics.accept).round(4).tolist()}
            values |= {"seconds": round(time.perf_counter() - started, 3), "tokens": int(batch.lengths.sum())}
            if not np.isfinite([values["loss"], values["grad_norm"]]).all():
                raise NotFiniteError(f"step {step + 1}: loss={values['loss']}, grad_norm={values['grad_norm']}, sequences {batch.index.tolist()}")
            last = step + 1 in (config.steps, stop_after)
            if (step + 1) % config.checkpoint_every == 0 or last:
                if held_out:
                    values["held_out"] = walk.measure(head, state.head_params, frozen, backbone, held_out, config).as_dict()
                manager.save(step + 1, args=ocp.args.StandardSave(_to_save(state, draft_ids)))
                export(out / "head", backbone, head_config, config, state, draft_ids, values)
            with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step + 1, **values}) + "\n")
            report(step + 1, values)
    from mtp_jax.checkpoints.load import load_head

    return load_head(out / "head", backbone)


def make_frozen(backbone: LoadedBackbone, draft_ids: np.ndarray) -> loss_lib.Frozen:
    """Arrays of the backbone that the loss reads; the table is shared, the draft rows are cut out once."""
    params, config = backbone.params, backbone.config
    table = params["embed"]["embedding"]
    unembedding = table if config.tied_embeddings else params["unembed"]["kernel"].T
    vocab = head_lib.draft_vocab(jnp.asarray(draft_ids), params, config)
    return loss_lib.Frozen(table=table, unembedding=unembedding, vocab=vocab, final_softcap=config.final_softcap)


def export(
    folder: Path,
    backbone: LoadedBackbone,
    head_config: config_lib.HeadConfig,
    config: config_lib.TrainConfig,
    state: step_lib.TrainState,
    draft_ids: np.ndarray,
    metrics: dict[str, Any],
) -> None:
    """Write the head of a training state as `load_head` reads it."""
    from mtp_jax.checkpoints.load import LoadedHead, save_head

    card = {"train_config": config_lib.to_dict(config), "step": int(state.step), "metrics": metrics}
    name = folder.parent.name
    save_head(
        folder,
        LoadedHead(
            name=name,
            config=head_config,
            params=state.head_params,
            draft_ids=np.asarray(draft_ids, np.int32),
            fingerprint=backbone.fingerprint,
            backbone_name=backbone.name,
            card=card,
        ),
    )


def _feature_source(
    backbone: LoadedBackbone, head_config: config_lib.HeadConfig, store: features_lib.FeatureStore | None
) -> Callable[[data.Batch], features_lib.Features]:
    module = backbone_lib.Backbone(backbone.config)
    keys, values = head_config.layers_read, tuple(sorted(set(head_config.donors)))
    if store is not None:
        return lambda batch: store.batch(batch, keys, values)
    return lambda batch: features_lib.compute(module, backbone.params, batch.tokens, key_layers=keys, value_layers=values)


def _to_save(state: step_lib.TrainState, draft_ids: np.ndarray) -> dict[str, Any]:
    return {"step": state.step, "head_params": state.head_params, "opt_state": state.opt_state, "draft_ids": jnp.asarray(draft_ids)}


def _from_saved(saved: dict[str, Any]) -> tuple[step_lib.TrainState, np.ndarray]:
    state = step_lib.TrainState(step=saved["step"], head_params=saved["head_params"], opt_state=saved["opt_state"])
    return jax.tree.map(jnp.asarray, state), np.asarray(saved["draft_ids"])


def _open_run(
    out: Path,
    backbone: LoadedBackbone,
    examples: Sequence[data.Example],
    head_config: config_lib.HeadConfig,
    config: config_lib.TrainConfig,
    init: LoadedHead | None,
    resume: bool,
) -> None:
    """Write run.json into a new folder, or check that the folder holds this run."""
    settings = {
        "backbone": {"name": backbone.name, "fingerprint": backbone.fingerprint},
        "data": {"fingerprint": data.fingerprint(examples), "sequences": len(examples)},
        "head_config": config_lib.to_dict(head_config),
        "train_config": config_lib.to_dict(config),
        "init": {"head": None if init is None else init.name},
    }
    path = out / "run.json"
    if not path.exists():
        if resume:
            raise RunError(f"{path}: no such file, so there is no run to resume")
        if out.exists() and any(out.iterdir()):
            raise RunError(f"{out}: not empty, and not a training run; choose another --out")
        files.write_json(path, settings)
        return
    if not resume:
        raise RunError(f"{out}: holds a run already; pass --resume to go on with it, or choose another --out")
    before, now = read_json(path), json.loads(json.dumps(settings))
    for group, values in now.items():
        for name, value in values.items():
            if before.get(group, {}).get(name) != value:
                raise RunError(f"{path}: {group}.{name} is {before.get(group, {}).get(name)!r}, this run has {value!r}")


def _keep_metrics(out: Path, step: int) -> None:
    """Drop lines of steps that the checkpoint does not hold, and a last line that was cut off."""
    kept = [line for line in files.whole_lines(out / "metrics.jsonl") if json.loads(line)["step"] <= step]
    files.write_text(out / "metrics.jsonl", "".join(line + "\n" for line in kept))


def split_held_out(examples: Sequence[data.Example], count: int, seed: int) -> tuple[list[data.Example], list[data.Example]]:
    """(training, held out): `count` sequences chosen by the seed, order kept."""
    chosen = set(np.random.default_rng((seed, 2)).permutation(len(examples))[:count].tolist())
    return [e for i, e in enumerate(examples) if i not in chosen], [e for i, e in enumerate(examples) if i in chosen]


__all__ = ["NotFiniteError", "RunError", "export", "fit", "make_frozen", "split_held_out"]
