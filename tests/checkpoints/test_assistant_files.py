"""Assistants' folders and plain ones, from the command line: train, export, read back; and every refusal in one sentence."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny_files
from safetensors.numpy import load_file, save_file

from mtp_jax import cli
from mtp_jax import config as config_lib
from mtp_jax.checkpoints import assistant, errors, families, heads, hf_config, load, plain
from mtp_jax.config import ConfigError
from mtp_jax.models import head as head_lib

S, F = "sliding_attention", "full_attention"
VOCAB = tiny_files.CONFIG.vocab_size
GEMMA4 = dict(model_type="gemma4_text", vocab_size=VOCAB, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4)
GEMMA4 |= dict(num_key_value_heads=2, head_dim=6, global_head_dim=8, layer_types=[S, F, F], sliding_window=5, num_kv_shared_layers=1)
GEMMA4 |= dict(hidden_size_per_layer_input=0, max_position_embeddings=2048, final_logit_softcapping=5.0, num_global_key_value_heads=1, attention_k_eq_v=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with two tiny backbones: a Gemma 4 and a Llama."""
    root = tmp_path_factory.mktemp("export")
    config = hf_config.parse(dict(GEMMA4), root / "config.json", "float32")
    rng = np.random.default_rng(0)
    entries = families.transformers_table(config).entries
    tensors = {name: (rng.normal(size=entry.shape) / entry.shape[-1] ** 0.5).astype(np.float32) for name, entry in entries.items()}
    tiny_files.write_hf_tokenizer(tiny_files.write_hf(root / "gemma", tensors))
    (root / "gemma" / "config.json").write_text(json.dumps(GEMMA4))
    tiny_files.write_hf_tokenizer(tiny_files.write_hf(root / "llama"))
    (root / "prompts.jsonl").write_text("".join(json.dumps({"task": "greet", "prompt": text}) + "\n" for text in ("hello 12", "hello hello", "the sea")))
    return root


@pytest.fixture(scope="module")
def backbone(files):
    return load.load_backbone(files / "gemma")


def random_head(backbone, config, seed=1):
    shapes, rng = head_lib.param_shapes(config, backbone.config), np.random.default_rng(seed)
    params = heads.unflatten({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    ids = rng.permutation(backbone.config.vocab_size)[: config.draft_vocab_size].astype(np.int32)
    return heads.LoadedHead("mine", config, params, ids, backbone.fingerprint, "tiny")


@pytest.fixture(scope="module")
def config(backbone):
    return config_lib.assistant_head_config_for(backbone.config, width=10, mlp_width=14, output="centroids", num_centroids=53, top_centroids=4)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command with --json; gives (exit code, its document or its complaint)."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")

    def call(*args):
        capsys.readouterr()
        code = cli.main([str(arg) for arg in (*args, "--json")])
        captured = capsys.readouterr()
        return code, json.loads(captured.out.splitlines()[-1]) if code == 0 else captured.err.splitlines()[-1]

    return call


def same(a, b):
    return (
        a.config == b.config
        and np.array_equal(a.draft_ids, b.draft_ids)
        and jax.tree.structure(a.params) == jax.tree.structure(b.params)
        and jax.tree.all(jax.tree.map(np.array_equal, a.params, b.params))
    )


@pytest.mark.slow  # four commands, each compiled from nothing
def test_train_export_and_read_back(files, backbone, run, tmp_path):
    """Three steps of training in the assistants' form; the head is the same from its run folder and from the exported one, and drafts."""
    model = ["--backbone", files / "gemma"]
    code, _ = run("rollout", "--prompts", files / "prompts.jsonl", *model, "--out", tmp_path / "r.jsonl", "--max-new-tokens", "12", "--batch-size", "3")
    assert code == 0
    flags = "--form assistant --width 16 --mlp-width 24 --steps 3 --batch-size 2 --max-length 64 --num-draft 2 --rows-per-sequence 8 --held-out 1"
    code, trained = run("train", "--rollouts", tmp_path / "r.jsonl", *model, "--out", tmp_path / "run", *flags.split())
    assert code == 0 and np.isfinite(trained["metrics"]["loss"]) and trained["metrics"]["held_out"]["steps"] > 0
    code, result = run("export", "--head", tmp_path / "run", *model, "--out", tmp_path / "new" / "folder")
    assert code == 0 and result == {"path": str(tmp_path / "new" / "folder"), "format": "gemma4_assistant", "tensors": 48, "bytes": result["bytes"]}
    written = list((tmp_path / "new" / "folder").iterdir())
    assert sorted(path.name for path in written) == ["config.json", "model.safetensors"]
    assert sum(path.stat().st_size for path in written) == result["bytes"] and list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "folder"]
    before, after = load.load_head(tmp_path / "run", backbone), load.load_head(tmp_path / "new" / "folder", backbone)
    assert same(before, after) and (after.fingerprint, after.name) == (backbone.fingerprint, "folder")
    fresh = head_lib.init_params(before.config, backbone.config, jax.random.key(0))
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), fresh, before.params)
    assert jax.tree.all(moved)
    code, answer = run("generate", "hello 12", *model, "--head", tmp_path / "new" / "folder", "--max-new-tokens", "12")
    rollouts = {line["prompt_index"]: line["tokens"] for line in map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())}
    assert answer["tokens"] == rollouts[0][answer["prompt_tokens"] :]


