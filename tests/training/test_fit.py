"""A training run: it learns, touches only the head, resumes bit for bit, refuses what does not belong to it, and stops at a NaN."""

import dataclasses
import json

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mtp_jax.checkpoints.load import load_head
from mtp_jax.config import TrainConfig
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, features, fit, loss, step

SHORT = TrainConfig(steps=6, batch_size=8, max_length=64, num_draft=3, rows_per_sequence=8, optimizer="adamw", learning_rate=1e-2, checkpoint_every=2)
KEYS, VALUES = fakes.HEAD.layers_read, tuple(sorted(set(fakes.HEAD.donors)))


def lines(out):
    """metrics.jsonl without the times."""
    return [{name: value for name, value in json.loads(line).items() if "second" not in name} for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope="module")
def in_one_go(backbone, answers, tmp_path_factory):
    out = tmp_path_factory.mktemp("fit") / "whole"
    return out, fit.fit(backbone, answers, fakes.HEAD, SHORT, out)


def test_loss_goes_down_and_acceptance_up(trained, training):
    found = lines(trained[0])
    assert [line["step"] for line in found] == list(range(1, training.steps + 1))
    assert np.mean([line["loss"] for line in found[-6:]]) < 0.8 * np.mean([line["loss"] for line in found[:6]])  # the labels' own entropy stays
    assert np.mean([line["accept"][0] for line in found[-6:]]) > np.mean([line["accept"][0] for line in found[:6]]) + 0.1
    assert found[-1]["held_out"]["steps"] > 0 and 1 <= found[-1]["held_out"]["tokens_per_step"] <= training.num_draft + 1


def test_the_exported_head_loads(trained, backbone):
    out, returned = trained
    loaded = load_head(out, backbone)
    assert (loaded.name, loaded.config, loaded.fingerprint, loaded.backbone_name) == ("tiny-head", fakes.HEAD, backbone.fingerprint, "tiny")
    assert loaded.card["step"] == 60 and loaded.card["train_config"]["steps"] == 60
    np.testing.assert_array_equal(loaded.draft_ids, returned.draft_ids)
    assert same(loaded.params, returned.params)


def test_only_the_head_is_trained_and_saved(backbone, answers, in_one_go):
    """Optimizer state and checkpoint hold a moment per head parameter and nothing of the backbone's; its arrays are as they were."""
    out, _ = in_one_go
    before = fakes.backbone()
    assert same(before.params, backbone.params)
    head = head_lib.Head(fakes.HEAD, backbone.config)
    state = step.init_state(head, SHORT)
    head_shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state.head_params))
    moments = sorted(leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == sorted(head_shapes * 2)
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        assert manager.latest_step() == 6
        saved = manager.restore(6, args=ocp.args.StandardRestore())
    assert set(saved) == {"step", "head_params", "opt_state", "draft_ids"}
    assert {name: leaf.shape for name, leaf in flat(saved["head_params"]).items()} == head_lib.param_shapes(fakes.HEAD, backbone.config)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(saved["opt_state"]) if np.ndim(leaf)) == moments
    trained = head_lib.param_shapes(fakes.HEAD, backbone.config)
    assert same({name: True for name in trained}, {name: bool((flat(saved["head_params"])[name] != flat(state.head_params)[name]).any()) for name in trained})


def flat(tree):
    return {"/".join(str(part.key) for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_accumulated_steps_are_the_whole_batchs(backbone, answers, trained):
    """Parts have different numbers of rows, so a mean of their means would be another loss."""
    head = head_lib.Head(fakes.HEAD, backbone.config)
    batch = data.batch_at(answers, SHORT, 0)
    batch = batch.replace(row_mask=batch.row_mask & (np.arange(8) < np.arange(1, 9)[:, None]))
    frozen = fit.make_frozen(backbone, trained[1].draft_ids)
    read = features.compute(backbone_lib.Backbone(backbone.config), backbone.params, batch.tokens, key_layers=KEYS, value_layers=VALUES)
    found = {}
    for parts in (1, 4):
        config = dataclasses.replace(SHORT, accumulate=parts, remat=parts > 1, normalise="tokens")
        state = step.init_state(head, config).replace(head_params=jax.tree.map(jnp.array, trained[1].params))
        found[parts] = step.train_step(head, config, state, frozen, read, batch)
    for one, four in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[4]), strict=True):
        np.testing.assert_allclose(one, four, rtol=1e-5, atol=1e-6)
    assert (np.asarray(found[1][1].accept) > 0).any()
    means = []
    for part in range(4):
        chosen = jax.tree.map(lambda array, part=part: array[part::4], (read, batch))
        means.append(float(loss.mean_loss(loss.unroll(head, trained[1].params, frozen, *chosen, 3), SHORT.step_decay)))
    assert abs(np.mean(means) - float(found[1][1].loss)) > 1e-3


