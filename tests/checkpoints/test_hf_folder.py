"""Transformers' folders: config rules, shards, tensors."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_files
from safetensors.numpy import load_file, save_file

from mtp_jax.checkpoints import errors, hf
from mtp_jax.config import RopeScaling
from mtp_jax.models import presets


def test_config_is_read_back(tmp_path):
    assert hf.read_config(tiny_files.write_hf(tmp_path)) == tiny_files.CONFIG


def test_defaults_of_absent_fields(tmp_path):
    tiny_files.write_hf(tmp_path)
    values = tiny_files.hf_config(hidden_size=24)
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "rms_norm_eps", "hidden_act"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = hf.read_config(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tied_embeddings, config.norm_eps) == (6, 4, 10_000.0, False, 1e-6)


def test_rope_parameters_of_newer_transformers(tmp_path):
    tiny_files.write_hf(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    assert hf.read_config(tmp_path).rope_theta == 777.0


def test_mistral_without_window_is_a_llama(tmp_path):
    assert hf.read_config(tiny_files.write_hf(tmp_path, model_type="mistral", sliding_window=None)) == tiny_files.CONFIG


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
        ({"model_type": ["llama"]}, "model_type="),
        ({"model_type": "mistral"}, "'sliding_window' is absent"),
        ({"model_type": "mistral", "sliding_window": 4, "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2}, "layer_types="),
        ({"model_type": "qwen2"}, "attention_bias=False: only True"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*needs use_sliding_window"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"model_type": "gemma4_text", "enable_moe_block": True}, "enable_moe_block=True"),
        ({"model_type": "gemma4_text", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*the last"),
        (
            {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"0": {"head_dim": 4}}},
            "per_layer_config=",
        ),
        ({"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input=4"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling=.*yarn"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling=.*factor"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_parameters=.*llama3.*must state 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters=.*partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types="),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ],
)
def test_what_is_not_implemented_is_refused_by_field(tmp_path, changes, named):
    with pytest.raises(errors.UnsupportedModel, match=f"config.json: .*{named}"):
        hf.read_config(tiny_files.write_hf(tmp_path, **changes))


GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def _config(folder, **values):
    (folder / "config.json").write_text(json.dumps(values))
    return hf.read_config(folder)


def test_llama_switches(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = hf.read_config(tiny_files.write_hf(tmp_path, attention_bias=True, mlp_bias=True, rope_scaling=scaling))
    assert config.attention_bias and config.output_bias and config.mlp_bias and config.rope_theta == tiny_files.CONFIG.rope_theta
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192)
    config = hf.read_config(tiny_files.write_hf(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_mistral_and_qwen_windows(tmp_path):
    config = hf.read_config(tiny_files.write_hf(tmp_path, model_type="mistral", sliding_window=5))
    assert config.layer_types == ("sliding", "sliding") and config.window(0) == 5
    config = hf.read_config(tiny_files.write_hf(tmp_path, model_type="qwen2", attention_bias=None, use_sliding_window=True, max_window_layers=1))
    assert config.layer_types == ("full", "sliding") and config.sliding_window == 4096 and config.attention_bias and not config.output_bias
    config = hf.read_config(tiny_files.write_hf(tmp_path, model_type="qwen3", sliding_window=5, use_sliding_window=False))
    assert config.layer_types == ("full", "full") and config.qk_norm


def test_short_config_of_gemma_3_4b(tmp_path):
    """As published: most fields are left to transformers' defaults."""
    text = dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024)
    config = _config(tmp_path, model_type="gemma3", text_config=text | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}})
    assert config == presets.gemma3_4b(dtype="float32")
    config = _config(tmp_path, **text, sliding_window_pattern=2)
    assert config.layer_types == ("sliding", "full") * 17 and config.rope_scaling is None


def test_gemma_4_as_published_and_as_transformers_writes_it(tmp_path):
    written = json.loads((GOLDEN / "gemma4" / "config.json").read_text())
    del written["per_layer_config"]
    published = _config(tmp_path, **written, global_head_dim=8, num_global_key_value_heads=1)
    assert published == hf.read_config(GOLDEN / "gemma4") and published.full_kv_heads == 1
    assert _config(tmp_path, **written).full_head_dim == 512  # transformers' default
    assert _config(tmp_path, **written | {"attention_k_eq_v": False}, global_head_dim=8, num_global_key_value_heads=1).full_kv_heads is None
    with pytest.raises(errors.CheckpointError, match="rope_theta' is missing"):
        _config(tmp_path, **written | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1.0}}})
    with pytest.raises(errors.UnsupportedModel, match="rope_parameters=.*sliding layers"):
        _config(tmp_path, **written | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}}})