def test_flags_of_the_form(backbone):
    args = ["train", "--rollouts", "r", "--out", "o", "--form", "assistant", "--width", "12", "--donors", "0", "1", "--query-position", "last"]
    config = cli.parse(args).head_config(backbone.config)
    assert (config.donors, config.width, config.mlp_width, config.query_position) == ((0, 1), 12, 96, "last")
    assert (config.norms, config.layer_scalars, config.output, config.pointer, config.draft_vocab_size) == ("sandwich", True, "own", False, VOCAB)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_with_centroids(backbone, config, tmp_path, dtype):
    head = random_head(backbone, config)
    names = assistant.write(tmp_path / "a", head, backbone, dtype)
    stored = load_file(tmp_path / "a" / "model.safetensors") if dtype == "float32" else {}
    if stored:
        assert sorted(stored) == names
        np.testing.assert_array_equal(stored["model.embed_tokens.weight"][head.draft_ids], head.params["table"])  # rows by token id
        np.testing.assert_array_equal(stored["model.layers.1.mlp.down_proj.weight"].T, head.params["layers_1_mlp"]["down"]["kernel"])
    found = load.load_head(tmp_path / "a", backbone)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jax.numpy.dtype(dtype)).astype(np.float32), head.params)
    assert same(found, dataclasses.replace(head, params=rounded))


def test_a_table_in_another_order_is_written_by_token_id(backbone, config, tmp_path):
    head = random_head(backbone, dataclasses.replace(config, output="own", num_centroids=0, top_centroids=0))
    assistant.write(tmp_path / "a", head, backbone)
    stored = load_file(tmp_path / "a" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(stored[head.draft_ids], head.params["unembed"]["kernel"].T)
    assert load.load_head(tmp_path / "a", backbone).draft_ids.tolist() == list(range(VOCAB))


def test_a_plain_folder_explains_itself(files, run, tmp_path):
    """A light head with pointers on a Llama: every tensor is described, with the axes that it has."""
    backbone = load.load_backbone(files / "llama")
    light = config_lib.head_config_for(backbone.config, width=4, draft_vocab_size=20, pointer_heads=2)
    head = random_head(backbone, light)
    heads.save_head(tmp_path / "head", head)
    command = ["export", "--head", tmp_path / "head", "--backbone", files / "llama", "--out", tmp_path / "plain"]
    code, result = run(*command)
    assert code == 0 and result["format"] == "plain"
    values, stored = json.loads((tmp_path / "plain" / "config.json").read_text()), load_file(tmp_path / "plain" / "model.safetensors")
    assert {item["name"]: (item["shape"], item["dtype"]) for item in values["tensors"]} == {
        name: (list(array.shape), array.dtype.name) for name, array in stored.items()
    }
    assert result["tensors"] == len(stored) == len(values["tensors"]) and all(item["use"] and item["axes"] for item in values["tensors"])
    assert config_lib.from_dict(config_lib.HeadConfig, values["config"], where="here") == light
    np.testing.assert_array_equal(stored["draft_ids"], head.draft_ids)
    np.testing.assert_array_equal(stored["layers_0_o/kernel"], head.params["layers_0_o"]["kernel"])
    assert run(*command) == (2, f"mtp-jax: --out {tmp_path / 'plain'}: exists already; choose another folder")
    refused = run(*command[:-1], tmp_path / "other", "--format", "assistant")
    assert refused == (1, "mtp-jax: head 'mine' can't be written as an assistant: its backbone isn't a Gemma 4")
    assert not (tmp_path / "other").exists()


def test_every_form_can_be_described(backbone, config, tmp_path):
    names = plain.write(tmp_path / "p", random_head(backbone, config), backbone)
    assert {"table", "centroids/kernel", "layers_3_scalar", "layers_3_post_mlp_norm/scale", "layers_0_q_norm/scale"} <= set(names)


def test_nothing_is_left_of_a_write_that_fails(backbone, config, tmp_path, monkeypatch):
    import os

    def rename(source, target):
        raise OSError("power cut")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="power cut"):
        assistant.write(tmp_path / "a", random_head(backbone, config), backbone)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(norms="pre"), "norms='pre': must be 'sandwich'"),
        (dict(layer_scalars=False), "layer_scalars=False: must be on"),
        (dict(input_norms=True), "input_norms=True: must be off"),
        (dict(output="backbone", num_centroids=0, top_centroids=0), "output='backbone': must be 'own' or 'centroids'"),
        (dict(draft_vocab_size=53), f"draft_vocab_size=53: must be the whole vocabulary of {VOCAB}"),
        (dict(query_position="last"), "query_position='last': must be 'pending'"),
        (dict(donors=(1, 0)), r"donors=\(1, 0\): the last must be a full-attention layer"),
    ],
)
def test_heads_of_another_form_are_not_written(backbone, config, tmp_path, change, message):
    with pytest.raises(errors.CheckpointError, match=f"^head 'mine' can't be written as an assistant: {message}"):
        assistant.write(tmp_path / "a", random_head(backbone, dataclasses.replace(config, **change)), backbone)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def folder(backbone, config, tmp_path):
    assistant.write(tmp_path / "a", random_head(backbone, config), backbone)
    return tmp_path / "a"


