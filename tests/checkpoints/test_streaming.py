"""Parameters come piece by piece, straight to dtype and devices, and host memory stays small."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_files

from mtp_jax.checkpoints import catalog, errors, gguf, hf, load, streaming

TESTS = Path(__file__).parent


@pytest.fixture(params=["gguf", "hf"])
def read(request, tmp_path):
    if request.param == "gguf":
        return lambda config, **options: gguf.read_params(tiny_files.write_gguf(tmp_path / "m.gguf"), config, **options)
    return lambda config, **options: hf.read_params(tiny_files.write_hf(tmp_path / "hf"), config, **options)


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_pieces_of_any_size_give_the_same_arrays(read, monkeypatch, rows):
    expected = read(tiny_files.CONFIG)
    monkeypatch.setattr(streaming, "_PIECE_VALUES", 1)
    monkeypatch.setattr(streaming, "_PIECE_ROWS", rows)
    jax.tree.map(np.testing.assert_array_equal, read(tiny_files.CONFIG), expected)


def test_no_more_rows_are_read_at_once_than_a_piece_holds(monkeypatch):
    from mtp_jax.checkpoints import families

    monkeypatch.setattr(streaming, "_PIECE_VALUES", 128 * 10)
    asked = []
    tensor = families.StoredTensor("t", (300, 10), lambda begin, end: asked.append((begin, end)) or np.full((end - begin, 10), begin, np.float32))
    entry = families.Entry(("unembed", "kernel"), (300, 10), np.transpose, 1)
    array = streaming.place(tensor, entry, "float32", None, "here")
    assert asked == [(0, 128), (128, 256), (256, 300)]
    np.testing.assert_array_equal(array, np.repeat([0, 128, 256], [128, 128, 44])[None].repeat(10, 0))


def test_table_rows_shortens_embeddings_only(read):
    only = [("embed", "embedding"), ("final_norm", "scale"), ("layers_1", "attn", "o", "kernel")]
    shapes = jax.tree.map(np.shape, read(tiny_files.CONFIG, only=only, table_rows=5))
    assert shapes == {"embed": {"embedding": (5, 8)}, "final_norm": {"scale": (8,)}, "layers_1": {"attn": {"o": {"kernel": (36, 8)}}}}


def test_array_on_one_cpu_is_not_copied(read):
    if jax.default_backend() != "cpu":
        pytest.skip("needs a CPU as JAX's default device")
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        real = streaming._read
        patch.setattr(streaming, "_read", lambda *args: taken.append(real(*args)) or taken[-1])
        params = read(tiny_files.CONFIG)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)} == {host.ctypes.data for host in taken}


TWO_DEVICES = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import tiny_files
from mtp_jax.checkpoints import errors, load
folder, file = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()), ("model",))
assert len(jax.devices()) == 2

def sharding(path):
    return NamedSharding(mesh, P(None, "model") if path[-1] == "kernel" else P())

for place in (folder, file):
    plain, sharded = (load.load_backbone(place, dtype="bfloat16", **options) for options in ({}, {"sharding": sharding}))
    assert plain.fingerprint == sharded.fingerprint
    jax.tree.map(np.testing.assert_array_equal, sharded.params, plain.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(sharded.params):
        keys = tuple(part.key for part in path)
        assert leaf.sharding == sharding(keys), keys
        halves = [shard.data.shape for shard in leaf.addressable_shards]
        assert halves == [(*leaf.shape[:-1], leaf.shape[-1] // 2) if keys[-1] == "kernel" else leaf.shape] * 2, keys
    everywhere = load.load_backbone(place, sharding=NamedSharding(mesh, P()))
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(everywhere.params))
    try:
        load.load_backbone(place, sharding=lambda path: NamedSharding(mesh, P("model")))
    except errors.CheckpointError as error:
        print(error)
"""


def test_each_array_lies_on_two_devices_as_asked(tmp_path, monkeypatch):
    folder = tiny_files.write_hf_tokenizer(tiny_files.write_hf(tmp_path / "hf"))
    file = tiny_files.write_gguf(tmp_path / "m.gguf")
    said = run(TWO_DEVICES, folder, file, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu").splitlines()
    assert any(f"{folder}: tensor 'model.embed_tokens.weight' [265, 8] can't be placed as NamedSharding" in line for line in said)
    assert any(f"{file}: tensor 'token_embd.weight' [265, 8] can't be placed" in line for line in said)


def run(code, *arguments, **environment):
    import os

    paths = [str(TESTS), str(TESTS.parents[1])]
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


MEMORY = """
import json, sys
import jax
from mtp_jax.checkpoints import load

def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])

jax.block_until_ready(jax.numpy.zeros(1) + 1)
before = kilobytes("VmRSS:")
loaded = load.load_backbone(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(loaded.params)
kept = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
print(json.dumps({"peak": (kilobytes("VmHWM:") - before) * 1024, "kept": kept}))
"""


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory):
    """800 MB in four shards of 200 MB, float32."""
    from safetensors.numpy import save_file

    folder, width, mlp, layers = tmp_path_factory.mktemp("large"), 1024, 4096, 9
    sizes = dict(hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    tiny_files.write_hf_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(tiny_files.hf_config(**sizes, vocab_size=49_152)))
    block = np.random.default_rng(0).normal(size=mlp * width).astype(np.float32)
    shards = [{"model.embed_tokens.weight": np.tile(block, 12).reshape(49_152, width), "model.norm.weight": np.ones(width, np.float32)}]
    shapes = {f"self_attn.{key}_proj": (width, width) for key in "qkvo"} | {"mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width)}
    shapes |= {"mlp.down_proj": (width, mlp), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    for first in (0, 3, 6):
        shard = {f"model.layers.{index}.{name}.weight": shape for index in range(first, first + 3) for name, shape in shapes.items()}
        shards.append({name: block[: np.prod(shape)].reshape(shape) for name, shape in shard.items()})
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-00004.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to read the peak of a process's memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m", "sharded folder"])
def test_peak_memory_is_what_is_kept_and_a_shard(request, name, dtype):
    """Everything counts: the tokenizer, the file's mapped pages, and JAX's own."""
    path = request.getfixturevalue("sharded_folder") if name == "sharded folder" else catalog.fetch(name)
    largest = max(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    measured = json.loads(run(MEMORY, path, dtype, JAX_PLATFORMS="cpu").splitlines()[-1])
    print(f"{name} {dtype}: peak {measured['peak'] / 2**20:.0f} MiB, kept {measured['kept'] / 2**20:.0f}, largest shard {largest / 2**20:.0f}")
    assert measured["peak"] < measured["kept"] + 1.3 * largest


def test_sharding_that_does_not_fit_is_named(read):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    wrong = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    with pytest.raises(errors.CheckpointError, match=r"tensor '.*norm.weight' \[8\] can't be placed as NamedSharding"):
        read(tiny_files.CONFIG, shardings=wrong)


def test_one_device_mesh_takes_everything(tmp_path):
    folder = tiny_files.write_hf_tokenizer(tiny_files.write_hf(tmp_path / "hf"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    loaded = load.load_backbone(folder, sharding=sharding)
    assert {leaf.sharding for leaf in jax.tree.leaves(loaded.params)} == {sharding}
    jax.tree.map(np.testing.assert_array_equal, loaded.params, load.load_backbone(folder).params)
