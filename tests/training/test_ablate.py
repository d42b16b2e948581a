"""experiments/ablate.py: each head that it puts in the place of ours differs from ours in what it says it does."""

import dataclasses
import importlib
import json
from pathlib import Path

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.models import head as head_lib

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="module")
def ablate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        return importlib.import_module("ablate")


CONFIG = dataclasses.replace(fakes.HEAD, pointer_heads=1, input_norms=False)


def draft(module: type[head_lib.Head], changes: dict, params=None):
    """One draft step of two rows over five slots, of the module with parameters of its own or given ones."""
    bb = fakes.BACKBONE
    key = jax.random.key(3)
    inputs = {name: jax.random.normal(jax.random.fold_in(key, i), (1, 2, bb.width)) * changes.get(name, 1) for i, name in enumerate(("embedded", "hidden"))}
    kv = {layer: jax.random.normal(jax.random.fold_in(key, 9 + layer), (1, bb.kv_heads_of(layer), 5, bb.head_dim_of(layer))) for layer in CONFIG.layers_read}
    unembedding = jax.random.normal(jax.random.fold_in(key, 7), (bb.width, CONFIG.draft_vocab_size))
    head = module(CONFIG, bb)
    args = (inputs["embedded"], inputs["hidden"], kv, kv, jnp.array([[3, 4]]), unembedding)
    params = head.init(jax.random.key(0), *args)["params"] if params is None else params
    return params, inputs, head.apply({"params": params}, *args)


def test_parts_of_the_head_are_replaced(ablate):
    ours, inputs, base = draft(head_lib.Head, {})

    _, _, seen = draft(ablate.HiddenAlone, {})
    params, _, other = draft(ablate.HiddenAlone, {"embedded": 2})
    assert (seen.logits == other.logits).all() and params["pre"]["kernel"].shape == (fakes.BACKBONE.width, CONFIG.width)

    params, _, normed = draft(ablate.NormedRecurrence, {})
    np.testing.assert_allclose(np.square(normed.hidden).mean(axis=-1), 1.0, atol=1e-2)
    assert set(params) - set(ours) == {"recurrent_norm"}

    _, _, even = draft(ablate.EvenGate, {}, ours)
    odds = np.asarray(base.gate / (1 - base.gate))
    np.testing.assert_allclose(even.gate / (1 - even.gate), odds * np.exp(-head_lib.GATE_BIAS), rtol=1e-4)

    _, _, apart = draft(ablate.PointerPerHead, {}, ours)
    np.testing.assert_allclose(apart.copy.sum(axis=-1), 1.0, atol=1e-5)
    assert (np.asarray(apart.copy)[0, 0, 4:] == 0).all() and not np.allclose(apart.copy, base.copy)
    np.testing.assert_allclose(apart.gate, base.gate, atol=1e-6)


def test_every_variant_is_a_valid_config(ablate):
    bb = dataclasses.replace(fakes.BACKBONE, num_layers=30, vocab_size=49152, width=576, num_heads=9, num_kv_heads=3, layer_types=())
    for name, variant in ablate.VARIANTS.items():
        config_lib.TrainConfig(**(ablate.BASE_TRAIN | variant.train))
        head = config_lib.head_config_for(bb, **(ablate.BASE_HEAD | variant.head))
        assert set(head.layers_read) <= set(ablate.LAYERS), name


def test_tables_and_plot(ablate, tmp_path):
    def found(value):
        return {"0": {"tokens_per_step": value, "parameters": 2_000_000, "tasks": {"one": value, "two": value + 1}}}

    result = {
        "settings": {"train_data": {"sequences": 8}, "train": {"steps": 2}},
        "variants": {"base": found(2.0) | {"1": found(3.0)["0"]}, "data: 1/4": found(1.5)},
    }
    lines = ablate.markdown(json.loads(json.dumps(result))).splitlines()
    assert lines[2] == "| base | 2.000 3.000 | +0.000 | 2.00 M | 2.50 | 3.50 |"
    assert lines[3] == "| data: 1/4 | 1.500 | -1.000 | 2.00 M | 1.50 | 2.50 |"
    alone = {"settings": {}, "variants": {"data: 1/4": found(1.5)}}
    assert ablate.markdown(alone, by_task=False).splitlines()[2] == "| data: 1/4 | 1.500 | +nan | 2.00 M |"
    pytest.importorskip("matplotlib", reason="plots need the extra 'report'")
    ablate.plot(result, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().rstrip().endswith("</svg>")
    assert list(tmp_path.iterdir()) == [tmp_path / "plot.svg"]
