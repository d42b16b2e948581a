"""Shared by all tests: one small random backbone, a random head and a trained one on it, and the backbone's own answers."""

from __future__ import annotations

import functools

import fakes
import jax
import numpy as np
import pytest
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache

from mtp_jax import config as config_lib
from mtp_jax.decoding import generate
from mtp_jax.training import data, fit

# Programs of tests run once or twice, so compiling them quickly matters more than their speed. These files look at what the compiler
# does when it takes its time, or at last bits and times.
FULLY_COMPILED = (
    "test_no_copy.py",
    "test_continue.py",
    "test_exactness.py",
    "test_layers.py",
    "test_bench.py",
    "test_timing.py",
    "test_golden.py",
)


def without_fusion_emitters(make):
    """`make` with XLA's older CPU code generator, which compiles a third faster; there is no public way to say so for some programs only."""

    @functools.wraps(make)
    def options(*args, **kwargs):
        made = make(*args, **kwargs)
        made.env_option_overrides = [*made.env_option_overrides, ("xla_cpu_use_fusion_emitters", False)]
        return made

    return options


@pytest.fixture(autouse=True, scope="module")
def compilation(request):
    """Compiles quickly, and lets go of the module's programs: each takes memory maps, of which a process may have no more than 65,530.

    Compiled programs are kept in pytest's cache folder for the other files and the next run; those of FULLY_COMPILED files are made anew.
    """
    quickly = request.path.name not in FULLY_COMPILED
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.config.update("jax_compilation_cache_dir", str(request.config.cache.mkdir("xla")) if quickly else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()  # it looks at its settings once
    with pytest.MonkeyPatch.context() as patch:
        if quickly:
            patch.setattr(compiler, "get_compile_options", without_fusion_emitters(compiler.get_compile_options))
        yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def backbone():
    return fakes.backbone()


@pytest.fixture(scope="session")
def head(backbone):
    return fakes.head(backbone)


@pytest.fixture(scope="session")
def runtime(backbone, head):
    return generate.make_runtime(backbone, head)


@pytest.fixture(scope="session")
def answers(runtime):
    """The backbone's own greedy answers to 24 prompts as training examples: most end by the budget of 30, some by the stop token 16."""
    prompts = [*fakes.prompts(*([3, 5, 9, 4] * 6), seed=20)]
    config = config_lib.DecodeConfig(max_new_tokens=30, stop_tokens=(16,))
    outputs = generate.run(runtime.without_drafter(), prompts, config).outputs
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    return [
        data.Example("tiny", np.asarray(prompt + output.tokens, np.int32), np.arange(len(prompt) + len(output.tokens)) >= len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@pytest.fixture(scope="session")
def training():
    """Of the run below: enough to learn 24 texts by heart, in part."""
    return config_lib.TrainConfig(
        steps=60, batch_size=8, max_length=64, num_draft=3, rows_per_sequence=0, optimizer="adamw", learning_rate=1e-2, weight_decay=0.0, checkpoint_every=60
    )


@pytest.fixture(scope="session")
def trained(backbone, answers, training, tmp_path_factory):
    """Run folder and head of one short training run."""
    out = tmp_path_factory.mktemp("run") / "tiny-head"
    return out, fit.fit(backbone, answers, fakes.HEAD, training, out, held_out=answers[:4])
