"""Meshes: where arrays go, and that a run on eight (simulated) devices is the run on one."""

import dataclasses
import math

import fakes
import jax
import numpy as np
import processes
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from mtp_jax.config import ConfigError, TrainConfig
from mtp_jax.models import head as head_lib
from mtp_jax.models import presets
from mtp_jax.training import sharding, step

SHAPES = [(a, b, 8 // a // b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8) if a * b <= 8]
CUBE = AbstractMesh((2, 2, 2), sharding.AXES)


@pytest.mark.parametrize(
    "path, shape, spec",
    [
        ("embed/embedding", (64, 32), P("tensor", "fsdp")),
        ("unembed/kernel", (32, 64), P("fsdp", "tensor")),
        ("layers_3/attn/q/kernel", (32, 24), P("fsdp", "tensor")),
        ("layers_3/attn/o/kernel", (24, 32), P("tensor", "fsdp")),
        ("layers_3/mlp/gate/kernel", (32, 48), P("fsdp", "tensor")),
        ("layers_3/mlp/down/kernel", (48, 32), P("tensor", "fsdp")),
        ("layers_3/mlp/down/bias", (32,), P()),
        ("layers_3/attn_norm/scale", (32,), P()),
        ("pre/kernel", (64, 16), P("fsdp", "tensor")),
        ("layers_0_o/kernel", (24, 16), P("tensor", "fsdp")),
        ("layers_0_mlp/down/kernel", (24, 16), P("tensor", "fsdp")),
        ("post/kernel", (16, 32), P("tensor", "fsdp")),
        ("gate_kernel", (16, 2), P()),
        ("vocab/unembedding", (32, 24), P("fsdp", "tensor")),
        ("unembedding", (64, 32), P("tensor", "fsdp")),
        ("opt_state/1/0/mu/layers_0_o/kernel", (24, 16), P("tensor", "fsdp")),
        ("opt_state/1/0/count", (), P()),
        ("layers_3/attn/k/kernel", (32, 13), P("fsdp", None)),  # 13 columns can't be halved
    ],
)
def test_the_table_of_shardings(path, shape, spec):
    assert sharding.of_path(path, shape, CUBE).spec == spec


@pytest.mark.parametrize("optimizer, moments", [("muon", 1), ("adamw", 2)])
def test_optimizer_state_lies_where_the_parameters_do(optimizer, moments):
    state = jax.eval_shape(lambda: step.init_state(head_lib.Head(fakes.HEAD, fakes.BACKBONE), TrainConfig(optimizer=optimizer)))
    specs = jax.tree.map(lambda leaf: leaf.spec, sharding.of_tree(state, CUBE))
    kept = jax.tree_util.tree_leaves_with_path(specs.opt_state)
    assert specs.head_params["pre"]["kernel"] == P("fsdp", "tensor")
    for path, spec in jax.tree_util.tree_leaves_with_path(specs.head_params):
        found = [of_moment for where, of_moment in kept if where[-len(path) :] == path]
        matrix = path[-1].key.endswith("kernel")
        assert found == [spec] * (moments if matrix else 2), path


def test_a_31b_backbone_is_split_over_eight_devices():
    """All but a thousandth of its parameters (norms, scalars) lies on one device of eight only, whichever axes the mesh has."""
    config = presets.gemma4_31b()
    shapes = sharding.backbone_shapes(config)
    places = sharding.of_backbone(config, AbstractMesh((1, 4, 2), sharding.AXES))
    held = total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        place = places(tuple(part.key for part in path))
        held, total = held + math.prod(place.shard_shape(leaf.shape)), total + math.prod(leaf.shape)
    assert total == 30_697_345_340 and total / 8 <= held < 1.001 * total / 8


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(mesh=(2, 1)), r"mesh=\(2, 1\): must be three integers"),
        (dict(mesh=(2, 1, 0)), r"mesh=\(2, 1, 0\): must be three integers"),
        (dict(mesh=(2, 4, 1)), r"batch_size=12: must be a multiple of accumulate \* data \* fsdp = 1 \* 2 \* 4 = 8"),
        (dict(accumulate=5), r"batch_size=12: must be a multiple of accumulate \* data \* fsdp = 5 \* 1 \* 1 = 5"),
        (dict(accumulate=0), "accumulate=0: must be an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(batch_size=12, **changes)


def test_more_devices_than_there_are_are_refused():
    with pytest.raises(sharding.MeshError, match=r"mesh=\(64, 1, 2\): data \* fsdp \* tensor = 128 devices; there are "):
        sharding.make_mesh((64, 1, 2))


def test_an_error_of_the_first_process_is_raised():
    with pytest.raises(ZeroDivisionError):
        sharding.on_first(lambda: 1 / 0)


def test_a_process_number_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(sharding.MeshError, match="JAX_PROCESS_ID='first': must be a number"):
        sharding.start(False)


EIGHT = """
from mtp_jax.checkpoints.heads import flatten
one = run("one")
class Spoiled:  # the third batch's are not numbers; batches are read ahead, so calls can't be counted
    bad = data.batch_at(examples, RUN, 2).index.tolist()
    def batch(self, batch, keys, values, taps=()):
        module = step.backbone_lib.Backbone(backbone.config)
        read = features.compute(module, backbone.params, batch.tokens, key_layers=keys, value_layers=values)
        return jax.tree.map(np.asarray, read.replace(hidden=read.hidden * np.nan) if batch.index.tolist() == self.bad else read)

cube = run("cube", mesh=(2, 2, 2))
run("other", mesh=(2, 2, 2), options=dict(stop_after=10, held_out=examples[:3], decode_prompts=2))
other = run("other", options=dict(resume=True))
metrics = [json.loads(line) for line in (root / "other" / "metrics.jsonl").read_text().splitlines()]
try:
    run("nan", mesh=(2, 2, 2), checkpoint_every=2, options=dict(features=Spoiled()))
    stopped = ""
except fit.NotFiniteError as error:
    stopped = str(error)
mesh = sharding.make_mesh((2, 2, 2))
state, _ = fit._begin(fit.head_lib.Head(fakes.HEAD, backbone.config), examples, RUN, mesh, None)
held = {name: leaf.addressable_shards[0].data.shape for name, leaf in flatten(state.head_params).items()}
print(json.dumps(dict(one=one, cube=cube, other=other, stopped=stopped, sequences=', '.join(map(str, Spoiled.bad)), held=held,
    middle=metrics[9],
    saved=sorted(int(path.name) for path in (root / "nan" / "checkpoints").iterdir()), logged=len(losses(root / "nan")))))
"""


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return processes.finish(processes.start(EIGHT, tmp_path_factory.mktemp("eight"), devices=8))


def test_two_by_two_by_two_devices_are_one(eight):
    assert len(eight["one"]) == 20
    np.testing.assert_allclose(eight["cube"], eight["one"], rtol=0, atol=1e-5)
    assert eight["held"]["pre/kernel"] == [32, 8] and eight["held"]["layers_0_o/kernel"] == [12, 8] and eight["held"]["norm/scale"] == [16]


def test_a_run_goes_on_with_other_devices(eight):
    """Ten steps on eight devices, then a held-out figure and a real decode there, and ten steps on one."""
    np.testing.assert_allclose(eight["other"], eight["one"], rtol=0, atol=1e-5)
    assert eight["middle"]["held_out"]["steps"] > 0 and eight["middle"]["decoded"]["prompts"] == 2


def test_not_a_number_stops_a_run_on_a_mesh(eight):
    assert "step 3: loss=nan" in eight["stopped"] and eight["sequences"] in eight["stopped"]
    assert eight["saved"] == [2] and eight["logged"] == 2


@pytest.mark.slow  # a minute or two: ten shapes, of which each is compiled
def test_every_mesh_of_eight_devices_is_one(tmp_path):
    script = """
changes = dict(muon=dict(optimizer="muon"), parts=dict(accumulate=2, remat=True, rows_per_chunk=4))
found = {str(mesh): run(str(mesh), mesh=mesh) for mesh in [(1, 1, 1), *SHAPES]}
found |= {name + str(mesh): run(name + str(mesh), mesh=mesh, **change) for name, change in changes.items() for mesh in [(1, 1, 1), (2, 2, 2), (1, 4, 2)]}
print(json.dumps(found))
""".replace("SHAPES", str(SHAPES))
    found = processes.finish(processes.start(script, tmp_path, devices=8), timeout=1500)
    assert len(found) == 17
    for name, losses in found.items():
        reference = found[name[: name.index("(")] + "(1, 1, 1)"]
        np.testing.assert_allclose(losses, reference, rtol=0, atol=1e-5, err_msg=name)


def test_rows_of_a_batch_on_one_device_are_all_rows():
    mesh = sharding.make_mesh((1, 1, 1))
    assert sharding.rows_here(mesh, 6) == slice(0, 6)
    joined = sharding.join_batch({"a": np.arange(6)}, mesh, 6)
    np.testing.assert_array_equal(joined["a"], np.arange(6))


def test_a_mesh_survives_json():
    from mtp_jax import config as config_lib

    config = dataclasses.replace(TrainConfig(), mesh=(2, 4, 1))
    assert config_lib.from_dict(TrainConfig, {**config_lib.to_dict(config), "mesh": [2, 4, 1]}, where="x") == config