def test_short_config_of_gemma_4_12b(tmp_path):
    """As transformers' conversion script makes it; all else is the default of `gemma4_unified_text`."""
    text = dict(model_type="gemma4_unified_text", hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16)
    text |= dict(num_key_value_heads=8, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=30.0)
    config = _config(tmp_path, model_type="gemma4_unified", text_config=text)
    assert config == dataclasses.replace(presets.gemma4_12b(), dtype="float32")


NEW, OLD = ("model.language_model.", "lm_head.", "model."), ("language_model.model.", "language_model.lm_head.", "")  # of transformers 5 and 4


@pytest.fixture(
    params=[("gemma3", NEW), ("gemma3", OLD), ("gemma4", NEW), ("gemma4", OLD), ("gemma4_unified", NEW)], ids=lambda param: f"{param[0]} {param[1][0]}"
)
def inside(request, tmp_path):
    """A text model inside one that sees and hears: its folder's config, its tensors under other names, and the folder of the text model alone."""
    kind, (prefix, head, other) = request.param
    alone = GOLDEN / kind.removesuffix("_unified")
    text, tensors = json.loads((alone / "config.json").read_text()), load_file(alone / "model.safetensors")
    if kind == "gemma4_unified":  # has no embeddings of single layers
        text |= dict(model_type="gemma4_unified_text", hidden_size_per_layer_input=0)
        tensors = {name: value for name, value in tensors.items() if "per_layer" not in name}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(text))
        alone = tmp_path
    tensors = {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
    tensors[head + "weight"] = tensors[prefix + "embed_tokens.weight"]
    for name in ("vision_tower.patch", "audio_tower.layers.0", "multi_modal_projector", "embed_vision.projection", "embed_audio.projection", "vision_embedder"):
        tensors[f"{other}{name}.weight"] = np.zeros((3, 3), np.float32)
    (tmp_path / "whole").mkdir()
    config = _config(tmp_path / "whole", model_type=kind, text_config=text, vision_config={}, audio_config={})
    return config, tensors, tmp_path / "whole", alone, prefix


def test_text_model_inside_one_that_sees_and_hears(inside):
    """The rest is skipped by its name, a tied copy is checked, and K/V weights of layers that share are not read."""
    config, tensors, folder, alone, prefix = inside
    if config.shared_kv_layers:
        tensors[prefix + "layers.4.self_attn.k_proj.weight"] = np.zeros((1, 1), np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert config == hf.read_config(alone)
    assert jax.tree.all(jax.tree.map(np.array_equal, hf.read_params(folder, config), hf.read_params(alone, config)))


@pytest.mark.parametrize("name", ["{}layers.0.vision_tower.weight", "{}audio_tower.weight", "model.depth_tower.weight", "vision.weight"])
def test_an_unknown_tensor_beside_the_text_model_is_an_error(inside, name):
    """What is skipped is skipped by the beginning of its whole name."""
    config, tensors, folder, _, prefix = inside
    save_file(tensors | {name.format(prefix): np.zeros((3, 3), np.float32)}, folder / "model.safetensors")
    with pytest.raises(errors.UnexpectedTensor, match=r"weight' \[3, 3\] has no place in this model"):
        hf.read_params(folder, config)


def test_norms_that_add_one_are_stored_so():
    """Gemma 3 multiplies with 1 + w; Gemma 4 and all others with w."""
    for name, one in (("gemma3", 1.0), ("gemma4", 0.0)):
        stored = load_file(GOLDEN / name / "model.safetensors")["model.norm.weight"].astype(np.float32)
        scale = hf.read_params(GOLDEN / name, hf.read_config(GOLDEN / name))["final_norm"]["scale"]
        assert scale.dtype == "float32"
        np.testing.assert_array_equal(scale, stored + one)


@pytest.mark.parametrize("changes, named", [({"num_attention_heads": 5}, "num_heads=5"), ({"hidden_size": "8"}, ""), ({"num_attention_heads": 0}, "")])
def test_impossible_value_names_the_file(tmp_path, changes, named):
    with pytest.raises(errors.CheckpointError, match=f"config.json: .*{named}"):
        hf.read_config(tiny_files.write_hf(tmp_path, **changes))


def test_missing_field_and_broken_json(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(errors.CheckpointError, match="field 'vocab_size' is missing"):
        hf.read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(errors.DamagedFile, match="config.json: not JSON"):
        hf.read_config(tmp_path)


def _params(folder, **changes):
    return hf.read_params(folder, hf.read_config(folder, **changes))


def test_tensor_errors_name_the_tensor(tmp_path):
    good = tiny_files.hf_tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    cases = [
        (errors.MissingTensor, {k: v for k, v in good.items() if k != name}, name),
        (errors.UnexpectedTensor, good | {"model.layers.0.self_attn.q_proj.bias": np.zeros(24, np.float32)}, "q_proj.bias"),
        (errors.MisshapenTensor, good | {name: np.zeros((8, 10), np.float32)}, r"\[8, 10\]; the configuration implies \[10, 8\]"),
        (errors.UnsupportedModel, good | {name: np.zeros((10, 8), np.int8)}, "has type I8"),
    ]
    for kind, tensors, message in cases:
        with pytest.raises(kind, match=message):
            _params(tiny_files.write_hf(tmp_path, tensors))


def test_inv_freq_is_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    assert set(_params(tiny_files.write_hf(tmp_path, tiny_files.hf_tensors() | extra))) == {"embed", "layers_0", "layers_1", "final_norm"}


def test_tied_lm_head_must_equal_the_embedding(tmp_path):
    good = tiny_files.hf_tensors()
    embedding = good["model.embed_tokens.weight"]
    assert "unembed" not in _params(tiny_files.write_hf(tmp_path, good | {"lm_head.weight": embedding.copy()}))
    with pytest.raises(errors.UnexpectedTensor, match="tie_word_embeddings is true but 'lm_head.weight' differs"):
        _params(tiny_files.write_hf(tmp_path, good | {"lm_head.weight": embedding + 1}))


def test_tied_lm_head_without_embedding_is_a_missing_tensor(tmp_path):
    tensors = tiny_files.hf_tensors()
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    with pytest.raises(errors.MissingTensor, match="'model.embed_tokens.weight'"):
        _params(tiny_files.write_hf(tmp_path, tensors))


@pytest.mark.parametrize("stored, dtype", [(jnp.bfloat16, "float32"), (np.float16, "bfloat16"), (np.float64, "float32")])
def test_stored_dtype_is_cast(tmp_path, stored, dtype):
    tensors = {name: value.astype(stored) for name, value in tiny_files.hf_tensors().items()}
    params = _params(tiny_files.write_hf(tmp_path, tensors), dtype=dtype)
    kernel, expected = params["layers_0"]["mlp"]["down"]["kernel"], tensors["model.layers.0.mlp.down_proj.weight"].T.astype(jnp.dtype(dtype))
    assert kernel.dtype == dtype and params["final_norm"]["scale"].dtype == "float32"
    np.testing.assert_array_equal(np.asarray(kernel), expected)


def _write_shards(folder, tensors):
    """Two shards and their index; returns the index."""
    tiny_files.write_hf(folder, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_give_the_same_tree(tmp_path):
    tensors = tiny_files.hf_tensors()
    _write_shards(tmp_path / "sharded", tensors)
    whole = _params(tiny_files.write_hf(tmp_path / "whole", tensors))
    np.testing.assert_array_equal(_params(tmp_path / "sharded")["layers_1"]["attn"]["o"]["kernel"], whole["layers_1"]["attn"]["o"]["kernel"])


def test_missing_shard_and_half_a_shard_are_named(tmp_path):
    _write_shards(tmp_path, tiny_files.hf_tensors())
    shard = tmp_path / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    for part in (data[: len(data) // 2], data[:5], b""):
        shard.write_bytes(part)
        with pytest.raises(errors.DamagedFile, match="model-00002-of-00002.safetensors: not a whole"):
            _params(tmp_path)
    shard.unlink()
    with pytest.raises(errors.DamagedFile, match="model-00002-of-00002.safetensors: no such file"):
        _params(tmp_path)


def test_index_that_lies_is_damaged(tmp_path):
    weight_map = _write_shards(tmp_path, tiny_files.hf_tensors())
    index = tmp_path / "model.safetensors.index.json"
    name = "model.norm.weight"
    other = next(shard for shard in weight_map.values() if shard != weight_map[name])
    for wrong, message in ((other, "isn't in it"), ("../x.safetensors", "same folder")):
        index.write_text(json.dumps({"weight_map": weight_map | {name: wrong}}))
        with pytest.raises(errors.DamagedFile, match=message):
            _params(tmp_path)


def test_doubled_tensor(tmp_path):
    tensors = tiny_files.hf_tensors()
    weight_map = _write_shards(tmp_path, tensors)
    name = "model.norm.weight"
    other = next(shard for shard in weight_map.values() if shard != weight_map[name])
    save_file({key: tensors[key] for key in tensors if weight_map[key] == other} | {name: tensors[name]}, tmp_path / other)
    with pytest.raises(errors.UnexpectedTensor, match="'model.norm.weight' is there twice"):
        _params(tmp_path)


def test_folder_without_safetensors(tmp_path):
    tiny_files.write_hf(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(errors.CheckpointError, match="holds neither model.safetensors nor"):
        _params(tmp_path)
