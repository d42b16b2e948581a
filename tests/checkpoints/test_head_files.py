"""Head folders: round trip, refusals, and writes that can be interrupted."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tiny_files
from safetensors.numpy import load_file, save

from mtp_jax.checkpoints import errors, heads
from mtp_jax.checkpoints.load import LoadedBackbone
from mtp_jax.config import ConfigError, head_config_for
from mtp_jax.models import head as head_lib

CONFIG = head_config_for(tiny_files.CONFIG, draft_vocab_size=20)
BACKBONE = LoadedBackbone("tiny", tiny_files.CONFIG, {}, None, "0123456789abcdef")  # type: ignore[arg-type]


@pytest.fixture
def head():
    rng = np.random.default_rng(0)
    shapes = head_lib.param_shapes(CONFIG, tiny_files.CONFIG)
    params = heads.unflatten({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    ids = rng.permutation(tiny_files.CONFIG.vocab_size)[:20].astype(np.int32)
    return heads.LoadedHead("mine", CONFIG, params, ids, BACKBONE.fingerprint, "tiny", {"tokens_per_step": 2.5})


def _rewrite(folder, change_tensors=None, **record):
    """Change a saved head consistently: the hash is kept right, so only the change is at fault."""
    import hashlib

    tensors = load_file(folder / heads.TENSORS)
    if change_tensors:
        change_tensors(tensors)
    data = save(tensors)
    (folder / heads.TENSORS).write_bytes(data)
    old = json.loads((folder / heads.RECORD).read_text())
    (folder / heads.RECORD).write_text(json.dumps(old | {"sha256": hashlib.sha256(data).hexdigest()} | record))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trip(tmp_path, head, dtype):
    loaded = heads.load_head(heads.save_head(tmp_path / "new" / "h", head, dtype=dtype), BACKBONE)
    assert (loaded.name, loaded.config, loaded.fingerprint, loaded.backbone_name, loaded.card) == ("mine", CONFIG, "0123456789abcdef", "tiny", head.card)
    np.testing.assert_array_equal(loaded.draft_ids, head.draft_ids)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(head.params)
    for found, written in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(head.params), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, np.asarray(written).astype(dtype).astype(np.float32))
    stored = load_file(tmp_path / "new" / "h" / heads.TENSORS)
    assert {value.dtype.name for name, value in stored.items()} == {dtype, "int32"}


def test_training_run_folders(tmp_path, head):
    heads.save_head(tmp_path / "run" / "head", head)
    assert heads.load_head(tmp_path / "run", BACKBONE).name == "mine"
    heads.save_head(tmp_path / "run2" / "step_10" / "head", dataclasses.replace(head, name="latest"))
    (tmp_path / "run2" / "latest.json").write_text(json.dumps({"folder": "step_10"}))
    assert heads.load_head(tmp_path / "run2", BACKBONE).name == "latest"
    (tmp_path / "run2" / "latest.json").write_text("{}")
    with pytest.raises(errors.DamagedFile, match="latest.json: folder=None"):
        heads.load_head(tmp_path / "run2", BACKBONE)


def test_shipped_heads_go_by_name(tmp_path, head, monkeypatch):
    monkeypatch.setattr(heads, "SHIPPED", tmp_path)
    heads.save_head(tmp_path / "good-head", head)
    assert heads.load_head("good-head", BACKBONE).name == "mine"
    with pytest.raises(errors.UnknownName, match=r"head 'bad-head' doesn't exist: .*\(good-head\)"):
        heads.load_head("bad-head", BACKBONE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.UnknownName, match="holds no head.json"):
        heads.load_head(tmp_path / "empty", BACKBONE)


def test_another_backbone_is_refused_unless_asked(tmp_path, head):
    folder = heads.save_head(tmp_path, dataclasses.replace(head, fingerprint="f" * 16))
    with pytest.raises(errors.CheckpointError, match=r"another backbone \(fingerprint f{16}, this backbone 0123456789abcdef\).*any_backbone=True"):
        heads.load_head(folder, BACKBONE)
    assert heads.load_head(folder, BACKBONE, any_backbone=True).fingerprint == "f" * 16


def test_shape_must_fit_even_then(tmp_path, head):
    wider = dataclasses.replace(BACKBONE, config=dataclasses.replace(tiny_files.CONFIG, width=16))
    with pytest.raises(ConfigError, match="backbone_width=8"):
        heads.load_head(heads.save_head(tmp_path, head), wider, any_backbone=True)


def test_changed_or_cut_tensors_are_damaged(tmp_path, head):
    path = heads.save_head(tmp_path, head) / heads.TENSORS
    data = path.read_bytes()
    for bad in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        path.write_bytes(bad)
        with pytest.raises(errors.DamagedFile, match="head.safetensors: SHA-256 is .*, but head.json was written for"):
            heads.load_head(tmp_path, BACKBONE)
    path.unlink()
    with pytest.raises(errors.DamagedFile, match="head.safetensors: no such file"):
        heads.load_head(tmp_path, BACKBONE)


def test_record_errors(tmp_path, head):
    heads.save_head(tmp_path, head)
    with pytest.raises(errors.CheckpointError, match="format=2: this version reads format 1"):
        heads.load_head(_rewrite(tmp_path, format=2), BACKBONE)
    with pytest.raises(errors.DamagedFile, match="config=None: must be a dict"):
        heads.load_head(_rewrite(tmp_path, format=1, config=None), BACKBONE)
    with pytest.raises(ConfigError, match="head.json: unknown field 'surprise'"):
        heads.load_head(_rewrite(tmp_path, config={"surprise": 1}), BACKBONE)
    (tmp_path / heads.RECORD).write_text("{")
    with pytest.raises(errors.DamagedFile, match="head.json: not JSON"):
        heads.load_head(tmp_path, BACKBONE)


@pytest.mark.parametrize(
    "kind, change, message",
    [
        (errors.MissingTensor, lambda t: t.pop("pre/kernel"), r"'pre/kernel' \[16, 8\] is missing"),
        (errors.MissingTensor, lambda t: t.pop("draft_ids"), "'draft_ids' is missing"),
        (errors.UnexpectedTensor, lambda t: t.update({"extra/kernel": np.zeros(3, np.float32)}), r"'extra/kernel' \[3\] has no place"),
        (errors.MisshapenTensor, lambda t: t.update({"pre/kernel": np.zeros((8, 16), np.float32)}), r"\[8, 16\]; the config implies \[16, 8\]"),
        (errors.MisshapenTensor, lambda t: t.update(draft_ids=t["draft_ids"][:-1].copy()), r"must be int32 \[20\]"),
        (errors.CheckpointError, lambda t: t["draft_ids"].__setitem__(3, 265), r"draft_ids holds 265; must be token ids in 0..264"),
        (errors.CheckpointError, lambda t: t["draft_ids"].__setitem__(3, -1), "draft_ids holds -1"),
        (errors.CheckpointError, lambda t: t["draft_ids"].__setitem__(3, t["draft_ids"][4]), "2 times; each id must be there once"),
    ],
)
def test_tensor_errors(tmp_path, head, kind, change, message):
    heads.save_head(tmp_path, head)
    with pytest.raises(kind, match=message):
        heads.load_head(_rewrite(tmp_path, change), BACKBONE)


def test_what_cannot_be_stored_is_not_written(tmp_path, head):
    huge = dataclasses.replace(head, params=head.params | {"pre": {"kernel": np.full((16, 8), 1e6, np.float32)}})
    with pytest.raises(errors.CheckpointError, match="'pre/kernel' has values that aren't finite in float16"):
        heads.save_head(tmp_path / "a", huge, dtype="float16")
    with pytest.raises(ValueError, match="JSON"):
        heads.save_head(tmp_path / "a", dataclasses.replace(head, card={"loss": float("nan")}))
    with pytest.raises(errors.CheckpointError, match="dtype='int8'"):
        heads.save_head(tmp_path / "a", head, dtype="int8")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_crash_while_saving_leaves_no_half_written_head(tmp_path, head, monkeypatch, crash_at):
    """Crash before the first or the second rename: the old head still loads, or the mixed pair is refused."""
    heads.save_head(tmp_path, head)
    renames, real = [], os.replace

    def replace(source, target):
        renames.append(os.path.basename(target))
        if len(renames) > crash_at:
            raise OSError("power cut")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    changed = dataclasses.replace(head, params=jax.tree.map(lambda x: x + 1, head.params), name="newer")
    with pytest.raises(OSError, match="power cut"):
        heads.save_head(tmp_path, changed)
    assert renames == [heads.TENSORS, heads.RECORD][: crash_at + 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [heads.RECORD, heads.TENSORS]
    if crash_at == 0:
        assert heads.load_head(tmp_path, BACKBONE).name == "mine"
    else:
        with pytest.raises(errors.DamagedFile, match="SHA-256"):
            heads.load_head(tmp_path, BACKBONE)
