"""kill -9 at many moments of a training run, while a checkpoint is written among them; resumed, it is the unbroken run bit for bit.

The runs are processes of their own. They are killed from outside, by what can be seen in the run folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

TESTS = Path(__file__).parent.parent
STEPS = 12
RUN = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
import jax
jax.config.update("jax_disable_most_optimizations", True)
import fakes, numpy as np
from mtp_jax.config import TrainConfig
from mtp_jax.training import data, fit

texts = fakes.prompts(*range(12, 36), seed=3)
examples = [data.Example("t", np.asarray(text, np.int32), np.arange(len(text)) >= 5) for text in texts]
config = TrainConfig(steps={STEPS}, batch_size=4, max_length=64, num_draft=2, rows_per_sequence=8, checkpoint_every=2)
out = Path(sys.argv[1])
fit.fit(fakes.backbone(), examples, fakes.HEAD, config, out, resume=(out / "run.json").exists(), held_out=examples[:2])
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Programs are compiled once for all runs."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | cache | {"JAX_PLATFORMS": "cpu"}


def start(out, environment):
    return subprocess.Popen([sys.executable, "-c", RUN, str(out)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(out, environment):
    process = start(out, environment)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-3000:]


@pytest.fixture(scope="module")
def unbroken(environment, tmp_path_factory):
    out = tmp_path_factory.mktemp("kill") / "run"
    finish(out, environment)
    return out


def lines(out):
    """metrics.jsonl without the times."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in found]


def steps_logged(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(out):
    folder = out / "checkpoints"
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.exists() else set()


def saving(out):
    folder = out / "checkpoints"
    return folder.exists() and any(not path.name.isdigit() for path in folder.iterdir())


def kill_when(seen, out, environment, delay=0.0):
    """Run until `seen()`, then kill; whether it came to that before the run ended by itself."""
    process = start(out, environment)
    try:
        give_up = time.monotonic() + 300
        while process.poll() is None and not seen():
            assert time.monotonic() < give_up
            time.sleep(0.0005)
        time.sleep(delay)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()[-3000:]
    return process.returncode != 0


def restored(out):
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        assert manager.latest_step() == STEPS
        return manager.restore(STEPS, args=ocp.args.StandardRestore())


def assert_same_run(out, unbroken):
    """Metrics, head parameters, optimizer state and all else that a checkpoint holds, and the exported head's files."""
    assert lines(out) == lines(unbroken)
    assert [line["step"] for line in lines(out)] == list(range(1, STEPS + 1))
    ours, theirs = restored(out), restored(unbroken)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
    weights = [{path.name: path.read_bytes() for path in (folder / "head").glob("*.safetensors")} for folder in (out, unbroken)]
    assert weights[0] == weights[1] != {}


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_and_right_after(unbroken, environment, tmp_path):
    """Once between the beginning and the end of a write, once when the checkpoint has just got its name, and what follows it has not been written."""
    out = tmp_path / "run"
    assert kill_when(lambda: saved(out) and saving(out), out, environment)
    held = saved(out)
    assert held and held < set(range(2, STEPS + 1, 2))
    assert kill_when(lambda: saved(out) - held, out, environment)
    finish(out, environment)
    assert_same_run(out, unbroken)


def test_killed_as_the_last_checkpoint_gets_its_name(unbroken, environment, tmp_path):
    """Nothing is left to train then, but the last line and the exported head may be missing."""
    out = tmp_path / "run"
    assert kill_when(lambda: STEPS in saved(out), out, environment)
    finish(out, environment)
    assert_same_run(out, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments_again_and_again(unbroken, environment, tmp_path, seed):
    out, rng = tmp_path / "run", random.Random(seed)
    kills = 0
    for _ in range(5):
        target, delay = rng.randrange(STEPS), rng.random() * 0.1
        kills += kill_when(lambda target=target: steps_logged(out) >= target, out, environment, delay)
    assert kills
    finish(out, environment)
    assert_same_run(out, unbroken)
