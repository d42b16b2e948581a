"""What a pass must read and compute, and so how fast a device could be at best.

Decoding a few tokens reads every weight once and does little with it: on most devices the time of a pass is bytes / memory
bandwidth, whether it has one row or five. The roofline of a device takes the longer of that and operations / FLOP per
second (Williams et al. 2009); launches, waiting and everything else come on top, so a prediction here is a lower bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mtp_jax import config as config_lib


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Published figures of a device."""

    name: str
    gigabytes_per_second: float  # memory, 1e9 bytes
    teraflops: float  # dense bfloat16 matrix products, 1e12 a second
    source: str

    def seconds(self, work: Work) -> float:
        """Time of `work` in bfloat16, at best."""
        return max(2 * work.elements / (self.gigabytes_per_second * 1e9), work.flops / (self.teraflops * 1e12))


ACCELERATORS = (
    Accelerator(name="TPU v5e", gigabytes_per_second=819, teraflops=197, source="https://cloud.google.com/tpu/docs/v5e"),
    Accelerator(name="TPU v6e", gigabytes_per_second=1638, teraflops=918, source="https://cloud.google.com/tpu/docs/v6e"),
    Accelerator(name="H100 SXM", gigabytes_per_second=3350, teraflops=989, source="https://www.nvidia.com/en-us/data-center/h100/"),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Numbers read and operations done; a multiplication and an addition are two."""

    layers: int = 0  # weights outside the unembedding
    unembedding: int = 0
    cache: int = 0  # keys and values
    flops: int = 0

    @property
    def elements(self) -> int:
        return self.layers + self.unembedding + self.cache

    def times(self, count: int) -> Work:
        """The same again and again, nothing kept in between."""
        return Work(layers=self.layers * count, unembedding=self.unembedding * count, cache=self.cache * count, flops=self.flops * count)


def backbone_work(params: dict[str, Any], config: config_lib.BackboneConfig, *, batch: int, width: int, num_slots: int) -> Work:
    """One pass over `width` tokens of each row. Attention reads all slots, behind the length or not: masks only hide them.
    So it does in layers with a window, unless their cache is a ring, which is not counted here.

    `params` are those of the plain layout. Of the token tables only a few rows are read; they are left out.
    """
    layers = {name: value for name, value in params.items() if name not in ("embed", "unembed")}
    if "layer_inputs" in layers:
        layers["layer_inputs"] = {name: value for name, value in layers["layer_inputs"].items() if name != "embed"}
    unembedding = config.vocab_size * config.width
    cache = scores = 0
    for index in range(config.num_layers):
        cache += 2 * batch * config.kv_heads_of(index) * num_slots * config.head_dim_of(index)
        scores += config.num_heads * config.head_dim_of(index) * num_slots
    flops = batch * width * (2 * (_matrices(layers) + unembedding) + 4 * scores)
    return Work(layers=_elements(layers), unembedding=unembedding, cache=cache, flops=flops)


def head_work(
    params: dict[str, Any], head: config_lib.HeadConfig | config_lib.BaselineConfig, backbone: config_lib.BackboneConfig, *, batch: int, num_slots: int
) -> Work:
    """Drafting one token of each row with a head; M tokens are this M times, since each depends on the one before."""
    if isinstance(head, config_lib.BaselineConfig):
        return _baseline_work(params, head, batch=batch, num_slots=num_slots)
    unembedding = head.draft_vocab_size * head.backbone_width if head.output == "backbone" else 0
    layers, matrices = _elements(params), _matrices(params)
    if head.output == "centroids":  # of its table the best clusters alone are read
        skipped = head.draft_vocab_size * head.width * (head.num_centroids - head.top_centroids) // head.num_centroids
        layers, matrices = layers - skipped, matrices - skipped
    cache = scores = 0
    for donor in head.donors:
        cache += 2 * batch * backbone.kv_heads_of(donor) * num_slots * backbone.head_dim_of(donor)
        scores += 4 * head.num_heads * backbone.head_dim_of(donor) * num_slots
    for donor in head.pointer_donors:  # keys alone
        size = backbone.kv_heads_of(donor) * num_slots * backbone.head_dim_of(donor)
        cache += batch * size
        scores += 2 * head.pointer_heads * size
    return Work(layers=layers, unembedding=unembedding, cache=cache, flops=batch * (2 * (matrices + unembedding) + scores))


def _baseline_work(params: dict[str, Any], head: config_lib.BaselineConfig, *, batch: int, num_slots: int) -> Work:
    """`head_work` of a baseline. Taking in what was kept, and prompts, is not counted; Medusa's heads, which run together, count one by one."""
    if head.kind == "medusa":
        layers, matrices = _elements(params) // head.num_draft, _matrices(params) // head.num_draft
    else:
        # Of the table only rows are read, until it is the unembedding; fusing taps is a part of taking in.
        own = {name: value for name, value in params.items() if name not in ("embed", "fuse")}
        layers, matrices = _elements(own), _matrices(own)
    unembedding = head.draft_vocab_size * (head.width if head.kind == "standalone" else head.backbone_width)
    attentions, slots = (0 if head.kind == "medusa" else max(head.num_layers, 1)), num_slots * head.head_dim
    cache = batch * head.num_kv_heads * slots * (2 * attentions + (head.pointer_heads > 0))
    scores = slots * (4 * head.num_heads * attentions + 2 * head.pointer_heads * head.num_kv_heads)
    return Work(layers=layers, unembedding=unembedding, cache=cache, flops=batch * (2 * (matrices + unembedding) + scores))


def predict(device: Accelerator, one_token: Work, verify: dict[int, Work], draft: Work) -> dict[str, Any]:
    """Times on `device`, in bfloat16, and the tokens per step from which drafting M gains there.

    Args:
      device: its figures.
      one_token: work of a pass over one token a row.
      verify: the same of a pass over M + 1 tokens, by M.
      draft: of one drafted token.
    """
    alone = device.seconds(one_token)
    steps = []
    for num_draft, work in verify.items():
        verifying, drafting = device.seconds(work), device.seconds(draft.times(num_draft))
        steps.append(
            {
                "num_draft": num_draft,
                "verify_ms": round(verifying * 1e3, 6),
                "draft_ms": round(drafting * 1e3, 6),
                "ratio": round((verifying + drafting) / alone, 4),
            }
        )
    return {
        "name": device.name,
        "gb_per_second": device.gigabytes_per_second,
        "tflop_per_second": device.teraflops,
        "source": device.source,
        "one_token_ms": round(alone * 1e3, 6),
        "steps": steps,
    }


def read_matrix(nbytes: int, width: int, dtype: str) -> Float[Array, "rows width"]:
    """A matrix of about so many bytes, to measure bandwidth with."""
    rows = max(nbytes // (width * jnp.dtype(dtype).itemsize), 1)
    return jnp.full((rows, width), 1 / width, dtype)


@jax.jit
def matvec(matrix: Float[Array, "rows width"], count: Int[Array, ""]) -> Float[Array, " width"]:
    """`count` products of the matrix with a vector, each of which needs the one before."""

    def body(_: Array, vector: Array) -> Array:
        return 0.5 * vector + 0.25 * (matrix @ vector).mean() + 0.1  # goes to 0.4: neither grows nor becomes denormal

    return jax.lax.fori_loop(0, count, body, jnp.ones(matrix.shape[1], matrix.dtype))


def threaded_read(matrix: Array) -> Callable[[], None]:
    """Reads all of an array on the CPU with as many threads as this process may use, and does as little with it as can be."""
    words = np.asarray(matrix).reshape(-1).view(np.uint8)
    words = words[: len(words) // 8 * 8].view(np.int64)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [part for part in np.array_split(words, threads) if len(part)]
    pool = ThreadPoolExecutor(threads)
    return partial(_read_parts, pool, parts)


def _read_parts(pool: ThreadPoolExecutor, parts: list[np.ndarray]) -> None:
    list(pool.map(np.bitwise_or.reduce, parts))


def compiled_cost(compiled: Any) -> dict[str, float] | None:
    """XLA's own count for a compiled program; None where this backend has none.

    A loop's body counts once. Products in column blocks count twice (jax 0.10 on CPU); bytes are as they should be.
    """
    try:
        found = compiled.cost_analysis()
    except Exception:  # not implemented there
        return None
    if isinstance(found, list | tuple):  # one entry a partition in some versions
        found = found[0] if found else None
    if not found or "flops" not in found:
        return None
    return {"flops": float(found["flops"]), "bytes": float(found.get("bytes accessed", 0.0))}


def _elements(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _matrices(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim >= 2)
