"""Baselines go through the same trainer: their unrolled steps are those of a full recomputation, and what is measured is what decoding does."""

import dataclasses
import json

import baseline_reference
import fakes
import jax
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors
from mtp_jax.checkpoints.load import load_head
from mtp_jax.commands import shared, train
from mtp_jax.decoding import generate
from mtp_jax.evaluation import roofline
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import forms
from mtp_jax.training import data, features, fit, loss, walk

KINDS = ("eagle", "eagle3", "deepseek", "own_cache", "medusa", "standalone")
M = 3
TEXTS = [np.random.default_rng(seed).integers(0, 20, length) for seed, length in ((6, 12), (7, 9))]


@pytest.fixture(scope="module")
def batch():
    rows = np.zeros((2, 10), np.int32)
    mask = np.zeros((2, 10), bool)
    tokens = np.zeros((2, 12), np.int32)
    for place, text in enumerate(TEXTS):
        tokens[place, : len(text)] = text
        rows[place, : len(text) - 2], mask[place, : len(text) - 2] = np.arange(len(text) - 2), True
    lengths = np.array([len(text) for text in TEXTS], np.int32)
    return data.Batch(tokens=tokens, lengths=lengths, answer=np.arange(12) < lengths[:, None], rows=rows, row_mask=mask, index=np.arange(2, dtype=np.int32))


@pytest.fixture(scope="module", params=[*KINDS, "standalone, 24 tokens"])
def model(request, backbone):
    kind, _, cut = request.param.partition(", ")
    return fakes.baseline(backbone, kind, **({"draft_vocab_size": 24} if cut else {}))


@pytest.fixture(scope="module")
def read(backbone, model, batch):
    module = backbone_lib.Backbone(backbone.config, taps=model.config.taps)
    return features.compute(module, backbone.params, batch.tokens, key_layers=(), value_layers=())


@pytest.fixture(scope="module")
def run(backbone, model, batch):
    """Unrolls; parameters and features, so that gradients can be taken, and options."""
    module, frozen = forms.make(model.config, backbone.config), fit.make_frozen(backbone, model.draft_ids)

    def unroll(params, read, rows_per_chunk=0):
        return loss.unroll(module, params, frozen, read, batch, M, rows_per_chunk=rows_per_chunk)

    return jax.jit(unroll, static_argnames="rows_per_chunk")


def test_unrolled_steps_are_those_of_a_full_recomputation(backbone, model, run, read):
    unrolled = run(model.params, read)
    for place, text in enumerate(TEXTS):
        for row in range(len(text) - 2):
            count = min(M, len(text) - 2 - row)
            expected = baseline_reference.draft(model, backbone, text[: row + 2].tolist(), text[row + 2 :][:count].tolist())
            logits = np.asarray(backbone_lib.Backbone(backbone.config).apply({"params": backbone.params}, read.hidden[place : place + 1], method="logits"))[0]
            for k, q in enumerate(expected):
                where = k, place, row
                assert q[unrolled.drafts[where]] > q.max() - 1e-4, where
                np.testing.assert_allclose(unrolled.probability[where], q[text[row + 2 + k]], rtol=1e-3, atol=1e-5, err_msg=f"{where}")
                if model.config.kind != "own_cache":  # whose candidates are the text's tokens, too
                    p = reference_softmax(logits[row + 1 + k][model.draft_ids])
                    np.testing.assert_allclose(unrolled.loss[where], -(p * np.log(q[model.draft_ids])).sum(), rtol=1e-3, err_msg=f"{where}")


def reference_softmax(logits):
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    return exponentials / exponentials.sum()


def test_gradients_reach_all_parameters_in_chunks_too(model, run, read):
    """Every parameter has a part in the loss; chunks, whose steps are a loop and computed twice, change nothing."""

    def gradient(rows_per_chunk):
        return jax.value_and_grad(lambda params: loss.mean_loss(run(params, read, rows_per_chunk=rows_per_chunk), 0.8))(model.params)

    (value, gradients), (other, others) = gradient(0), gradient(4)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(other, value, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), gradients, others)


def test_a_row_sees_no_pair_behind_it(model, run, read):
    """Every hidden state behind the row is other: its drafts are not."""
    before = run(model.params, read)
    for row in (0, 4):
        spoiled = run(model.params, read.replace(hidden=read.hidden.at[:, row + 1 :].add(3.0)))
        np.testing.assert_array_equal(spoiled.drafts[:, :, : row + 1], before.drafts[:, :, : row + 1])
        np.testing.assert_allclose(spoiled.probability[:, :, : row + 1], before.probability[:, :, : row + 1], rtol=1e-5)


