"""Counts of what a pass reads and computes, against shapes worked out by hand and XLA's own count."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax import config as config_lib
from mtp_jax.evaluation import roofline
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import cache as cache_lib

C, S, B, T = fakes.BACKBONE, 40, 3, 5
ATTENTION = C.width * C.head_dim * (2 * C.num_heads + 2 * C.num_kv_heads)  # q and o, k and v
MATRICES = C.num_layers * (ATTENTION + 3 * C.width * C.mlp_width)


@pytest.mark.parametrize("config", [C, fakes.TIED])
def test_backbone_by_hand(config):
    params = fakes.backbone(config).params
    work = roofline.backbone_work(params, config, batch=B, width=T, num_slots=S)
    assert work.layers == MATRICES + (2 * C.num_layers + 1) * C.width
    assert work.unembedding == C.vocab_size * C.width
    assert work.cache == sum(leaf.size for leaf in jax.tree.leaves(cache_lib.empty(config, B, S).replace(lengths=())))
    assert work.elements == work.layers + work.unembedding + work.cache
    assert work.flops == B * T * (2 * (MATRICES + C.vocab_size * C.width) + 4 * C.num_layers * C.num_heads * C.head_dim * S)


def test_backbone_against_the_compiled_program(backbone):
    """XLA counts norms, softmax and masks as well, so a little more."""
    tokens, cache = jnp.ones((B, T), jnp.int32), cache_lib.empty(C, B, S)
    compiled = jax.jit(lambda params, cache: backbone_lib.Backbone(C).apply({"params": params}, tokens, cache)).lower(backbone.params, cache).compile()
    found = roofline.compiled_cost(compiled)
    assert found is not None
    work = roofline.backbone_work(backbone.params, C, batch=B, width=T, num_slots=S)
    assert work.flops < found["flops"] < 1.2 * work.flops
    assert found["bytes"] > 4 * work.elements


def test_layers_that_share_keys_read_them_again_and_token_tables_are_not_read():
    config = dataclasses.replace(C, shared_kv_layers=2, per_layer_input_width=8)
    params = fakes.backbone(config).params
    work = roofline.backbone_work(params, config, batch=B, width=1, num_slots=S)
    assert work.cache == 2 * C.num_layers * B * C.num_kv_heads * S * C.head_dim
    table = params["layer_inputs"]["embed"]["embedding"].size
    everything = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert work.layers == everything - table - 2 * C.vocab_size * C.width  # embedding and unembedding


def test_head_by_hand(head):
    config = head.config
    work = roofline.head_work(head.params, config, C, batch=B, num_slots=S)
    assert work.layers == sum(leaf.size for leaf in jax.tree.leaves(head.params))
    assert work.unembedding == config.draft_vocab_size * C.width
    keys = C.num_kv_heads * S * C.head_dim
    assert work.cache == B * keys * (2 * 2 + 1)  # two layers' keys and values, one pointer's keys
    matrices = sum(leaf.size for leaf in jax.tree.leaves(head.params) if leaf.ndim == 2)
    scores = 2 * 4 * config.num_heads * C.head_dim * S + 2 * 2 * keys  # two layers; two pointers over one layer's keys
    assert work.flops == B * (2 * (matrices + work.unembedding) + scores)
    assert work.times(3) == roofline.Work(layers=3 * work.layers, unembedding=3 * work.unembedding, cache=3 * work.cache, flops=3 * work.flops)


def test_a_table_in_clusters_is_read_in_part():
    def work(top):
        output = dict(output="own") if top is None else dict(output="centroids", num_centroids=8, top_centroids=top)
        config = config_lib.assistant_head_config_for(C, width=16, **output)
        return config, roofline.head_work(fakes.head(fakes.backbone(), config).params, config, C, batch=1, num_slots=S)

    (config, part), (_, whole), (_, own) = work(2), work(8), work(None)
    assert whole.layers - part.layers == 6 * config.draft_vocab_size * 16 // 8
    assert whole.layers == own.layers + 8 * 16  # and the centroids
    assert part.unembedding == whole.unembedding == own.unembedding == 0


def test_prediction_by_hand():
    device = roofline.Accelerator(name="x", gigabytes_per_second=2, teraflops=0.5, source="")
    one = roofline.Work(layers=900_000, cache=100_000, flops=10_000_000)  # 2 MB in bfloat16: 1 ms; computing takes 0.02 ms
    verify = {1: one, 4: dataclasses.replace(one, flops=1_500_000_000)}  # at 4, computing takes 3 ms
    found = roofline.predict(device, one, verify, roofline.Work(layers=50_000))  # a draft: 0.05 ms
    assert found["one_token_ms"] == 1.0
    assert [(step["num_draft"], step["verify_ms"], step["draft_ms"], step["ratio"]) for step in found["steps"]] == [(1, 1.0, 0.05, 1.05), (4, 3.0, 0.2, 3.2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bandwidth_programs_read_the_whole_matrix(dtype):
    matrix = roofline.read_matrix(100_000, 32, dtype)
    assert matrix.shape[1] == 32 and abs(matrix.nbytes - 100_000) < 32 * 4
    assert roofline.read_matrix(1, 32, dtype).shape == (1, 32)
    read = roofline.threaded_read(matrix)
    assert read() is None
    parts = read.args[1]  # type: ignore[attr-defined]
    assert sum(part.nbytes for part in parts) == matrix.nbytes // 8 * 8
    for count, expected in ((1, 0.85), (2, 0.7375), (500, 0.4)):  # of a matrix whose rows sum to 1
        np.testing.assert_allclose(np.asarray(roofline.matvec(matrix, count), np.float32), expected, rtol=1e-2)


def test_a_backend_without_a_count():
    class Compiled:
        def cost_analysis(self):
            raise NotImplementedError

    assert roofline.compiled_cost(Compiled()) is None
