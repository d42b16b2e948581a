"""What a run tells of itself: counts of FLOPs, the best head, decodes beside measurements, TensorBoard, and the plan of its memory."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import warnings

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoints.load import load_head
from mtp_jax.config import TrainConfig
from mtp_jax.models import backbone as backbone_lib
from mtp_jax.models import head as head_lib
from mtp_jax.training import data, features, fit, monitor, step, walk

SHORT = TrainConfig(steps=4, batch_size=8, max_length=64, num_draft=2, rows_per_sequence=8, optimizer="adamw", learning_rate=1e-2, checkpoint_every=1)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_flops_of_products_by_hand():
    a, b, c = jnp.zeros((3, 4)), jnp.zeros((4, 5)), jnp.zeros((7, 5, 5))

    def chain(a, b, c):
        x, _ = jax.lax.scan(lambda x, kernel: (jax.jit(jnp.matmul)(x, kernel), None), a @ b, c)
        return jnp.sin(x).sum()

    assert monitor.matmul_flops(chain, a, b, c) == 2 * 3 * 5 * 4 + 7 * 2 * 3 * 5 * 5
    assert monitor.matmul_flops(lambda a, b: jnp.einsum("xij,xjk->xik", a, b), jnp.zeros((6, 3, 4)), jnp.zeros((6, 4, 5))) == 6 * 2 * 3 * 4 * 5


def test_flops_of_a_step(backbone, answers):
    """Two for every weight and token in the backbone's products, and its attention; neither remat nor parts change the count."""
    config, module = backbone.config, backbone_lib.Backbone(backbone.config)
    batch, head = data.batch_at(answers, SHORT, 0), head_lib.Head(fakes.HEAD, backbone.config)
    tokens, length = batch.tokens.size, batch.tokens.shape[1]
    kernels = sum(leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(backbone.params) if path[0].key.startswith("layers_") and leaf.ndim == 2)
    attention = config.num_layers * 2 * 2 * tokens * length * config.num_heads * config.head_dim
    values = tuple(sorted(set(fakes.HEAD.donors)))
    read = features.compute(module, backbone.params, batch.tokens, key_layers=fakes.HEAD.layers_read, value_layers=values)
    frozen = fit.make_frozen(backbone, data.draft_vocabulary(answers, 24, 64))
    state = step.init_state(head, SHORT)
    alone = monitor.step_flops(head, SHORT, state, frozen, read, batch)
    assert monitor.step_flops(head, SHORT, state, frozen, read, batch, (module, backbone.params)) - alone == 2 * kernels * tokens + attention
    other = dataclasses.replace(SHORT, remat=True, accumulate=2, rows_per_chunk=4)
    assert monitor.step_flops(head, other, state, frozen, read, batch) == alone
    rows, pre = batch.rows.size, 2 * 32 * 16  # of [embedding; hidden] into the head: forward and to its kernel in both draft steps, to its input in one
    assert alone > 2 * rows * pre * 4


def test_speed_and_utilisation_by_hand():
    found = monitor.speed(seconds=2.0, tokens=3000, flops=8 * 10**12, devices=4, peak_tflops=2.5)
    assert found == {"tokens_per_second": 1500.0, "flops_per_second": 4e12, "mfu": 0.4}
    assert "mfu" not in monitor.speed(2.0, 3000, 8 * 10**12, 4, None)


def test_every_step_tells_its_speed(trained):
    found = lines(trained[0])
    assert all(line["tokens_per_second"] > 0 and line["flops_per_second"] > 0 and "mfu" not in line for line in found)
    assert found[9]["tokens_per_second"] == pytest.approx(found[9]["tokens"] / found[9]["seconds"], rel=0.2)


@pytest.fixture
def figures(monkeypatch):
    """Sets what the held-out measurement says at each checkpoint."""

    def say(*tokens_per_step):
        rates = iter(tokens_per_step)
        monkeypatch.setattr(walk, "measure", lambda *args: walk.Acceptance(100, round(100 * next(rates)), [0, 0], loss=1.0))

    return say


def test_the_head_folder_holds_the_best_head(backbone, answers, figures, tmp_path):
    figures(1.5, 2.0, 1.9, 1.8)
    returned = fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "run", held_out=answers[:2])
    assert returned.card["step"] == 2 and load_head(tmp_path / "run", backbone).card["metrics"]["held_out"]["tokens_per_step"] == 2.0
    assert [line["best"] for line in lines(tmp_path / "run")] == [True, True, False, False]
    two = fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "two", stop_after=2)  # the newest, with nothing held out
    assert two.card["step"] == 2
    jax.tree.map(np.testing.assert_array_equal, returned.params, two.params)


@pytest.mark.parametrize("later, best", [((1.9, 2.1), 4), ((1.9, 1.95), 2), ((2.0, 1.9), 3)])
def test_a_resumed_run_knows_the_best_figure(backbone, answers, figures, tmp_path, later, best):
    """Of equals, the newest."""
    figures(1.5, 2.0)
    fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "run", held_out=answers[:2], stop_after=2)
    figures(*later)
    assert fit.fit(backbone, answers, fakes.HEAD, SHORT, tmp_path / "run", held_out=answers[:2], resume=True).card["step"] == best


