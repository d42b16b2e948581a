"""From a name or path to a whole backbone, and its fingerprint."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny_files

from mtp_jax.checkpoints import catalog, errors, load
from mtp_jax.decoding import generate


@pytest.fixture
def folder(tmp_path):
    return tiny_files.write_hf_tokenizer(tiny_files.write_hf(tmp_path / "tiny-model"))


def test_folder_and_gguf_give_the_same_backbone(tmp_path, folder):
    one, two = load.load_backbone(folder), load.load_backbone(str(tiny_files.write_gguf(tmp_path / "m.gguf")))
    assert one.config == two.config == tiny_files.CONFIG
    assert one.fingerprint == two.fingerprint and len(one.fingerprint) == 16
    assert (one.name, two.name) == ("tiny-model", "m.gguf")
    assert one.tokenizer.encode("hello") == two.tokenizer.encode("hello")
    np.testing.assert_array_equal(one.params["layers_0"]["attn"]["k"]["kernel"], two.params["layers_0"]["attn"]["k"]["kernel"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fingerprint_does_not_depend_on_dtype(tmp_path, folder, dtype):
    expected = load.load_backbone(folder).fingerprint
    for path in (folder, tiny_files.write_gguf(tmp_path / "m.gguf")):
        loaded = load.load_backbone(path, dtype=dtype)
        assert loaded.fingerprint == expected
        assert loaded.config.dtype == dtype and loaded.params["embed"]["embedding"].dtype == dtype


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_fingerprint_changes_with_the_sampled_weights(tmp_path, folder, name):
    tensors = tiny_files.hf_tensors()
    tensors[name] = tensors[name] * 1.001
    other = tiny_files.write_hf_tokenizer(tiny_files.write_hf(tmp_path / "other", tensors))
    assert load.load_backbone(other).fingerprint != load.load_backbone(folder).fingerprint


def test_fingerprint_changes_with_the_config(tmp_path, folder):
    other = tiny_files.write_hf_tokenizer(tiny_files.write_hf(tmp_path / "other", rope_theta=6000.0))
    assert load.load_backbone(other).fingerprint != load.load_backbone(folder).fingerprint


def test_catalog_name_is_fetched(tmp_path, monkeypatch):
    file = tiny_files.write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(catalog, "fetch", {"smollm2-135m-instruct": file}.__getitem__)
    assert load.load_backbone("smollm2-135m-instruct").name == "smollm2-135m-instruct"


def test_hub_name_is_fetched_unless_such_a_path_exists(folder, monkeypatch):
    monkeypatch.setattr(catalog, "fetch", {"org/tiny": folder}.__getitem__)
    assert load.load_backbone("org/tiny").name == "org/tiny"
    monkeypatch.chdir(folder.parent)
    shutil.copytree(folder, "org/tiny")
    monkeypatch.setattr(catalog, "fetch", lambda name: pytest.fail("asked the hub"))
    assert load.load_backbone("org/tiny").name == "tiny"


def test_unknown_name_says_what_is_known(tmp_path):
    with pytest.raises(errors.UnknownName, match="'no-such' doesn't exist: give a catalog name .*smollm2-135m-instruct.*config.json.*gguf"):
        load.load_backbone("no-such")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(errors.UnknownName, match="is a file of another kind"):
        load.load_backbone(tmp_path / "weights.bin")


def test_tokenizer_larger_than_the_model(tmp_path):
    tensors = tiny_files.hf_tensors()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:200]
    folder = tiny_files.write_hf_tokenizer(tiny_files.write_hf(tmp_path, tensors, vocab_size=200))
    with pytest.raises(errors.CheckpointError, match="tokenizer has 265 tokens; the model's vocab_size=200"):
        load.load_backbone(folder)


@pytest.mark.parametrize("dtype", ["float64", "bf16", "int8", ""])
def test_wrong_dtype_names_file_field_and_value(tmp_path, folder, dtype):
    for path, name in ((folder, "config.json"), (tiny_files.write_gguf(tmp_path / "m.gguf"), "m.gguf")):
        with pytest.raises(errors.CheckpointError, match=f"{name}: dtype='{dtype}': must be float32, bfloat16 or float16"):
            load.load_backbone(path, dtype=dtype)


def test_prompt_of_a_base_model_is_plain_text_after_its_first_token(tmp_path):
    base = load.load_backbone(tiny_files.write_gguf(tmp_path / "m.gguf", tokenizer__chat_template=None, tokenizer__ggml__add_bos_token=True))
    assert generate.encode_prompt(base, "hello") == [1, *base.tokenizer.encode("hello")[1:]]
    assert base.tokenizer.decode(generate.encode_prompt(base, "hello"), skip_special=False) == "<|im_start|>hello"
    with pytest.raises(errors.CheckpointError, match="m.gguf: has no chat template"):
        base.tokenizer.apply_chat([{"role": "user", "content": "hello"}])


def test_import_stays_light():
    heavy = "('torch', 'transformers', 'matplotlib', 'gguf', 'tokenizers', 'huggingface_hub')"
    code = f"import sys, mtp_jax.checkpoints.load; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
