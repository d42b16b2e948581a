"""Features on disk: in each dtype the values and losses of features computed on the spot, to its precision; builds that go on or start again."""

import json

import fakes
import jax
import ml_dtypes
import numpy as np
import pytest

from mtp_jax.config import TrainConfig
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.training import data, features, fit

KEYS, VALUES = fakes.HEAD.layers_read, tuple(sorted(set(fakes.HEAD.donors)))
SHORT = TrainConfig(steps=2, batch_size=8, max_length=64, num_draft=3, rows_per_sequence=8, optimizer="adamw", learning_rate=1e-2)
# Half of the distance between neighbours, relative: what rounding to nearest loses at most.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def wanted(backbone, **changes):
    return dict(backbone_fingerprint=backbone.fingerprint, key_layers=KEYS, value_layers=VALUES, max_length=64) | changes


def build(folder, backbone, examples, **changes):
    return features.build(folder, backbone_lib.Backbone(backbone.config), backbone.params, examples, **wanted(backbone, **changes))


def live(backbone, batch):
    return features.compute(backbone_lib.Backbone(backbone.config), backbone.params, batch.tokens, key_layers=KEYS, value_layers=VALUES)


def arrays_of(read):
    return {"hidden": read.hidden} | {f"keys_{layer}": read.keys[layer] for layer in KEYS} | {f"values_{layer}": read.values[layer] for layer in VALUES}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def online_losses(backbone, answers, tmp_path_factory):
    return losses(backbone, answers, tmp_path_factory.mktemp("online") / "run")


def losses(backbone, answers, out, store=None):
    fit.fit(backbone, answers, fakes.HEAD, SHORT, out, features=store)
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_stored_features_are_the_computed_ones_rounded(backbone, answers, online_losses, tmp_path, dtype):
    built = build(tmp_path / "f", backbone, answers, dtype=dtype)
    opened = features.open_store(tmp_path / "f", answers, **wanted(backbone), dtype=dtype)
    batch = data.batch_at(answers, SHORT, 0)
    for store in (built, opened):
        read = arrays_of(store.batch(batch, KEYS, VALUES))
        for name, value in arrays_of(live(backbone, batch)).items():
            value = np.asarray(value)
            assert read[name].dtype == np.float32
            for row, length in enumerate(batch.lengths):  # the time axis is the last but one
                stored, computed = read[name][row, ..., :length, :], value[row, ..., :length, :]
                # Batches of another width sum in another order, so the last bits of float32 differ on top of the rounding.
                np.testing.assert_allclose(stored, computed, rtol=ROUNDING[dtype] * 1.01 + 1e-5, atol=1e-5, err_msg=name)
                assert (read[name][row, ..., length:, :] == 0).all()
    found = losses(backbone, answers, tmp_path / "run", opened)
    np.testing.assert_allclose(found, online_losses, rtol=8 * ROUNDING[dtype] + 1e-5)
    if dtype != "float32":
        assert found != online_losses


def test_dtypes_on_disk(backbone, answers, tmp_path):
    """Two bytes a value or four; bfloat16 is rounded to nearest, and read back as its own dtype."""
    sizes = {}
    for dtype in ROUNDING:
        store = build(tmp_path / dtype, backbone, answers[:8], dtype=dtype)
        sizes[dtype] = store.arrays["hidden"].nbytes
        manifest = json.loads((tmp_path / dtype / "manifest.json").read_text())
        assert manifest["dtype"] == dtype and store.arrays["hidden"].dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert sizes["float32"] == 2 * sizes["float16"] == 2 * sizes["bfloat16"]
    full, half = (np.load(tmp_path / dtype / "hidden.npy") for dtype in ("float32", "bfloat16"))
    np.testing.assert_array_equal(half.view(ml_dtypes.bfloat16), full.astype(ml_dtypes.bfloat16))


def test_the_manifest_ties_features_to_dtype_and_size(backbone, answers, tmp_path):
    build(tmp_path, backbone, answers[:8], dtype="bfloat16")
    with pytest.raises(features.FeatureError, match="dtype is 'bfloat16', this run has 'float16'"):
        features.open_store(tmp_path, answers[:8], **wanted(backbone), dtype="float16")
    assert features.open_store(tmp_path, answers[:8], **wanted(backbone)).arrays["hidden"].dtype == ml_dtypes.bfloat16
    hidden = np.load(tmp_path / "hidden.npy")
    np.save(tmp_path / "hidden.npy", hidden[:-1])
    with pytest.raises(features.FeatureError, match=rf"hidden.npy: holds {len(hidden) - 1} tokens, .*manifest.json tells of {len(hidden)}"):
        features.open_store(tmp_path, answers[:8], **wanted(backbone))


