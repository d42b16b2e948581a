"""`mtp-jax plan`: what a training run needs of every device's memory, without weights and without the devices."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from mtp_jax import config as config_lib
from mtp_jax.commands import shared, train

_WORDS = {
    "backbone_parameters": "backbone's parameters",
    "loss_tables": "tables of the loss",
    "head_parameters": "head's parameters, float32",
    "optimizer": "optimizer",
    "batch_and_features": "batch and features",
    "step_temporary": "optimizer step, temporary",
    "backbone_temporary": "backbone's forward pass, temporary",
    "peak": "together at most",
}


@dataclass(frozen=True, kw_only=True)
class Plan(train.HeadShape):
    """What training a head takes of each device's memory: no weights, no accelerator needed.

    The mesh is made of simulated CPU devices. --mesh, --batch-size, --max-length, --accumulate, --remat and --rows-per-chunk decide what fits."""

    backbone: str
    """A published size: smollm2_135m, llama31_8b, qwen3_0_6b, qwen3_4b, qwen3_8b, gemma3_270m, gemma3_1b, gemma3_4b, gemma4_e2b, gemma4_e4b,
    gemma4_12b or gemma4_31b."""
    json: shared.Switch = False
    """Print the result as one JSON document, the last line on stdout."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the backbone's parameters and products."""
    features: shared.Switch = False
    """Plan for features computed before (`train --features`): the backbone doesn't run in the steps."""
    config: Annotated[config_lib.TrainConfig, tyro.conf.arg(name="")] = field(default_factory=config_lib.TrainConfig)

    def status(self, document: Any) -> int:
        return 0

    def run(self) -> dict[str, Any]:
        """Returns bytes by purpose, and what was measured how."""
        from mtp_jax.models import presets

        if self.backbone not in presets.PRESETS:
            raise shared.UsageError(f"--backbone {self.backbone!r}: must be one of {', '.join(presets.PRESETS)}")
        backbone = dataclasses.replace(presets.PRESETS[self.backbone](), dtype=self.dtype)
        head_config = self.head_config(backbone, self.config.num_draft)
        _simulate(math.prod(self.config.mesh))
        from mtp_jax.training import plan

        shared.say(f"planning {self.backbone} on {math.prod(self.config.mesh)} devices ...")
        found = plan.plan(backbone, head_config, self.config, live=not self.features)
        for name, size in found["bytes_per_device"].items():
            shared.say(f"{size / 2**30:10.3f} GiB  {_WORDS[name]}")
        shared.say(
            f"Parameters, optimizer and features by their shapes; temporary arrays of programs compiled here, for CPU ({found['compile_seconds']} s). "
            "An accelerator's own need about as much or less."
        )
        return {"backbone": self.backbone, **found}


def _simulate(count: int) -> None:
    """Let JAX have so many CPU devices, unless it has begun already: then it has what it has."""
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass
