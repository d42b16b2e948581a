"""The training loop: batches in, a head out, resumable bit for bit.

A run folder holds

    run.json         configs, backbone and data fingerprints: what `resume` insists on
    checkpoints/N/   Orbax: head parameters, optimizer state, step, draft vocabulary
    metrics.jsonl    one line a step
    head/            the best head so far, as `load_head` reads it: the checkpoint with most tokens per step on what is held out, the
                     newest of equals; the newest checkpoint's when nothing is held out
    tensorboard/     the same numbers as in metrics.jsonl, if wanted

Batches are a function of the step alone, and the random numbers of a step too, so the checkpoint needs no other state. The best
figure so far is in head/'s own record.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints.hf import read_json
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, monitor, pipeline, sharding, walk
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
    head_config: forms.AnyConfig,
    config: config_lib.TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    features: features_lib.FeatureStore | None = None,
    held_out: Sequence[data.Example] = (),
    init: LoadedHead | None = None,
    stop_after: int | None = None,
    report: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None,
    decode_prompts: int = 0,
    peak_tflops: float | None = None,
    tensorboard: bool = False,
) -> LoadedHead:
    """Train a head on the backbone's own answers.

    Args:
      backbone: frozen; only read. On several devices it had better be loaded where `sharding.of_backbone` says.
      examples: training sequences.
      head_config: shape of the head, or of a baseline's draft model; fits the backbone.
      config: of the run.
      out: run folder; must be new, or hold this very run when `resume`.
      resume: go on from the newest checkpoint, on the same mesh or another.
      features: of `examples`, computed before; None runs the backbone in each step.
      held_out: sequences whose acceptance is measured at each checkpoint, as decoded (see walk.py).
      init: head to start from, its draft vocabulary included; `head_config` must be its config. None starts afresh.
      stop_after: leave after this step, as an interruption would (the schedule still is that of config.steps).
      report: called after each step with the step number (from 1) and its metrics.
      decode_prompts: of the held-out sequences, so many are decoded at each checkpoint and compared with what is measured on them; by a
        single process only, since the decode loop runs in one.
      peak_tflops: of one device, in 1e12 FLOPs per second; the metrics then have its share that is used, `mfu`.
      tensorboard: write the metrics for TensorBoard as well.

    Returns:
      The best head: the run folder's head/.

    Raises:
      RunError: the folder holds another run, or one and `resume` is not set, or none and it is.
      DataError: as `data.check`.
      ConfigError: the head does not fit the backbone, or a baseline can't be trained so (BaselineConfig.check_trains).
      MeshError: config.mesh is not that of the devices.
      MonitorError: no tensorboardX.
      NotFiniteError: naming the step and its sequences; the last good checkpoint stays.
    """
    head_config.check_fits(backbone.config)
    if isinstance(head_config, config_lib.BaselineConfig):
        head_config.check_trains(config)
    data.check(examples, config)
    if init is not None and init.config != head_config:
        raise RunError(f"init: head {init.name!r} has another shape than head_config: take head_config from it")
    mesh = sharding.make_mesh(config.mesh)
    out = Path(out).resolve()
    sharding.on_first(lambda: _open_run(out, backbone, examples, head_config, config, init, resume))
    backbone = dataclasses.replace(backbone, params=sharding.place(backbone.params, mesh))
    head = forms.make(head_config, backbone.config)
    decoded = monitor.decodable(held_out, decode_prompts, config.max_length) if jax.process_count() == 1 else []
    state, draft_ids = _begin(head, examples, config, mesh, init)
    with ocp.CheckpointManager(out / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)) as manager:
        if resume and manager.latest_step() is not None:
            restored = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(_to_save(state, draft_ids)))
            state, draft_ids = _from_saved(restored)
        frozen = sharding.place(make_frozen(backbone, draft_ids), mesh)
        next_batch = _batch_source(backbone, examples, head_config, config, mesh, features, start=int(state.step))
        flops: dict[tuple[int, ...], int] = {}  # by shape of the batch's tokens
        with monitor.log(out, int(state.step), tensorboard=tensorboard) as write:
            for step in range(int(state.step), min(config.steps, stop_after or config.steps)):
                started = time.perf_counter()
                whole, batch, read = next_batch()
                if batch.tokens.shape not in flops:
                    live = None if features is not None else (backbone_lib.Backbone(backbone.config, taps=head_config.taps), backbone.params)
                    flops[batch.tokens.shape] = monitor.step_flops(head, config, state, frozen, read, batch, live)
                state, metrics = step_lib.train_step(head, config, state, frozen, read, batch, mesh)
                values: dict[str, Any] = {"loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm)}
                values["accept"] = np.asarray(metrics.accept).round(4).tolist()
                seconds, tokens = time.perf_counter() - started, int(whole.lengths.sum())
                values |= {"seconds": round(seconds, 3), "tokens": tokens}
                values |= monitor.speed(seconds, tokens, flops[batch.tokens.shape], mesh.size, peak_tflops)
                if not np.isfinite([values["loss"], values["grad_norm"]]).all():
                    named = ", ".join(examples[i].where or str(i) for i in whole.index.tolist())
                    raise NotFiniteError(f"step {step + 1}: loss={values['loss']}, grad_norm={values['grad_norm']}, sequences {named}")
                checkpoint = (step + 1) % config.checkpoint_every == 0 or step + 1 in (config.steps, stop_after)
                if checkpoint:
                    if held_out:
                        put = partial(_to_mesh, mesh, config.batch_size)
                        values["held_out"] = walk.measure(head, state.head_params, frozen, backbone, held_out, config, put).as_dict()
                        if not np.isfinite(values["held_out"]["loss"]):  # the update was too large; it is not kept
                            raise NotFiniteError(f"step {step + 1}: after the update the loss on what is held out is {values['held_out']['loss']}")
                    _keep_best(out / "head", backbone, head_config, config, state, draft_ids, values)
                    if decoded:
                        newest = _loaded(out.name, backbone, head_config, state, draft_ids)
                        values["decoded"] = monitor.decode(backbone, newest, frozen, decoded, config)
                write(step + 1, values)
                if checkpoint:  # last: what a resumed run finds here has been exported and logged
                    manager.save(step + 1, args=ocp.args.StandardSave(_to_save(state, draft_ids)))
                report(step + 1, values)
    from mtp_jax.checkpoints.load import load_head

    return load_head(out / "head", backbone)


def _begin(
    head: forms.AnyHead, examples: Sequence[data.Example], config: config_lib.TrainConfig, mesh: Mesh, init: LoadedHead | None
) -> tuple[step_lib.TrainState, np.ndarray]:
    """State before the first step, on its devices, and the draft vocabulary."""
    fresh = partial(step_lib.init_state, head, config)
    state = jax.jit(fresh, out_shardings=sharding.of_tree(jax.eval_shape(fresh), mesh))()
    if init is None:
        return state, data.draft_vocabulary(examples, head.config.draft_vocab_size, head.config.backbone_vocab_size)
    copied = jax.tree.map(lambda leaf: np.array(leaf, np.float32), init.params)  # the state is donated, and `init` is the caller's
    return state.replace(head_params=sharding.place(copied, mesh)), init.draft_ids


def make_frozen(backbone: LoadedBackbone, draft_ids: np.ndarray) -> loss_lib.Frozen:
    """Arrays of the backbone that the loss reads; the table is shared, the draft rows are cut out once."""
    params, config = backbone.params, backbone.config
    table = params["embed"]["embedding"]
    unembedding = table if config.tied_embeddings else jax.jit(jnp.transpose)(params["unembed"]["kernel"])
    vocab = jax.jit(partial(head_lib.draft_vocab, backbone=config))(draft_ids, params)
    return loss_lib.Frozen(table=table, unembedding=unembedding, vocab=vocab, final_softcap=config.final_softcap)


def _keep_best(
    folder: Path,
    backbone: LoadedBackbone,
    head_config: forms.AnyConfig,
    config: config_lib.TrainConfig,
    state: step_lib.TrainState,
    draft_ids: np.ndarray,
    values: dict[str, Any],
) -> None:
    """Write the state's head into `folder` if none before has more tokens per step; `values` say whether. Of equals the newest is kept,
    so that a run which repeats its last steps decides as it did."""
    from mtp_jax.checkpoints.load import save_head

    newest = _loaded(folder.parent.name, backbone, head_config, state, draft_ids)  # all processes have parts of it

    def write() -> None:
        if "held_out" in values:
            best = monitor.best_so_far(folder)
            values["best"] = best is None or values["held_out"]["tokens_per_step"] >= best
        if values.get("best", True):
            card = {"train_config": config_lib.to_dict(config), "step": int(state.step), "metrics": values}
            save_head(folder, dataclasses.replace(newest, card=card))

    sharding.on_first(write)


def _loaded(name: str, backbone: LoadedBackbone, head_config: forms.AnyConfig, state: step_lib.TrainState, draft_ids: np.ndarray) -> LoadedHead:
    """The head of a training state, as `load_head` gives it."""
    from mtp_jax.checkpoints.load import LoadedHead

    return LoadedHead(
        name=name,
        config=head_config,
        params=sharding.to_host(state.head_params),
        draft_ids=np.asarray(draft_ids, np.int32),
        fingerprint=backbone.fingerprint,
        backbone_name=backbone.name,
    )


def _batch_source(
    backbone: LoadedBackbone,
    examples: Sequence[data.Example],
    head_config: forms.AnyConfig,
    config: config_lib.TrainConfig,
    mesh: Mesh,
    store: features_lib.FeatureStore | None,
    start: int,
) -> Callable[[], tuple[data.Batch, data.Batch, features_lib.Features]]:
    """A function that gives the next step's batch on the host, and batch and features on the mesh; `start` is the first step.

    Of stored features, this process reads its own rows, ahead of time.
    """
    module = backbone_lib.Backbone(backbone.config, taps=head_config.taps)
    keys, values = head_config.layers_read, tuple(sorted(set(head_config.donors)))
    rows = sharding.rows_here(mesh, config.batch_size)

    read = None if store is None else lambda whole: store.batch(_rows_of(whole, rows), keys, values, head_config.taps)
    batches = pipeline.batches(examples, config, start, read=read)

    def next_batch() -> tuple[data.Batch, data.Batch, features_lib.Features]:
        whole, stored = next(batches)
        batch = _to_mesh(mesh, config.batch_size, whole)
        if stored is not None:
            return whole, batch, sharding.join_batch(stored, mesh, config.batch_size)
        features = step_lib.live_features(module, backbone.params, batch.tokens, key_layers=keys, value_layers=values, parts=config.accumulate, mesh=mesh)
        return whole, batch, features

    return next_batch


def _to_mesh(mesh: Mesh, batch_size: int, whole: data.Batch) -> data.Batch:
    """A batch that every process has whole, over the mesh."""
    rows = sharding.rows_here(mesh, batch_size)
    return sharding.join_batch(_rows_of(whole, rows), mesh, batch_size)


def _rows_of(whole: data.Batch, rows: slice) -> data.Batch:
    return jax.tree.map(lambda array: array[rows], whole)


def _to_save(state: step_lib.TrainState, draft_ids: np.ndarray) -> dict[str, Any]:
    return {"step": state.step, "head_params": state.head_params, "opt_state": state.opt_state, "draft_ids": np.asarray(draft_ids)}


def _from_saved(saved: dict[str, Any]) -> tuple[step_lib.TrainState, np.ndarray]:
    return step_lib.TrainState(step=saved["step"], head_params=saved["head_params"], opt_state=saved["opt_state"]), np.asarray(saved["draft_ids"])


def _open_run(
    out: Path,
    backbone: LoadedBackbone,
    examples: Sequence[data.Example],
    head_config: forms.AnyConfig,
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
    now["train_config"].pop("mesh")  # the machine may be another one
    for group, values in now.items():
        for name, value in values.items():
            if before.get(group, {}).get(name) != value:
                raise RunError(f"{path}: {group}.{name} is {before.get(group, {}).get(name)!r}, this run has {value!r}")


def split_held_out(examples: Sequence[data.Example], count: int, seed: int) -> tuple[list[data.Example], list[data.Example]]:
    """(training, held out): `count` sequences chosen by the seed, order kept."""
    chosen = set(np.random.default_rng((seed, 2)).permutation(len(examples))[:count].tolist())
    return [e for i, e in enumerate(examples) if i not in chosen], [e for i, e in enumerate(examples) if i in chosen]


__all__ = ["NotFiniteError", "RunError", "fit", "make_frozen", "split_held_out"]
