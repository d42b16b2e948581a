"""Frozen configuration dataclasses, and the axis letters used everywhere.

Axis letters (einsum strings, type annotations and comments all use these):

    B  batch rows                     N  query heads          V  vocabulary
    T  tokens of this call            K  key/value heads      C  draft vocabulary (candidates)
    S  cache slots                    G  N / K                M  drafted tokens per step
    D  backbone width                 H  head dimension       F  MLP width
    W  width of the MTP head          P  pointer query heads

Every field is checked when the dataclass is made; the error names the field, the value and the rule.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

LayerType = Literal["full", "sliding"]


class ConfigError(ValueError):
    """A field has a value that its rule forbids."""


def _require(condition: bool, name: str, value: Any, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r}: {rule}")


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, value, "must be an integer of at least 1")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Shape and switches of a frozen decoder-only Transformer (Llama family)."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = True
    layer_types: tuple[LayerType, ...] = ()  # one per layer; empty means all "full"
    sliding_window: int | None = None  # slots a "sliding" layer sees, the query's own included
    max_positions: int = 2048  # positions the model was trained for
    dtype: str = "float32"  # of parameters and matrix products

    def __post_init__(self) -> None:
        _require_positive(self, "vocab_size", "width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        _require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, f"must be a multiple of num_kv_heads={self.num_kv_heads}")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even (rotary embedding turns pairs)")
        _require(self.rope_theta > 0, "rope_theta", self.rope_theta, "must be positive")
        _require(self.norm_eps > 0, "norm_eps", self.norm_eps, "must be positive")
        _require(self.dtype in ("float32", "bfloat16", "float16"), "dtype", self.dtype, "must be float32, bfloat16 or float16")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full",) * self.num_layers)
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        _require(len(self.layer_types) == self.num_layers, "layer_types", self.layer_types, f"must name {self.num_layers} layers")
        for kind in self.layer_types:
            _require(kind in ("full", "sliding"), "layer_types", kind, "must be 'full' or 'sliding'")
        if "sliding" in self.layer_types:
            _require(
                isinstance(self.sliding_window, int) and self.sliding_window >= 1,
                "sliding_window",
                self.sliding_window,
                "must be at least 1 when a layer is sliding",
            )

    def window(self, layer: int) -> int | None:
        """Number of slots layer `layer` sees, or None when it sees all."""
        return self.sliding_window if self.layer_types[layer] == "sliding" else None

    def donor(self, kind: LayerType) -> int:
        """Index of the last layer of type `kind`: the one whose K/V a head layer of that type reads."""
        found = [i for i, layer_type in enumerate(self.layer_types) if layer_type == kind]
        _require(bool(found), "donor", kind, f"no such layer in layer_types={self.layer_types}")
        return found[-1]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shape and switches of an MTP head. Everything else it needs comes from the backbone it reads.

    `donors` names, for each head layer, the backbone layer whose keys and values it attends to.
    """

    donors: tuple[int, ...]  # one backbone layer index per head layer
    width: int  # W
    mlp_width: int
    num_heads: int  # query heads of the head's own attention; a multiple of the donor's num_kv_heads
    draft_vocab_size: int  # C: rows of the backbone's unembedding that the head scores
    backbone_width: int  # D; with the next two, the shape this head fits
    backbone_vocab_size: int
    backbone_layers: int
    query_position: Literal["pending", "last"] = "pending"  # RoPE position of every draft query: p+1 or p
    pointer: bool = True  # mix in a copy distribution over the text so far
    pointer_donors: tuple[int, ...] = ()  # backbone layers whose keys the pointer scores; empty means the last of `donors`
    pointer_heads: int = 1  # P: independent pointers, mixed by the gate
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        object.__setattr__(self, "donors", tuple(self.donors))
        object.__setattr__(self, "pointer_donors", tuple(self.pointer_donors))
        _require_positive(
            self, "width", "mlp_width", "num_heads", "draft_vocab_size", "backbone_width", "backbone_vocab_size", "backbone_layers", "pointer_heads"
        )
        _require(len(self.donors) >= 1, "donors", self.donors, "must name at least one backbone layer")
        if self.pointer and not self.pointer_donors:
            object.__setattr__(self, "pointer_donors", (self.donors[-1],))
        for name in ("donors", "pointer_donors"):
            for donor in getattr(self, name):
                _require(0 <= donor < self.backbone_layers, name, donor, f"must be a backbone layer index in 0..{self.backbone_layers - 1}")
        _require(
            self.draft_vocab_size <= self.backbone_vocab_size,
            "draft_vocab_size",
            self.draft_vocab_size,
            f"must not exceed the backbone's vocabulary of {self.backbone_vocab_size}",
        )
        _require(self.query_position in ("pending", "last"), "query_position", self.query_position, "must be 'pending' (p+1) or 'last' (p)")

    @property
    def num_layers(self) -> int:
        return len(self.donors)

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Backbone layers whose K/V this head reads, in ascending order."""
        return tuple(sorted(set(self.donors) | set(self.pointer_donors)))

    def check_fits(self, backbone: BackboneConfig) -> None:
        """Raise ConfigError unless a head of this shape can read a backbone of that shape."""
        _require(self.backbone_width == backbone.width, "backbone_width", self.backbone_width, f"this backbone's width is {backbone.width}")
        _require(
            self.backbone_vocab_size == backbone.vocab_size,
            "backbone_vocab_size",
            self.backbone_vocab_size,
            f"this backbone's vocabulary is {backbone.vocab_size}",
        )
        _require(self.backbone_layers == backbone.num_layers, "backbone_layers", self.backbone_layers, f"this backbone has {backbone.num_layers} layers")
        _require(
            self.num_heads % backbone.num_kv_heads == 0, "num_heads", self.num_heads, f"must be a multiple of the donor's num_kv_heads={backbone.num_kv_heads}"
        )


def head_config_for(backbone: BackboneConfig, **changes: Any) -> HeadConfig:
    """The default head for `backbone`: one layer on the last full-attention layer (or the last layer), as wide as the backbone."""
    kind: LayerType = "full" if "full" in backbone.layer_types else "sliding"
    defaults: dict[str, Any] = dict(
        donors=(backbone.donor(kind),),
        width=backbone.width,
        mlp_width=backbone.mlp_width,
        num_heads=backbone.num_heads,
        draft_vocab_size=min(8192, backbone.vocab_size),
        backbone_width=backbone.width,
        backbone_vocab_size=backbone.vocab_size,
        backbone_layers=backbone.num_layers,
        norm_eps=backbone.norm_eps,
    )
    config = HeadConfig(**(defaults | changes))
    config.check_fits(backbone)
    return config


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What one call of the decoder may produce."""

    max_new_tokens: int = 128  # budget per row, stop token included
    num_draft: int = 4  # M; 0 only for vanilla decoding
    stop_tokens: tuple[int, ...] = ()  # any of these ends a row; it is kept as the row's last token
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # sample among the k most probable tokens; 0 is no limit
    top_p: float = 1.0  # sample among the most probable tokens that together reach this probability
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        _require_positive(self, "max_new_tokens")
        _require(isinstance(self.num_draft, int) and self.num_draft >= 0, "num_draft", self.num_draft, "must be an integer of at least 0")
        _require(self.temperature >= 0, "temperature", self.temperature, "must not be negative; 0 is greedy")
        _require(self.top_k >= 0, "top_k", self.top_k, "must not be negative; 0 is no limit")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run of a head. Times are in optimizer steps, lengths in tokens."""

    steps: int = 1000  # optimizer steps of the whole run
    batch_size: int = 16  # sequences per step
    max_length: int = 320  # tokens per sequence; longer ones are cut at the end
    num_draft: int = 4  # M: draft steps unrolled, as deployed
    step_decay: float = 0.8  # weight of draft step k is step_decay ** (k - 1), normalised
    rows: Literal["all", "answer"] = "all"  # which rows carry loss; soft labels exist on prompts too
    rows_per_sequence: int = 64  # rows drawn from each sequence and step; 0 takes all
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon needs a higher learning rate (5e-3) and fewer steps
    learning_rate: float = 1e-3  # the highest, after warm-up
    warmup_fraction: float = 0.04  # share of the steps over which the learning rate rises from 0
    final_fraction: float = 0.1  # learning rate at the end of the cosine, as a fraction of learning_rate
    weight_decay: float = 0.01  # of matrices only
    clip_norm: float = 1.0  # gradients are scaled down to this global norm
    seed: int = 0  # of initialisation and data order
    checkpoint_every: int = 200  # steps between checkpoints

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "batch_size", "max_length", "num_draft", "checkpoint_every")
        _require(self.max_length >= self.num_draft + 3, "max_length", self.max_length, f"must be at least num_draft + 3 = {self.num_draft + 3}")
        _require(0 < self.step_decay <= 1, "step_decay", self.step_decay, "must be in (0, 1]")
        _require(self.rows in ("all", "answer"), "rows", self.rows, "must be 'all' or 'answer'")
        _require(self.rows_per_sequence >= 0, "rows_per_sequence", self.rows_per_sequence, "must not be negative; 0 takes all rows")
        _require(self.optimizer in ("adamw", "muon"), "optimizer", self.optimizer, "must be 'adamw' or 'muon'")
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "must be positive")
        _require(0 <= self.warmup_fraction < 1, "warmup_fraction", self.warmup_fraction, "must be in [0, 1)")
        _require(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "must be in [0, 1]")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must not be negative")
        _require(self.clip_norm > 0, "clip_norm", self.clip_norm, "must be positive")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON-ready dict of a config dataclass."""
    return dataclasses.asdict(config)


def from_dict(kind: type, values: dict[str, Any], *, where: str) -> Any:
    """Build a config dataclass from `values`; unknown or missing fields are errors that name `where`."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r} for {kind.__name__}")
    missing = sorted(name for name, f in known.items() if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
    if missing:
        raise ConfigError(f"{where}: field {missing[0]!r} of {kind.__name__} is missing")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


__all__ = [
    "BackboneConfig",
    "ConfigError",
    "DecodeConfig",
    "HeadConfig",
    "TrainConfig",
    "from_dict",
    "head_config_for",
    "to_dict",
]