def test_decodable_examples():
    def example(*mask):
        return data.Example("t", np.arange(len(mask)), np.array(mask, bool))

    fitting, short, long = example(0, 0, 1, 1), example(0, 1, 1), example(0, *[1] * 9)
    chosen = monitor.decodable([fitting, example(0, 1, 0, 1, 1), example(0, 0, 1), long, short], 3, 8)
    assert chosen == [short, fitting] and monitor.decodable([fitting, short], 1, 8) == [short] and monitor.decodable([short], 0, 8) == []


def test_a_decode_agrees_with_the_measurement(backbone, answers, trained, training):
    frozen = fit.make_frozen(backbone, trained[1].draft_ids)
    chosen = monitor.decodable(answers, 4, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = monitor.decode(backbone, trained[1], frozen, chosen, training)
    module = head_lib.Head(fakes.HEAD, backbone.config)
    measured = walk.measure(module, trained[1].params, frozen, backbone, chosen, training)
    assert (found["prompts"], found["identical"]) == (4, 4)
    assert found["tokens_per_step"] == pytest.approx(measured.tokens_per_step, rel=1e-3) and measured.tokens_per_step > 1.2


def test_a_decode_that_disagrees_is_told(backbone, answers, trained, training, monkeypatch):
    """As if training saw another pairing of tokens and states than decoding has."""
    frozen = fit.make_frozen(backbone, trained[1].draft_ids)
    measure = walk.measure
    monkeypatch.setattr(walk, "measure", lambda *args: dataclasses.replace(measure(*args), tokens=10 * measure(*args).tokens))
    with pytest.warns(UserWarning, match=r"decoding wrote \d\.\d+ tokens a step where \d\d\.\d+ were measured .* on the same 4 texts"):
        monitor.decode(backbone, trained[1], frozen, monitor.decodable(answers, 4, 64), training)


def test_flat_names():
    values = {"loss": 1, "accept": [0.5, 0.25], "held_out": {"tokens_per_step": 2.0, "accept_conditional": [0.1]}, "name": "x"}
    expected = {"loss": 1.0, "accept/1": 0.5, "accept/2": 0.25, "held_out/tokens_per_step": 2.0, "held_out/accept_conditional/1": 0.1}
    assert monitor.flat(values) == expected


@pytest.mark.skipif(importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_tensorboard_has_the_metrics(tmp_path, monkeypatch):
    import tensorboardX

    written = []
    monkeypatch.setattr(tensorboardX.SummaryWriter, "add_scalar", lambda self, name, value, step: written.append((name, value, step)))
    with monitor.log(tmp_path, 0, tensorboard=True) as write:
        write(3, {"loss": 1.5, "accept": [0.5]})
    assert written == [("loss", 1.5, 3), ("accept/1", 0.5, 3)] and list((tmp_path / "tensorboard").glob("events*"))
    assert lines(tmp_path) == [{"step": 3, "loss": 1.5, "accept": [0.5]}]


def test_tensorboard_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with (
        pytest.raises(monitor.MonitorError, match=r"--tensorboard: needs tensorboardX: pip install 'mtp-jax\[train\]'"),
        monitor.log(tmp_path, 0, tensorboard=True),
    ):
        pass


def plan(*args):
    command = [sys.executable, "-m", "mtp_jax.cli", "plan", *args, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""})
    return done.returncode, done.stderr, json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None


def test_a_plan_by_hand():
    """SmolLM2 135M in bfloat16 on 2 x 2 x 2 devices; float32 for what is learnt, with two moments by AdamW."""
    code, said, found = plan("--backbone", "smollm2_135m", "--mesh", "2", "2", "2", "--batch-size", "8", "--max-length", "128", "--optimizer", "adamw")
    assert code == 0 and "together at most" in said
    sizes, count = found["bytes_per_device"], found["parameters"]
    assert count["backbone"] == 134_515_008
    norms = 61 * 576  # float32, on every device; all else lies on 4 devices in parts
    assert sizes["backbone_parameters"] == 2 * (count["backbone"] - norms) // 4 + 4 * norms
    assert count["head"] // 4 * 4 <= sizes["head_parameters"] < 4 * (count["head"] // 4 + 5 * 576)
    assert 2 * sizes["head_parameters"] <= sizes["optimizer"] <= 2 * sizes["head_parameters"] + 16
    per_token = 2 * (576 + 5 * 3 * 64) + 4 + 1  # hidden, keys of four layers and values of one; token and mask
    assert sizes["batch_and_features"] == 2 * 128 * per_token + 2 * (64 * (4 + 1) + 4 + 4)
    assert sizes["step_temporary"] > sizes["head_parameters"] and sizes["backbone_temporary"] > 0
    always = sum(sizes[name] for name in ("backbone_parameters", "loss_tables", "head_parameters", "optimizer", "batch_and_features"))
    assert sizes["peak"] == always + max(sizes["step_temporary"], sizes["backbone_temporary"])


def test_a_plan_of_an_unknown_size_is_refused():
    code, said, _ = plan("--backbone", "smollm3")
    assert code == 2 and "--backbone 'smollm3': must be one of smollm2_135m, llama31_8b" in said


@pytest.mark.slow  # half a minute: sixty layers are compiled
def test_a_plan_of_31b():
    code, _, found = plan("--backbone", "gemma4_31b", "--mesh", "1", "8", "1")
    assert code == 0 and found["parameters"]["backbone"] == 30_697_345_340
    sizes = found["bytes_per_device"]
    assert 7.1 < sizes["backbone_parameters"] / 2**30 < 7.2
    assert sizes["backbone_temporary"] < 2 * 2**30  # the parameters of a layer or two, not of all