def test_parts_of_a_batch_are_spread_and_put_together_again():
    rows = np.arange(12).reshape(6, 2)
    parts = step.split(rows, 3)
    np.testing.assert_array_equal(parts[:, :, 0], [[0, 6], [2, 8], [4, 10]])  # rows 0 and 3; 1 and 4; 2 and 5
    np.testing.assert_array_equal(step.join(parts), rows)


def test_features_in_parts_are_those_of_the_whole_batch(backbone, answers):
    batch, module = data.batch_at(answers, SHORT, 0), backbone_lib.Backbone(backbone.config)
    whole, parts = (step.live_features(module, backbone.params, batch.tokens, key_layers=KEYS, value_layers=VALUES, parts=parts) for parts in (1, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, parts)


def test_small_updates_are_not_lost_in_bfloat16(answers):
    """The head's products run in the backbone's bfloat16, where 1 + 1e-5 is 1; its own parameters, in float32, keep the difference."""
    low = fakes.backbone(dataclasses.replace(fakes.BACKBONE, dtype="bfloat16"))
    head = head_lib.Head(fakes.HEAD, low.config)
    config = dataclasses.replace(SHORT, learning_rate=1e-5, weight_decay=0.0, warmup_fraction=0.0)
    state = step.init_state(head, config)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.head_params, state.opt_state)) if leaf.ndim} == {jnp.dtype("float32")}
    before = jax.tree.map(np.array, state.head_params)
    forward = flat(forms.in_forward_dtypes(head, state.head_params))
    assert (forward["pre/kernel"].dtype, forward["norm/scale"].dtype, forward["gate_kernel"].dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    batch, frozen = data.batch_at(answers, config, 0), fit.make_frozen(low, np.arange(24, dtype=np.int32))
    read = features.compute(backbone_lib.Backbone(low.config), low.params, batch.tokens, key_layers=KEYS, value_layers=VALUES)
    for _ in range(3):
        state, _ = step.train_step(head, config, state, frozen, read, batch)
    change = np.abs(flat(state.head_params)["norm/scale"] - flat(before)["norm/scale"])
    assert 0 < change.max() < 4e-5  # three steps of at most about 1e-5; in bfloat16 next to 1.0 the least step is 4e-3
    assert {leaf.dtype for leaf in jax.tree.leaves(state.head_params)} == {jnp.dtype("float32")}
    products = [line for line in _dots(head, config, state, frozen, read, batch) if "16x24" in line or "24x16" in line]  # the head's MLP
    assert products and all("bf16" in line and "f32" not in line.split("->")[0].split(":")[-1] for line in products)


def _dots(head, config, *args):
    return [line for line in step.train_step.lower(head, config, *args).as_text().splitlines() if "dot_general" in line]


def test_the_gradient_is_the_heads_alone(backbone, answers):
    """Nothing flows to the backbone's arrays even when they are asked."""
    head = head_lib.Head(fakes.HEAD, backbone.config)
    params = fakes.head(backbone).params
    batch = data.batch_at(answers, SHORT, 0)

    def total(backbone_params, head_params):
        read = features.compute(backbone_lib.Backbone(backbone.config), backbone_params, batch.tokens, key_layers=KEYS, value_layers=VALUES)
        loaded = dataclasses.replace(backbone, params=backbone_params)
        frozen = jax.lax.stop_gradient(fit.make_frozen(loaded, np.arange(24, dtype=np.int32)))
        return loss.mean_loss(loss.unroll(head, head_params, frozen, read, batch, 2), 0.8)

    to_backbone, to_head = jax.jit(jax.grad(total, argnums=(0, 1)))(backbone.params, params)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(to_backbone))
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(to_head))