def test_no_gradient_leads_back_to_the_backbone_through_taps(backbone, batch):
    """The features are cut off, and so is the training step from them."""
    head = fakes.baseline(backbone, "eagle3")
    module, frozen = forms.make(head.config, backbone.config), fit.make_frozen(backbone, head.draft_ids)

    def total(params):
        read = features.compute(backbone_lib.Backbone(backbone.config, taps=head.config.taps), params, batch.tokens, key_layers=(), value_layers=())
        return loss.mean_loss(loss.unroll(module, head.params, frozen, read, batch, M), 0.8)

    value, gradient = jax.value_and_grad(total)(backbone.params)
    assert value > 1 and all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))


def test_stored_taps(backbone, answers, training, tmp_path):
    """A run on stored features has the losses of one on features computed; other forms read the same store, and one without taps is refused."""
    head_config = fakes.baseline(backbone, "eagle3").config
    config = dataclasses.replace(training, steps=3, checkpoint_every=3)
    wanted = dict(backbone_fingerprint=backbone.fingerprint, key_layers=(), value_layers=(), max_length=config.max_length)
    for name, taps in (("plain", ()), ("tapped", (1, 2, 3, 4))):
        module = backbone_lib.Backbone(backbone.config, taps=taps)
        features.build(tmp_path / name, module, backbone.params, answers, **wanted, dtype="float32")
    store = features.open_store(tmp_path / "tapped", answers, **wanted, taps=head_config.taps)
    losses = {"stored": [], "computed": []}
    for name, found in losses.items():
        from_disk = store if name == "stored" else None
        fit.fit(backbone, answers, head_config, config, tmp_path / name, features=from_disk, report=lambda step, metrics, to=found: to.append(metrics["loss"]))
    np.testing.assert_allclose(losses["stored"], losses["computed"], rtol=1e-5)
    with pytest.raises(features.FeatureError, match=r"taps holds \[\], this head reads \[1, 2, 4\]"):
        features.open_store(tmp_path / "plain", answers, **wanted, taps=head_config.taps)
    assert "taps" not in json.loads((tmp_path / "plain" / "manifest.json").read_text())
    batch = data.batch_at(answers, config, 0)
    plain, tapped = (features.open_store(tmp_path / name, answers, **wanted).batch(batch, (), ()).hidden for name in ("plain", "tapped"))
    assert plain.shape == tapped.shape == (*batch.tokens.shape, 32)
    np.testing.assert_allclose(tapped, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "own_cache", "standalone"))])