def rewrite(folder, text=None, **values):
    """Change fields of config.json; `text` goes to text_config."""
    old = json.loads((folder / "config.json").read_text())
    old["text_config"] |= text or {}
    (folder / "config.json").write_text(json.dumps(old | values))


@pytest.mark.parametrize(
    "kind, change, message",
    [
        (errors.CheckpointError, dict(backbone_hidden_size=13), "backbone_hidden_size=13: this backbone's width is 12"),
        (errors.UnsupportedModel, dict(tie_word_embeddings=False), "tie_word_embeddings=False: only True is supported"),
        (errors.CheckpointError, dict(use_ordered_embeddings="yes"), "use_ordered_embeddings='yes': must be true or false"),
        (errors.CheckpointError, dict(text_config=None), "text_config=None: must be an object"),
        (ConfigError, dict(num_centroids=52), f"num_centroids=52: must divide draft_vocab_size={VOCAB}"),
        (errors.UnsupportedModel, dict(text=dict(enable_moe_block=True)), "text_config.enable_moe_block=True: only False is supported"),
        (errors.UnsupportedModel, dict(text=dict(num_kv_shared_layers=2)), "num_kv_shared_layers=2: must be num_hidden_layers=4"),
        (errors.UnsupportedModel, dict(text=dict(model_type="llama")), "text_config.model_type='llama': must be 'gemma4_text'"),
        (errors.UnsupportedModel, dict(text=dict(hidden_activation="relu")), "hidden_activation='relu'"),
        (errors.CheckpointError, dict(text=dict(sliding_window=6)), "sliding_window of sliding layers is 6: this backbone's is 5"),
        (errors.CheckpointError, dict(text=dict(global_head_dim=10)), "head_dim of full layers is 10: this backbone's is 8"),
        (errors.CheckpointError, dict(text=dict(num_key_value_heads=4)), "num_key_value_heads of sliding layers is 4: this backbone's is 2"),
        (errors.CheckpointError, dict(text=dict(vocab_size=VOCAB - 53)), f"vocab_size={VOCAB - 53}: this backbone's vocabulary is {VOCAB}"),
        (errors.CheckpointError, dict(mtp_jax=dict(fingerprint="f" * 16)), "was trained for another backbone"),
    ],
)
def test_fields_that_do_not_fit(backbone, folder, kind, change, message):
    rewrite(folder, **change)
    with pytest.raises(kind, match=message) as caught:
        load.load_head(folder, backbone)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_any_backbone(backbone, folder):
    rewrite(folder, mtp_jax=dict(fingerprint="f" * 16))
    assert load.load_head(folder, backbone, any_backbone=True).fingerprint == "f" * 16


def test_another_family_is_refused(files, folder):
    with pytest.raises(errors.UnsupportedModel, match="an assistant reads the K/V of a Gemma 4 backbone only; 'llama' isn't one"):
        load.load_head(folder, load.load_backbone(files / "llama"))


ORDER, Q = "masked_embedding.token_ordering", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "kind, change, message",
    [
        (errors.MissingTensor, lambda t: t.pop(Q), rf"'{Q}' \[24, 10\] is missing"),
        (errors.MissingTensor, lambda t: t.pop(ORDER), rf"'{ORDER}' \[{VOCAB}\] is missing"),
        (errors.MisshapenTensor, lambda t: t.update({Q: np.zeros((10, 24), np.float32)}), rf"'{Q}' has shape \[10, 24\]; .* implies \[24, 10\]"),
        (errors.MisshapenTensor, lambda t: t.update({ORDER: np.zeros(3, np.int64)}), rf"'{ORDER}' has shape \[3\]; must have \[{VOCAB}\]"),
        (errors.CheckpointError, lambda t: t.update({ORDER: np.zeros(VOCAB, np.int64)}), "must hold each token id of .* once"),
        (errors.CheckpointError, lambda t: t.update({ORDER: np.arange(VOCAB) + 0.5}), "must hold each token id of .* once"),
        (errors.UnexpectedTensor, lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.zeros((2, 2), np.float32)}), "has no place"),
        (errors.UnexpectedTensor, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "'lm_head.weight' differs"),
        (errors.UnsupportedModel, lambda t: t.update({Q: np.zeros((24, 10), np.int8)}), rf"'{Q}' has type I8"),
    ],
)
def test_tensors_that_do_not_fit(backbone, folder, kind, change, message):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(kind, match=message):
        load.load_head(folder, backbone)


def test_a_cut_or_absent_file_is_damaged(backbone, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(errors.DamagedFile, match="model.safetensors: not a whole safetensors file"):
        load.load_head(folder, backbone)
    path.unlink()
    with pytest.raises(errors.CheckpointError, match="a: holds neither model.safetensors nor"):
        load.load_head(folder, backbone)
