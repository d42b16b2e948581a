"""Training runs in processes of their own, with simulated devices or several of them together: for the tests of meshes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
SETUP = f"""
import dataclasses, json, sys, time
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
import jax
jax.config.update("jax_disable_most_optimizations", True)
from mtp_jax.training import sharding
sharding.start(False)
import fakes, numpy as np
from mtp_jax.config import TrainConfig
from mtp_jax.training import data, features, fit, step

root = Path(sys.argv[1])
texts = fakes.prompts(*range(12, 36), seed=3)
examples = [data.Example("t", np.asarray(text, np.int32), np.arange(len(text)) >= 5) for text in texts]
backbone = fakes.backbone()
RUN = TrainConfig(steps=20, batch_size=8, max_length=64, num_draft=3, rows_per_sequence=8, optimizer="adamw", learning_rate=1e-2, checkpoint_every=10)

def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]

def run(out, *, backbone=backbone, options=(), **changes):
    fit.fit(backbone, examples, fakes.HEAD, dataclasses.replace(RUN, **changes), root / out, **dict(options))
    return losses(root / out)
"""


def start(script: str, folder: Path, *, devices: int = 1, **environment: str) -> subprocess.Popen[str]:
    """Run `script` after SETUP."""
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SETUP + script, str(folder)]
    return subprocess.Popen(command, env=os.environ | settings | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout: int = 300) -> dict:
    """Its last line, which is JSON."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])