def test_resuming_is_the_unbroken_run_bit_for_bit(backbone, answers, in_one_go, tmp_path):
    """Stop after 3 of 6 steps, add a line that a crash cut off and one of a step that no checkpoint holds, then go on."""
    out = tmp_path / "halves"
    fit.fit(backbone, answers, fakes.HEAD, SHORT, out, stop_after=3)
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "loss": 0.0}) + '\n{"step": 5, "lo')
    halves = fit.fit(backbone, answers, fakes.HEAD, SHORT, out, resume=True)
    whole_out, whole = in_one_go
    assert lines(out) == lines(whole_out) and len(lines(out)) == 6
    assert same(halves.params, whole.params)
    assert np.array_equal(halves.draft_ids, whole.draft_ids)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(config=dataclasses.replace(SHORT, learning_rate=2e-2)), "train_config.learning_rate is 0.01, this run has 0.02"),
        (dict(config=dataclasses.replace(SHORT, seed=1)), "train_config.seed is 0, this run has 1"),
        (dict(head_config=dataclasses.replace(fakes.HEAD, mlp_width=25)), "head_config.mlp_width is 24, this run has 25"),
        (dict(few=True), "data.fingerprint is "),
        (dict(other=True), "backbone.fingerprint is "),
    ],
)
def test_resuming_another_run_is_refused(backbone, answers, in_one_go, change, message):
    loaded = dataclasses.replace(backbone, fingerprint="f" * 16) if change.get("other") else backbone
    with pytest.raises(fit.RunError, match=message):
        fit.fit(
            loaded,
            answers[:9] if change.get("few") else answers,
            change.get("head_config", fakes.HEAD),
            change.get("config", SHORT),
            in_one_go[0],
            resume=True,
        )


def test_folders_that_are_not_this_run_are_refused(backbone, answers, in_one_go, tmp_path):
    with pytest.raises(fit.RunError, match="holds a run already; pass --resume"):
        fit.fit(backbone, answers, fakes.HEAD, SHORT, in_one_go[0])
    with pytest.raises(fit.RunError, match="no such file, so there is no run to resume"):
        fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "new", resume=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fit.RunError, match="not empty, and not a training run"):
        fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@dataclasses.dataclass
class Spoiled:
    """Features as computed, but those of one batch, told by its sequences, are not numbers. Batches are read ahead, so calls can't be counted."""

    backbone: object
    bad: list[int] | None = None

    def batch(self, batch, keys, values, taps=()):
        read = features.compute(backbone_lib.Backbone(self.backbone.config), self.backbone.params, batch.tokens, key_layers=keys, value_layers=values)
        return read.replace(hidden=read.hidden * np.nan) if batch.index.tolist() == self.bad else read


def test_a_loss_that_is_not_a_number_stops_the_run(backbone, answers, tmp_path):
    out = tmp_path / "nan"
    sequences = data.batch_at(answers, SHORT, 3).index.tolist()
    with pytest.raises(fit.NotFiniteError, match=rf"step 4: loss=nan, .*sequences {sequences[0]}, "):
        fit.fit(backbone, answers, fakes.HEAD, SHORT, out, features=Spoiled(backbone, sequences))
    assert sorted(int(path.name) for path in (out / "checkpoints").iterdir()) == [2]
    assert [line["step"] for line in lines(out)] == [1, 2, 3]
    kept = load_head(out, backbone)
    assert kept.card["step"] == 2 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept.params))
    resumed = fit.fit(backbone, answers, fakes.HEAD, SHORT, out, resume=True, features=Spoiled(backbone))
    whole = fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "whole", features=Spoiled(backbone))
    assert same(resumed.params, whole.params)  # with the cause gone, it goes on as if nothing had been


def test_an_update_that_spoils_the_head_is_not_kept(backbone, answers, tmp_path):
    """Step 2's loss is that of the parameters before its update: what is held out tells that the new ones are no good."""
    config = dataclasses.replace(SHORT, learning_rate=1e30, warmup_fraction=0.5, checkpoint_every=1)
    with pytest.raises(fit.NotFiniteError, match="step [12]: after the update the loss on what is held out is (nan|inf)"):
        fit.fit(backbone, answers, fakes.HEAD, config, tmp_path / "run", held_out=answers[:4])
    assert all(int(path.name) < 2 for path in (tmp_path / "run" / "checkpoints").iterdir())
    for batch_size in (25, 48):
        with pytest.raises(data.DataError, match=f"batch_size={batch_size}: must be at most the number of sequences to train on, 24"):
            fit.fit(backbone, answers, fakes.HEAD, dataclasses.replace(SHORT, batch_size=batch_size), tmp_path / "small")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 5e-3)])