def test_files_that_are_not_what_the_manifest_says(backbone, answers, tmp_path):
    build(tmp_path, backbone, answers[:8], dtype="float16")
    with pytest.raises(features.FeatureError, match="backbone_dtype is 'float32', this run has 'bfloat16'"):
        features.open_store(tmp_path, answers[:8], **wanted(backbone), backbone_dtype="bfloat16")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"dtype": "bfloat16"}))
    with pytest.raises(features.FeatureError, match="hidden.npy: holds float16, and the manifest tells of bfloat16"):
        features.open_store(tmp_path, answers[:8], **wanted(backbone))
    del manifest["backbone_dtype"]  # as the first version wrote it
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    features.open_store(tmp_path, answers[:8], **wanted(backbone))
    for size in (1000, 0):
        with open(tmp_path / "hidden.npy", "r+b") as file:
            file.truncate(size)
        with pytest.raises(features.FeatureError, match="hidden.npy: not a whole array file"):
            features.open_store(tmp_path, answers[:8], **wanted(backbone))


def test_unknown_dtypes_are_refused(backbone, answers, tmp_path):
    with pytest.raises(features.FeatureError, match="dtype='int8': must be one of float16, bfloat16, float32"):
        build(tmp_path, backbone, answers[:8], dtype="int8")
    assert not list(tmp_path.iterdir())


class Interrupted(Exception):
    pass


def interrupted_build(folder, backbone, examples, after, **changes):
    """Ends with an exception after so many sequences."""

    def progress(done, total):
        if done == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        build(folder, backbone, examples, progress=progress, **changes)


def test_an_interrupted_build_goes_on_and_is_never_taken_for_complete(backbone, answers, tmp_path, monkeypatch):
    """24 sequences in batches of 4, noted every 2: cut off after 5, it goes on behind the 4th, and ends with the same bytes."""
    monkeypatch.setattr(features, "FLUSH_EVERY", 2)
    common = dict(batch_size=4, dtype="bfloat16")
    build(tmp_path / "whole", backbone, answers, **common)
    interrupted_build(tmp_path / "cut", backbone, answers, 20, **common)
    with pytest.raises(features.FeatureError, match="never finished"):
        features.open_store(tmp_path / "cut", answers, **wanted(backbone))
    for path in (tmp_path / "cut").glob("*.npy"):  # what was not noted may be anything
        array = np.load(path, mmap_mode="r+")
        lengths = np.array([len(example.tokens) for example in answers])
        ends = np.cumsum(lengths)
        for index in np.argsort(lengths, kind="stable")[16:]:
            array[ends[index] - lengths[index] : ends[index]] = 0x7FC0
        array.flush()
    seen = []
    build(tmp_path / "cut", backbone, answers, **common, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(20, 24), (24, 24)]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert sorted(contents(tmp_path / "cut")) == sorted(["manifest.json", "hidden.npy", *(f"keys_{k}.npy" for k in KEYS), *(f"values_{v}.npy" for v in VALUES)])


@pytest.mark.parametrize("change", [dict(dtype="float32"), dict(backbone_fingerprint="f" * 16), dict(max_length=20)], ids=str)
def test_another_build_starts_again(backbone, answers, tmp_path, monkeypatch, change):
    monkeypatch.setattr(features, "FLUSH_EVERY", 1)
    interrupted_build(tmp_path / "f", backbone, answers[:16], 8)
    seen = []
    build(tmp_path / "f", backbone, answers[:16], **change, progress=lambda done, total: seen.append(done))
    assert seen == [8, 16]
    build(tmp_path / "fresh", backbone, answers[:16], **change)
    assert contents(tmp_path / "f") == contents(tmp_path / "fresh")


def test_a_build_over_a_finished_one_takes_its_manifest_away_first(backbone, answers, tmp_path):
    build(tmp_path, backbone, answers[:16])
    interrupted_build(tmp_path, backbone, answers[8:], 8)
    for examples in (answers[:16], answers[8:]):
        with pytest.raises(features.FeatureError, match="never finished"):
            features.open_store(tmp_path, examples, **wanted(backbone))


def test_no_gradient_leads_back_to_the_backbone(backbone, answers):
    batch = data.batch_at(answers, SHORT, 0)

    def total(params):
        read = features.compute(backbone_lib.Backbone(backbone.config), params, batch.tokens, key_layers=KEYS, value_layers=VALUES)
        return sum(leaf.sum() for leaf in jax.tree.leaves(read))

    gradient = jax.grad(total)(backbone.params)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))