def test_a_run_learns_and_decodes_as_measured(backbone, answers, training, tmp_path, kind):
    """Loss falls; the head that was saved loads; on the backbone's own answers decoding counts what was measured, exactly."""
    config = dataclasses.replace(training, steps=30, checkpoint_every=30)
    head_config = fakes.baseline(backbone, kind, **({"num_draft": 3} if kind == "medusa" else {})).config
    losses = []
    trained = fit.fit(backbone, answers, head_config, config, tmp_path / "run", report=lambda step, metrics: losses.append(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    loaded = load_head(tmp_path / "run", backbone)
    assert loaded.config == head_config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, trained.params)

    module, frozen = forms.make(head_config, backbone.config), fit.make_frozen(backbone, loaded.draft_ids)
    counted = walk.measure(module, loaded.params, frozen, backbone, answers, config)
    prompts = [example.tokens[~example.answer].tolist() for example in answers]
    rules = config_lib.DecodeConfig(max_new_tokens=30, num_draft=3, stop_tokens=(16,))
    outputs = generate.run(generate.make_runtime(backbone, loaded, drafter=kind), prompts, rules).outputs
    assert [output.tokens for output in outputs] == [example.tokens[example.answer].tolist() for example in answers]
    assert counted.steps == sum(output.steps for output in outputs)
    assert counted.accepted == np.sum([output.accepted for output in outputs], axis=0).tolist()
    assert 0 < counted.accepted[0] < counted.steps
    with pytest.raises(errors.CheckpointError, match=f"kind='{kind}': must be an MTP head here"):
        loaded.mtp_config  # noqa: B018  # what export asks for


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("eagle", {"mesh": (2, 1, 1)}, r"mesh=\(2, 1, 1\): must be \(1, 1, 1\): eagle is trained on one device"),
        ("medusa", {"num_draft": 5}, "num_draft=5: must be at most 4, the heads there are"),
        ("standalone", {"loss": ("soft_ce", "hidden")}, "must not have the term hidden"),
        ("eagle3", {"loss": ("soft_ce", "hidden")}, "must not have the term hidden: eagle3 does not estimate"),
    ],
)
def test_runs_that_are_refused(backbone, answers, tmp_path, kind, values, message):
    head_config = fakes.baseline(backbone, kind, num_draft=4).config if kind == "medusa" else fakes.baseline(backbone, kind).config
    with pytest.raises(config_lib.ConfigError, match=message):
        fit.fit(backbone, answers, head_config, config_lib.TrainConfig(batch_size=8, **values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_flags_describe_the_head():
    shape = train.HeadShape(form="standalone", width=16, num_layers=3, num_heads=2, num_kv_heads=1).head_config(fakes.BACKBONE)
    assert shape == config_lib.baseline_config_for(fakes.BACKBONE, "standalone", width=16, num_layers=3, num_heads=2, num_kv_heads=1)
    assert train.HeadShape(form="medusa").head_config(fakes.BACKBONE, 7).num_draft == 7
    assert train.HeadShape(form="own_cache", pointer=False).head_config(fakes.BACKBONE).pointer_heads == 0
    assert train.HeadShape(form="own_cache", pointer_heads=3).head_config(fakes.BACKBONE).pointer_heads == 3
    assert train.HeadShape(form="eagle3", taps=(1, 3)).head_config(fakes.BACKBONE).taps == (1, 3)
    for flags, message in (
        ({"form": "eagle", "taps": (1, 3)}, "--taps: --form eagle reads the backbone's last state alone"),
        ({"form": "eagle", "donors": (1,)}, "--donors: --form eagle reads no K/V of the backbone"),
        ({"form": "eagle", "input_norms": False}, "--no-input-norms: --form eagle has no such choice"),
        ({"form": "eagle", "query_position": "last"}, "--query-position: --form eagle reads no K/V"),
        ({"form": "medusa", "pointer_heads": 2}, "--pointer-heads: --form medusa has no pointer"),
        ({"form": "own_cache", "pointer_donors": (1,)}, "--pointer-donors: --form own_cache points at its own keys"),
        ({"form": "light", "num_layers": 2}, "--num-layers: --form light has no K/V of its own"),
    ):
        with pytest.raises(shared.UsageError, match=message):
            train.HeadShape(**flags).head_config(fakes.BACKBONE)


def test_work_of_a_drafted_token_by_hand(backbone):
    """Width 32, MLP 48, 64 or 24 tokens; attention of 6 heads over 3 key heads, 10 wide, 100 slots."""
    eagle = fakes.baseline(backbone, "eagle")
    work = roofline.head_work(eagle.params, eagle.config, backbone.config, batch=2, num_slots=100)
    matrices = 64 * 32 + 32 * 60 + 2 * 32 * 30 + 60 * 32 + 3 * 32 * 48
    assert (work.layers, work.unembedding, work.cache) == (matrices + 2 * 32, 24 * 32, 2 * 2 * 3 * 100 * 10)
    assert work.flops == 2 * (2 * (matrices + 24 * 32) + 4 * 6 * 100 * 10)
    eagle3 = fakes.baseline(backbone, "eagle3")
    work = roofline.head_work(eagle3.params, eagle3.config, backbone.config, batch=1, num_slots=100)
    assert work.layers == 64 * 60 + 2 * 64 * 30 + 60 * 32 + 3 * 32 * 48 + 4 * 32
    small = fakes.baseline(backbone, "standalone")
    work = roofline.head_work(small.params, small.config, backbone.config, batch=1, num_slots=100)
    assert (work.unembedding, work.cache) == (64 * 16, 2 * 2 * 3 * 100 * 10)
    medusa = fakes.baseline(backbone, "medusa")
    assert roofline.head_work(medusa.params, medusa.config, backbone.config, batch=1, num_slots=100) == roofline.Work(
        layers=32 * 32, unembedding=24 * 32, cache=0, flops=2 * (32 * 32 + 24 * 32)
    )
