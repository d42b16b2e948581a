"""GGUF files: right values, and a named refusal of everything else."""

import dataclasses

import gguf as gguf_package
import jax
import numpy as np
import pytest
import tiny_files

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors, gguf, gguf_families, hf
from mtp_jax.models import backbone as backbone_lib


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
    np.testing.assert_array_equal(gguf_families.unpermute(stored, 2)[:, 0], [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])


@pytest.mark.parametrize(
    "keys, expected", [({"type": "linear", "factor": 8.0}, 8.0), ({"factor": 8.0}, 8.0), ({"type": "none", "factor": 8.0}, None), ({"factor": 0.0}, None)]
)
def test_linear_rope_scaling(tmp_path, keys, expected):
    """A factor alone is linear, as llama.cpp takes it."""
    file = tiny_files.write_gguf(tmp_path / "m.gguf", **{f"llama__rope__scaling__{key}": value for key, value in keys.items()})
    scaling = gguf.read_config(file).rope_scaling
    assert scaling == (None if expected is None else config_lib.RopeScaling(kind="linear", factor=expected))


def test_qwen3_is_llama_with_head_norms_and_unpermuted_rows(tmp_path):
    tensors = {name: value for name, value in tiny_files.gguf_gemma_tensors().items() if "post_" not in name}
    file = tiny_files.write_gguf(tmp_path / "m.gguf", tensors, "qwen3")
    config = gguf.read_config(file)
    assert config == dataclasses.replace(tiny_files.CONFIG, qk_norm=True)
    _check_tree(gguf.read_params(file, config), config, tensors)


def test_gemma3_config_and_tree(tmp_path):
    tensors = tiny_files.gguf_gemma_tensors()
    changes = {"gemma3__attention__sliding_window": 4, "gemma3__attention__sliding_window_pattern": 2}
    file = tiny_files.write_gguf(tmp_path / "m.gguf", tensors, "gemma3", **changes)
    config = gguf.read_config(file)
    assert config == dataclasses.replace(
        tiny_files.CONFIG,
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=8**0.5,
        layer_types=("sliding", "full"),
        sliding_window=4,
        local_rope_theta=10_000.0,
    )
    params = gguf.read_params(file, config)
    _check_tree(params, config, tensors)
    np.testing.assert_array_equal(params["layers_1"]["post_attn_norm"]["scale"], tensors["blk.1.post_attention_norm.weight"])
    np.testing.assert_array_equal(params["layers_1"]["post_mlp_norm"]["scale"], tensors["blk.1.post_ffw_norm.weight"])


def _check_tree(params, config, tensors):
    """The model takes the tree as it is, and neither query rows nor norm scales were changed."""
    wanted = jax.eval_shape(backbone_lib.Backbone(config).init, jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, wanted)
    attention = params["layers_1"]["attn"]
    for key in "qk":
        np.testing.assert_array_equal(attention[key]["kernel"], tensors[f"blk.1.attn_{key}.weight"].T)
        np.testing.assert_array_equal(attention[f"{key}_norm"]["scale"], tensors[f"blk.1.attn_{key}_norm.weight"])


def test_gemma3_defaults_to_every_sixth_layer_full_and_knows_the_largest_models_scale(tmp_path):
    def config(**changes):
        return gguf.read_config(tiny_files.write_gguf(tmp_path / "m.gguf", tiny_files.gguf_gemma_tensors(), "gemma3", **changes))

    small = config(llama__block_count=13, gemma3__attention__sliding_window=4)
    assert [index for index, kind in enumerate(small.layer_types) if kind == "full"] == [5, 11] and small.attention_scale is None
    assert config().layer_types == ("full", "full") and config().local_rope_theta is None  # a file without a window has no local layers
    assert config(llama__block_count=62).attention_scale == (8 / 6) ** -0.5


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
        ({"architecture": "mamba"}, "general.architecture='mamba': only 'llama', 'qwen3', 'gemma3' are supported"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor=2.0"),
        ({"architecture": "gemma3", "gemma3__attention__sliding_window_pattern": [True, False]}, "gemma3.attention.sliding_window_pattern="),
        ({"architecture": "gemma3", "gemma3__attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping=50.0: this key is not supported"),
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
        ({"llama__rope__scaling__factor": -2.0}, r"rope_scaling.factor=-2.0: must be positive"),
        ({"architecture": "gemma3", "gemma3__attention__sliding_window_pattern": 0}, "sliding_window_pattern=0: must be at least 1"),
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


def test_type_that_the_package_does_not_know(tmp_path):
    path = tiny_files.write_gguf(tmp_path / "m.gguf")
    field = gguf_package.GGUFReader(path).tensors[3].field
    data, position = bytearray(path.read_bytes()), field.offset + sum(part.nbytes for part in field.parts[:-2])
    data[position : position + 4] = (999).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(errors.UnsupportedModel, match="m.gguf: a tensor has a type that the gguf package doesn't know: .*999"):
        gguf.GGUFFile(path)


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