def test_features_on_disk_give_the_loss_of_features_computed(backbone, answers, in_one_go, tmp_path, dtype, tolerance):
    common = dict(backbone_fingerprint=backbone.fingerprint, key_layers=KEYS, value_layers=VALUES, max_length=64)
    seen = []
    built = features.build(
        tmp_path / "f",
        backbone_lib.Backbone(backbone.config),
        backbone.params,
        answers,
        **common,
        dtype=dtype,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(8, 24), (16, 24), (24, 24)]
    opened = features.open_store(tmp_path / "f", answers, **common)
    batch = data.batch_at(answers, SHORT, 0)
    live = features.compute(backbone_lib.Backbone(backbone.config), backbone.params, batch.tokens, key_layers=KEYS, value_layers=VALUES)
    for store in (built, opened):
        read = store.batch(batch, KEYS, VALUES)
        for row, length in enumerate(batch.lengths):
            np.testing.assert_allclose(read.hidden[row, :length], live.hidden[row, :length], rtol=tolerance, atol=tolerance)
            for layer in KEYS:
                np.testing.assert_allclose(read.keys[layer][row, :, :length], live.keys[layer][row, :, :length], rtol=tolerance, atol=tolerance)
            for layer in VALUES:
                np.testing.assert_allclose(read.values[layer][row, :, :length], live.values[layer][row, :, :length], rtol=tolerance, atol=tolerance)
            assert (read.hidden[row, length:] == 0).all()
    fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "run", features=opened, stop_after=2)
    np.testing.assert_allclose(
        [line["loss"] for line in lines(tmp_path / "run")], [line["loss"] for line in lines(in_one_go[0])[:2]], rtol=tolerance, atol=tolerance
    )


def test_features_of_something_else_are_refused(backbone, answers, tmp_path):
    common = dict(backbone_fingerprint=backbone.fingerprint, key_layers=KEYS, value_layers=VALUES, max_length=64)
    with pytest.raises(features.FeatureError, match="manifest.json: missing, so the features were never finished"):
        features.open_store(tmp_path, answers, **common)
    features.build(tmp_path, backbone_lib.Backbone(backbone.config), backbone.params, answers[:8], **common)
    for change, message in (
        (dict(backbone_fingerprint="f" * 16), "backbone is "),
        (dict(max_length=32), "max_length is 64, this run has 32"),
        (dict(key_layers=(0, 2)), r"key_layers holds \[2, 3\], this head reads \[0, 2\]"),
        (dict(value_layers=(1,)), "value_layers holds"),
    ):
        with pytest.raises(features.FeatureError, match=message):
            features.open_store(tmp_path, answers[:8], **(common | change))
    with pytest.raises(features.FeatureError, match="data is "):
        features.open_store(tmp_path, answers[:7], **common)


def test_features_that_do_not_fit_the_dtype_are_refused(backbone, answers, tmp_path):
    big = dict(backbone.params, final_norm={"scale": backbone.params["final_norm"]["scale"] * 1e6})
    with pytest.raises(features.FeatureError, match="hidden: a value does not fit float16; use float32"):
        features.build(
            tmp_path,
            backbone_lib.Backbone(backbone.config),
            big,
            answers[:8],
            backbone_fingerprint="x",
            key_layers=KEYS,
            value_layers=VALUES,
            max_length=64,
        )
    assert not (tmp_path / "manifest.json").exists()


def test_split_held_out():
    sequences = [data.Example("t", np.asarray([i]), np.asarray([True])) for i in range(10)]
    training, held_out = fit.split_held_out(sequences, 3, seed=0)
    names = [int(e.tokens[0]) for e in training], [int(e.tokens[0]) for e in held_out]
    assert len(names[1]) == 3 and sorted(names[0] + names[1]) == list(range(10)) and names[0] == sorted(names[0])
    assert [int(e.tokens[0]) for e in fit.split_held_out(sequences, 3, seed=1)[1]] != names[1]


def test_training_goes_on_from_a_given_head(in_one_go, backbone, answers, tmp_path):
    """`init` gives parameters and draft vocabulary; the first step already has the trained head's loss, not a fresh one's."""
    out, start = in_one_go
    tuned = fit.fit(backbone, answers, start.config, SHORT, tmp_path / "tuned", init=start, stop_after=1)
    np.testing.assert_array_equal(tuned.draft_ids, start.draft_ids)
    assert lines(tmp_path / "tuned")[0]["loss"] < lines(out)[0]["loss"] - 0.1
    with pytest.raises(fit.RunError, match="another shape"):
        fit.fit(backbone, answers, dataclasses.replace(start.config, mlp_width=25), SHORT, tmp_path / "other", init=start)
