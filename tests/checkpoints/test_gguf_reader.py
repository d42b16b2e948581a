"""GGUF files: right values, and a named refusal of everything else."""

import gguf as gguf_package
import jax
import numpy as np
import pytest
import tiny_files

from mtp_jax.checkpoints import errors, families, gguf, hf


def test_config_is_read_back(tmp_path):
    assert gguf.read_config(tiny_files.write_gguf(tmp_path / "m.gguf")) == tiny_files.CONFIG


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_hf_of_the_same_weights_give_identical_trees(tmp_path, tied):
    weights = tiny_files.hf_tensors(tied)
    folder = tiny_files.write_hf(tmp_path / "hf", weights, tie_word_embeddings=tied)
    file = tiny_files.write_gguf(tmp_path / "m.gguf", tiny_files.gguf_tensors(weights))
    config = gguf.read_config(file)
    assert config == hf.read_config(folder) and config.tied_embeddings is tied
    ours, theirs = gguf.read_params(file, config), hf.read_params(folder, config)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    np.testing.assert_array_equal(ours["layers_1"]["attn"]["q"]["kernel"], weights["model.layers.1.self_attn.q_proj.weight"].T)
    np.testing.assert_array_equal(ours["embed"]["embedding"], weights["model.embed_tokens.weight"])


def test_unpermute_worked_row():
    stored = np.array([[0], [3], [1], [4], [2], [5], [10], [13], [11], [14], [12], [15]])
    np.testing.assert_array_equal(families.unpermute(stored, 2)[:, 0], [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])


def test_only_reads_the_named_places(tmp_path):
    file = tiny_files.write_gguf(tmp_path / "m.gguf")
    assert jax.tree.map(np.shape, gguf.read_params(file, tiny_files.CONFIG, only=[("final_norm", "scale")])) == {"final_norm": {"scale": (8,)}}


def test_dtype_casts_kernels_but_not_norm_scales(tmp_path):
    file = tiny_files.write_gguf(tmp_path / "m.gguf")
    params = gguf.read_params(file, gguf.read_config(file, "bfloat16"))
    kinds = {path[-1].key: leaf.dtype.name for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert kinds == {"kernel": "bfloat16", "embedding": "bfloat16", "scale": "float32"}


@pytest.mark.parametrize("rows", [16 * 8, 5])
def test_joined_rows_dequantise_to_the_same_values(rows):
    kind = gguf_package.GGMLQuantizationType.Q4_1
    data = gguf_package.quantize(np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32), kind)
    np.testing.assert_array_equal(gguf._dequantise(data, kind), gguf_package.dequantize(data, kind))


def test_fast_metadata_equals_the_packages_own(tmp_path):
    path = tiny_files.write_gguf(tmp_path / "m.gguf")
    file, reference = gguf.GGUFFile(path), gguf_package.GGUFReader(path)
    assert list(file.keys()) == list(reference.fields)
    for key, expected in reference.fields.items():
        assert file.get(key) == pytest.approx(expected.contents()) if isinstance(expected.contents(), float) else file.get(key) == expected.contents(), key


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architecture": "qwen3"}, "general.architecture='qwen3'"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"llama__rope__scaling__factor": 2.0}, "llama.rope.scaling.factor=2.0"),
        ({"llama__attention__sliding_window": 16}, "llama.attention.sliding_window=16"),
        ({"llama__expert_count": 8}, "llama.expert_count=8"),
        ({"llama__rope__dimension_count": 2}, "llama.rope.dimension_count=2"),
        ({"llama__feed_forward_length": [12, 12]}, "llama.feed_forward_length="),
    ],
)
def test_what_is_not_implemented_is_refused_by_key(tmp_path, changes, named):
    file = tiny_files.write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(errors.UnsupportedModel, match="m.gguf: " + named.replace(".", r"\.")):
        gguf.read_config(file)


def test_harmless_keys_are_accepted_at_their_harmless_value(tmp_path):
    file = tiny_files.write_gguf(tmp_path / "m.gguf", llama__rope__scaling__type="none", llama__expert_count=0)
    assert gguf.read_config(file) == tiny_files.CONFIG


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"llama__block_count": None}, "key 'llama.block_count' is missing"),
        ({"llama__attention__head_count_kv": 4}, "num_heads=6: must be a multiple of num_kv_heads=4"),
        ({"llama__attention__head_count": 0}, "num_heads=0"),
    ],
)
def test_impossible_config_names_file_and_field(tmp_path, changes, message):
    with pytest.raises(errors.CheckpointError, match=f"m.gguf: .*{message}"):
        gguf.read_config(tiny_files.write_gguf(tmp_path / "m.gguf", **changes))


def _params_of(tmp_path, tensors):
    file = tiny_files.write_gguf(tmp_path / "m.gguf", tensors)
    return gguf.read_params(file, tiny_files.CONFIG)


def test_missing_tensor(tmp_path):
    tensors = tiny_files.gguf_tensors()
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(errors.MissingTensor, match=r"m.gguf: tensor 'blk.1.ffn_up.weight' \[10, 8\] is missing"):
        _params_of(tmp_path, tensors)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias"])
def test_unexpected_tensor(tmp_path, name):
    with pytest.raises(errors.UnexpectedTensor, match=f"tensor '{name}'"):
        _params_of(tmp_path, tiny_files.gguf_tensors() | {name: np.zeros(2, np.float32)})


def test_misshapen_tensor(tmp_path):
    with pytest.raises(errors.MisshapenTensor, match=r"'blk.0.attn_k.weight' has shape \[36, 8\]; the configuration implies \[12, 8\]"):
        _params_of(tmp_path, tiny_files.gguf_tensors() | {"blk.0.attn_k.weight": np.zeros((36, 8), np.float32)})


def test_quantisation_that_cannot_be_undone(tmp_path):
    with pytest.raises(errors.UnsupportedModel, match="'blk.0.attn_v.weight' has type I32"):
        _params_of(tmp_path, tiny_files.gguf_tensors() | {"blk.0.attn_v.weight": np.zeros((12, 8), np.int32)})


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 0.1, 0.5, 0.9, -1])
def test_truncated_anywhere_is_damaged(tmp_path, keep):
    file = tiny_files.write_gguf(tmp_path / "m.gguf")
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(errors.DamagedFile, match="m.gguf: not a whole GGUF file"):
        gguf.GGUFFile(file)


@pytest.mark.parametrize("offset", [2**64 - 64, 2**40])
def test_tensor_outside_the_data_is_damaged(tmp_path, offset):
    """An offset near 2**64 wraps around to before the data, where the reader would find header bytes."""
    path = tiny_files.write_gguf(tmp_path / "m.gguf")
    field = gguf_package.GGUFReader(path).tensors[3].field
    data, position = bytearray(path.read_bytes()), field.offset + sum(part.nbytes for part in field.parts[:-1])
    data[position : position + 8] = offset.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(errors.DamagedFile, match="m.gguf"):
        gguf.GGUFFile(path)


def test_not_gguf_is_damaged_and_absent_is_said(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(errors.DamagedFile, match="magic"):
        gguf.read_config(tmp_path / "m.gguf")
    with pytest.raises(errors.CheckpointError, match="other.gguf: no such file"):
        gguf.read_config(tmp_path / "other.gguf")
