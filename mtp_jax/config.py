"""Frozen configuration dataclasses, and the axis letters used everywhere.

Axis letters (einsum strings, type annotations and comments all use these):

    B  batch rows                     N  query heads          V  vocabulary
    T  tokens of this call            K  key/value heads      C  draft vocabulary (candidates)
    S  cache slots                    G  N / K                M  drafted tokens per step
    D  backbone width                 H  head dimension       F  MLP width
    W  width of the MTP head          P  pointer query heads  E  D, and D more for each tap of the backbone

Every field is checked when the dataclass is made; the error names the field, the value and the rule.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

LayerType = Literal["full", "sliding"]
BaselineKind = Literal["standalone", "eagle", "eagle3", "deepseek", "own_cache", "medusa"]
DrafterName = Literal["mtp", "prompt_lookup", "hybrid", "standalone", "eagle", "eagle3", "deepseek", "own_cache", "medusa", "early_exit", "jacobi"]
MAX_SEED = 2**32 - 1  # what a random key holds of a seed
HEADLESS: tuple[DrafterName, ...] = ("prompt_lookup", "early_exit", "jacobi")  # drafters without anything trained
# num_draft and short_drafts that suit each: a head is right about four times in a row at best, a copy for as long as it goes on.
DRAFT_LENGTHS: dict[DrafterName, tuple[int, tuple[int, ...]]] = {
    "mtp": (4, ()),
    "prompt_lookup": (10, (0,)),
    "hybrid": (10, (4,)),
    "standalone": (4, ()),
    "eagle": (4, ()),
    "eagle3": (4, ()),
    "deepseek": (4, ()),
    "own_cache": (4, ()),
    "medusa": (4, ()),
    "early_exit": (4, ()),
    "jacobi": (8, ()),
}
AcceptRule = Literal["match", "rejection"]
Activation = Literal["silu", "gelu_tanh"]
LossName = Literal["hard_ce", "soft_ce", "kl", "reverse_kl", "tv", "lk", "lk_hybrid", "hidden"]
AfterMiss = Literal["keep", "drop", "weigh"]
Normalise = Literal["tokens", "sequences"]


class ConfigError(ValueError):
    """A field has a value that its rule forbids."""


def _require(condition: bool, name: str, value: Any, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r}: {rule}")


def _require_seed(seed: Any) -> None:
    _require(isinstance(seed, int) and 0 <= seed <= MAX_SEED, "seed", seed, f"must be an integer in 0..{MAX_SEED}")


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(isinstance(value, int) and not isinstance(value, bool) and value >= 1, name, value, "must be an integer of at least 1")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for texts longer than those of the first training.

    "linear" divides all of them by `factor` (Chen et al. 2023). "llama3" divides those whose wavelength exceeds
    original_positions / low_frequency_factor, leaves those below original_positions / high_frequency_factor, and
    interpolates between the two (Llama 3.1).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0  # this and the next two: "llama3" only
    high_frequency_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        _require(self.kind in ("linear", "llama3"), "rope_scaling.kind", self.kind, "must be 'linear' or 'llama3'")
        _require(self.factor > 0, "rope_scaling.factor", self.factor, "must be positive")
        _require(self.original_positions >= 1, "rope_scaling.original_positions", self.original_positions, "must be at least 1")
        _require(
            0 < self.low_frequency_factor < self.high_frequency_factor,
            "rope_scaling.low_frequency_factor",
            self.low_frequency_factor,
            f"must be positive and below high_frequency_factor={self.high_frequency_factor}",
        )


class Rope(NamedTuple):
    """Rotary embedding of one layer, in the order that `layers.rotate` takes it."""

    theta: float
    fraction: float = 1.0  # share of the pairs that turn
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Shape and switches of a frozen decoder-only Transformer.

    The first block of fields describes a Llama. Each switch after it is off by default; the families that need it are
    named beside it. What differs by layer has a method that takes the layer's index: `window`, `head_dim_of`, ...
    """

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

    activation: Activation = "silu"  # of the gated MLP
    attention_bias: bool = False  # of the query, key and value products (Qwen 2)
    output_bias: bool = False  # of the product after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys, before rotation (Qwen 3, Gemma 3 and 4)
    v_norm: bool = False  # the same without a scale on values (Gemma 4)
    sandwich_norms: bool = False  # a norm after attention and after the MLP too, before each is added (Gemma)
    embedding_scale: float = 1.0  # embeddings are multiplied with it, rounded to dtype (Gemma)
    attention_scale: float | None = None  # scores are multiplied with it; None is head_dim ** -0.5
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    final_softcap: float | None = None  # so do logits (Gemma 2 and 4)
    local_rope_theta: float | None = None  # of sliding layers, which then have neither scaling nor fraction; None: as full ones
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0  # share of the pairs of a head that turn, the fastest ones (Gemma 4)
    full_head_dim: int | None = None  # head_dim of full layers, where it differs (Gemma 4)
    full_kv_heads: int | None = None  # num_kv_heads of full layers, where it differs (Gemma 4)
    keys_are_values: bool = False  # full layers make values from the key product, without rotation (Gemma 4)
    shared_kv_layers: int = 0  # so many of the last layers read the K/V of an earlier one and have none (Gemma 4)
    wide_shared_mlp: bool = False  # those layers' MLP is twice as wide (Gemma 4)
    per_layer_input_width: int = 0  # width of the embedding that every layer adds for itself; 0 is none (Gemma 4)
    per_layer_vocab_size: int | None = None  # rows of its table; None is vocab_size
    layer_scalars: bool = False  # each layer's output is multiplied with a stored number (Gemma 4)

    def __post_init__(self) -> None:
        _require_positive(self, "vocab_size", "width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions")
        _require_positive(self, *(name for name in ("full_head_dim", "full_kv_heads", "per_layer_vocab_size") if getattr(self, name) is not None))
        for name in ("num_kv_heads", "full_kv_heads"):
            heads = getattr(self, name)
            _require(heads is None or self.num_heads % heads == 0, "num_heads", self.num_heads, f"must be a multiple of {name}={heads}")
        for name in ("head_dim", "full_head_dim"):
            _require((getattr(self, name) or 0) % 2 == 0, name, getattr(self, name), "must be even (rotary embedding turns pairs)")
        for name in ("rope_theta", "norm_eps", "embedding_scale"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in ("attention_scale", "attention_softcap", "final_softcap", "local_rope_theta"):
            _require(getattr(self, name) is None or getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        _require(0 < self.rotary_fraction <= 1, "rotary_fraction", self.rotary_fraction, "must be in (0, 1]")
        _require(self.dtype in ("float32", "bfloat16", "float16"), "dtype", self.dtype, "must be float32, bfloat16 or float16")
        _require(self.activation in ("silu", "gelu_tanh"), "activation", self.activation, "must be 'silu' or 'gelu_tanh'")
        _require(self.per_layer_input_width >= 0, "per_layer_input_width", self.per_layer_input_width, "must not be negative; 0 is none")
        if isinstance(self.rope_scaling, dict):  # as read from JSON
            object.__setattr__(self, "rope_scaling", from_dict(RopeScaling, self.rope_scaling, where="rope_scaling"))
        self._check_layers()

    def _check_layers(self) -> None:
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
        _require(0 <= self.shared_kv_layers < self.num_layers, "shared_kv_layers", self.shared_kv_layers, f"must be in 0..{self.num_layers - 1}")
        ownerless = sorted(set(self.layer_types) - set(self.layer_types[: self.num_kv_layers]))
        _require(not ownerless, "shared_kv_layers", self.shared_kv_layers, f"leaves no {ownerless} layer that owns its K/V")

    @property
    def num_kv_layers(self) -> int:
        """Layers that own their K/V: 0..num_kv_layers-1. Only these have cache slots."""
        return self.num_layers - self.shared_kv_layers

    def window(self, layer: int) -> int | None:
        """Number of slots layer `layer` sees, or None when it sees all."""
        return self.sliding_window if self.layer_types[layer] == "sliding" else None

    def head_dim_of(self, layer: int) -> int:
        """H of layer `layer`."""
        return self.full_head_dim or self.head_dim if self.layer_types[layer] == "full" else self.head_dim

    def kv_heads_of(self, layer: int) -> int:
        """K of layer `layer`."""
        return self.full_kv_heads or self.num_kv_heads if self.layer_types[layer] == "full" else self.num_kv_heads

    def mlp_width_of(self, layer: int) -> int:
        """F of layer `layer`."""
        return self.mlp_width * (2 if self.wide_shared_mlp and layer >= self.num_kv_layers else 1)

    def attention_scale_of(self, layer: int) -> float:
        """What layer `layer` multiplies its scores with."""
        return self.head_dim_of(layer) ** -0.5 if self.attention_scale is None else self.attention_scale

    def values_are_keys(self, layer: int) -> bool:
        """Whether layer `layer` has no value product."""
        return self.keys_are_values and self.layer_types[layer] == "full"

    def rope(self, layer: int) -> Rope:
        """Rotary embedding of layer `layer`."""
        if self.layer_types[layer] == "sliding" and self.local_rope_theta is not None:
            return Rope(self.local_rope_theta)
        return Rope(self.rope_theta, self.rotary_fraction, self.rope_scaling)

    def kv_owner(self, layer: int) -> int:
        """Index of the layer whose K/V layer `layer` reads: its own, or the last owner of its type."""
        return layer if layer < self.num_kv_layers else self.donor(self.layer_types[layer])

    def donor(self, kind: LayerType) -> int:
        """Index of the last layer of type `kind` that owns its K/V: the one a head layer of that type reads."""
        found = [i for i, layer_type in enumerate(self.layer_types[: self.num_kv_layers]) if layer_type == kind]
        _require(bool(found), "donor", kind, f"no such layer in layer_types={self.layer_types}")
        return found[-1]

    def identity(self) -> dict[str, Any]:
        """What tells two backbones apart, JSON-ready: every field but dtype, leaving out switches that are off.

        A model's identity therefore stays as it is when this class gets a new switch.
        """
        values = to_dict(self)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name != "dtype" and (name in _ALWAYS_IN_IDENTITY or value != defaults[name])}


_ALWAYS_IN_IDENTITY = frozenset(
    "vocab_size width mlp_width num_layers num_heads num_kv_heads head_dim rope_theta norm_eps tied_embeddings layer_types sliding_window max_positions".split()
)


_LATER = {"omit": True}  # of a field that files leave out while it has its default, so that older files and new ones are the same


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shape and switches of an MTP head. Everything else it needs comes from the backbone it reads.

    `donors` names, for each head layer, the backbone layer whose keys and values it attends to.

    The last block of fields tells the form of Gemma 4's assistants from the light form, which is the default (`input_norms` aside, which
    `head_config_for` has on: files of before it lack it and have none). Draft entry c
    is token draft_ids[c]; with "centroids", entries lie cluster by cluster, draft_vocab_size / num_centroids to each.
    """

    donors: tuple[int, ...]  # one backbone layer index per head layer
    width: int  # W
    mlp_width: int
    num_heads: int  # query heads of the head's own attention; a multiple of the donor's num_kv_heads
    draft_vocab_size: int  # C: tokens the head scores
    backbone_width: int  # D; with the next two, the shape this head fits
    backbone_vocab_size: int
    backbone_layers: int
    query_position: Literal["pending", "last"] = "pending"  # RoPE position of every draft query: p+1 or p
    pointer: bool = True  # mix in a copy distribution over the text so far
    pointer_donors: tuple[int, ...] = ()  # backbone layers whose keys the pointer scores; empty means the last of `donors`
    pointer_heads: int = 1  # P: independent pointers, mixed by the gate
    norm_eps: float = 1e-5

    input_norms: bool = field(default=False, metadata=_LATER)  # a norm for either input; that of the hidden state is the same in every draft step
    norms: Literal["pre", "sandwich"] = field(default="pre", metadata=_LATER)  # "sandwich": after attention and MLP too, before each is added
    layer_scalars: bool = field(default=False, metadata=_LATER)  # each layer's output is multiplied with a learnt number
    # Rows that logits come from: the backbone's unembedding, the head's own table [C, W], or that table's best clusters.
    output: Literal["backbone", "own", "centroids"] = field(default="backbone", metadata=_LATER)
    num_centroids: int = field(default=0, metadata=_LATER)  # clusters of the table; this and the next: "centroids" only
    top_centroids: int = field(default=0, metadata=_LATER)  # clusters whose tokens are scored

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
        _require(self.norms in ("pre", "sandwich"), "norms", self.norms, "must be 'pre' or 'sandwich'")
        self._check_output()

    def _check_output(self) -> None:
        _require(self.output in ("backbone", "own", "centroids"), "output", self.output, "must be 'backbone', 'own' or 'centroids'")
        _require(not self.pointer or self.output == "backbone", "pointer", self.pointer, f"must be off with output={self.output!r}")
        if self.output != "centroids":
            for name in ("num_centroids", "top_centroids"):
                _require(getattr(self, name) == 0, name, getattr(self, name), f"must be 0 with output={self.output!r}")
            return
        _require_positive(self, "num_centroids", "top_centroids")
        _require(self.draft_vocab_size % self.num_centroids == 0, "num_centroids", self.num_centroids, f"must divide draft_vocab_size={self.draft_vocab_size}")
        _require(self.top_centroids <= self.num_centroids, "top_centroids", self.top_centroids, f"must not exceed num_centroids={self.num_centroids}")

    @property
    def num_layers(self) -> int:
        return len(self.donors)

    @property
    def drafter(self) -> DrafterName:
        """Who drafts with such a head; the hybrid can, too."""
        return "mtp"

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Backbone layers whose K/V this head reads, in ascending order."""
        return tuple(sorted(set(self.donors) | set(self.pointer_donors)))

    @property
    def taps(self) -> tuple[int, ...]:
        """Inner states of the backbone that it reads: none."""
        return ()

    def check_fits(self, backbone: BackboneConfig) -> None:
        """Raise ConfigError unless a head of this shape can read a backbone of that shape."""
        _check_backbone(self, backbone)
        for name in ("donors", "pointer_donors"):
            for donor in getattr(self, name):
                rule = f"layer {donor} has no K/V of its own; the last layer that has is {backbone.num_kv_layers - 1}"
                _require(donor < backbone.num_kv_layers, name, donor, rule)
        for donor in self.donors:
            heads = backbone.kv_heads_of(donor)
            _require(self.num_heads % heads == 0, "num_heads", self.num_heads, f"must be a multiple of the donor's num_kv_heads={heads}")


def _check_backbone(head: HeadConfig | BaselineConfig, backbone: BackboneConfig) -> None:
    """Raise ConfigError unless `backbone` has the shape that the head was made for."""
    _require(head.backbone_width == backbone.width, "backbone_width", head.backbone_width, f"this backbone's width is {backbone.width}")
    _require(
        head.backbone_vocab_size == backbone.vocab_size,
        "backbone_vocab_size",
        head.backbone_vocab_size,
        f"this backbone's vocabulary is {backbone.vocab_size}",
    )
    _require(head.backbone_layers == backbone.num_layers, "backbone_layers", head.backbone_layers, f"this backbone has {backbone.num_layers} layers")


def head_config_for(backbone: BackboneConfig, **changes: Any) -> HeadConfig:
    """The default head for `backbone`: one layer on the last full-attention layer (or the last layer), as wide as the backbone, and a pointer
    over the keys of four layers (README, A recipe): the last of the donors and, spread below it, others of its kind."""
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
        input_norms=True,
    )
    chosen: dict[str, Any] = defaults | changes
    last = chosen["donors"][-1] if chosen["donors"] else -1
    if chosen.get("pointer", True) and 0 <= last < backbone.num_layers:
        # of one kind, since a slot must be visible to all of them
        alike = [layer for layer in range(last + 1) if backbone.layer_types[layer] == backbone.layer_types[last]]
        chosen = {"pointer_donors": tuple(sorted({alike[-(-part * len(alike) // 4) - 1] for part in (1, 2, 3, 4)}))} | chosen
    config = HeadConfig(**chosen)
    config.check_fits(backbone)
    return config


def assistant_head_config_for(backbone: BackboneConfig, width: int = 256, **changes: Any) -> HeadConfig:
    """A head in the form of Gemma 4's assistants: three layers on the last sliding layer and one on the last full layer that own
    their K/V (all four on one where the backbone has one type), sandwich norms, layer scalars, its own table over all tokens."""
    kinds: tuple[LayerType, ...] = ("sliding", "sliding", "sliding", "full")
    present = set(backbone.layer_types)
    donors = tuple(backbone.donor(kind if kind in present else min(present)) for kind in kinds)
    chosen = changes.get("donors", donors)
    heads = math.lcm(*(backbone.kv_heads_of(donor) for donor in chosen if 0 <= donor < backbone.num_layers))
    defaults: dict[str, Any] = dict(
        donors=donors,
        width=width,
        mlp_width=8 * width,
        num_heads=heads * -(-4 // heads),
        draft_vocab_size=backbone.vocab_size,
        pointer=False,
        norms="sandwich",
        layer_scalars=True,
        output="own",
        input_norms=False,
    )
    return head_config_for(backbone, **(defaults | changes))


_LAYER = ("width", "mlp_width", "num_heads", "num_kv_heads", "head_dim")
_PARTS: dict[BaselineKind, tuple[str, ...]] = {
    "standalone": (*_LAYER, "num_layers"),
    "eagle": _LAYER,
    "eagle3": _LAYER,
    "deepseek": _LAYER,
    "own_cache": _LAYER,
    "medusa": ("num_draft",),
}


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Shape of a draft model that the MTP head is compared with (models/baselines.py). None of them reads the backbone's K/V.

    A number that a kind has no use for is 0.
    """

    kind: BaselineKind
    draft_vocab_size: int  # C: tokens it scores
    backbone_width: int  # D; with the next two, the shape this draft model fits
    backbone_vocab_size: int
    backbone_layers: int
    width: int = 0  # W; of eagle, eagle3 and deepseek, that of the backbone
    mlp_width: int = 0
    num_heads: int = 0  # this and the next two: of its own attention
    num_kv_heads: int = 0
    head_dim: int = 0
    num_layers: int = 0  # standalone only; others have one
    num_draft: int = 0  # medusa only: heads it has, one per drafted token
    pointer_heads: int = 0  # own_cache only: independent pointers; 0 is none
    norm_eps: float = 1e-5
    taps: tuple[int, ...] = field(default=(), metadata=_LATER)  # eagle3 only: it reads the backbone's state after so many layers, for each number

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        _require(self.kind in get_args(BaselineKind), "kind", self.kind, f"must be one of {', '.join(get_args(BaselineKind))}")
        _require_positive(self, "draft_vocab_size", "backbone_width", "backbone_vocab_size", "backbone_layers", *_PARTS[self.kind])
        for name in {"num_layers", "num_draft", *_LAYER} - set(_PARTS[self.kind]):
            _require(getattr(self, name) == 0, name, getattr(self, name), f"must be 0: {self.kind} has no such part")
        _require(self.pointer_heads >= 0, "pointer_heads", self.pointer_heads, "must not be negative; 0 is none")
        _require(self.pointer_heads == 0 or self.kind == "own_cache", "pointer_heads", self.pointer_heads, f"must be 0: {self.kind} has no pointer")
        if self.kind != "medusa":
            _require(self.num_heads % self.num_kv_heads == 0, "num_heads", self.num_heads, f"must be a multiple of num_kv_heads={self.num_kv_heads}")
            _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even (rotary embedding turns pairs)")
        if self.kind == "eagle3":
            rule = f"must be ascending numbers of backbone layers, each in 1..{self.backbone_layers}"
            ascending = self.taps == tuple(sorted(set(self.taps)))
            _require(len(self.taps) > 0 and ascending and 1 <= self.taps[0] and self.taps[-1] <= self.backbone_layers, "taps", self.taps, rule)
        else:
            _require(not self.taps, "taps", self.taps, f"must be empty: {self.kind} reads the backbone's last state alone, or none")
        if self.kind in ("eagle", "eagle3", "deepseek"):  # their output goes into the backbone's unembedding
            _require(self.width == self.backbone_width, "width", self.width, f"must be the backbone's, {self.backbone_width}, with kind={self.kind!r}")
        size, all_tokens = self.draft_vocab_size, self.backbone_vocab_size
        _require(size <= all_tokens, "draft_vocab_size", size, f"must not exceed the backbone's vocabulary of {all_tokens}")

    @property
    def drafter(self) -> DrafterName:
        """Who drafts with it."""
        return self.kind

    @property
    def donors(self) -> tuple[int, ...]:
        """Backbone layers whose K/V it attends to: none."""
        return ()

    @property
    def layers_read(self) -> tuple[int, ...]:
        """Backbone layers whose keys it reads: none."""
        return ()

    def check_fits(self, backbone: BackboneConfig) -> None:
        """Raise ConfigError unless a draft model of this shape can read a backbone of that shape."""
        _check_backbone(self, backbone)

    def check_trains(self, training: TrainConfig) -> None:
        """Raise ConfigError for a run that a draft model of this kind can't be trained in."""
        _require(training.mesh == (1, 1, 1), "mesh", training.mesh, f"must be (1, 1, 1): {self.kind} is trained on one device")
        if self.kind == "medusa":
            _require(training.num_draft <= self.num_draft, "num_draft", training.num_draft, f"must be at most {self.num_draft}, the heads there are")
        hidden = "hidden" in dict(loss_terms(training.loss))
        rule = f"must not have the term hidden: {self.kind} does not estimate the backbone's hidden states"
        _require(self.kind not in ("standalone", "eagle3") or not hidden, "loss", training.loss, rule)


def baseline_config_for(backbone: BackboneConfig, kind: BaselineKind, **changes: Any) -> BaselineConfig:
    """The default of its kind: one layer as wide as the backbone's, with heads as its have; a standalone model two, half as wide, and over all
    tokens; Medusa four heads; eagle3 the taps of its authors' code, which a backbone of seven layers or more has."""
    defaults: dict[str, Any] = dict(
        kind=kind,
        draft_vocab_size=backbone.vocab_size if kind == "standalone" else min(8192, backbone.vocab_size),
        backbone_width=backbone.width,
        backbone_vocab_size=backbone.vocab_size,
        backbone_layers=backbone.num_layers,
        norm_eps=backbone.norm_eps,
    )
    if kind == "medusa":
        defaults |= {"num_draft": 4}
    else:
        share = 2 if kind == "standalone" else 1
        defaults |= dict(
            width=backbone.width // share,
            mlp_width=backbone.mlp_width // share,
            num_heads=backbone.num_heads,
            num_kv_heads=backbone.num_kv_heads,
            head_dim=backbone.head_dim,
        )
    if kind == "standalone":
        defaults |= {"num_layers": 2}
    if kind == "own_cache":
        defaults |= {"pointer_heads": 1}
    if kind == "eagle3":
        defaults |= {"taps": (2, backbone.num_layers // 2, backbone.num_layers - 3)}
    config = BaselineConfig(**(defaults | changes))
    config.check_fits(backbone)
    return config


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What one call of the decoder may produce."""

    max_new_tokens: int = 128  # budget per row, stop token included
    num_draft: int = 4  # M; 0 only for vanilla decoding
    stop_tokens: tuple[int, ...] = ()  # any of these ends a row; it is kept as the row's last token
    stop_strings: tuple[str, ...] = ()  # any of these in the new text ends a row; its text is cut just before
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # sample among the k most probable tokens; 0 is no limit
    top_p: float = 1.0  # sample among the most probable tokens that together reach this probability
    min_p: float = 0.0  # sample among the tokens at least this share as probable as the most probable one
    accept: AcceptRule = "match"  # when sampling, a draft is kept if it is the backbone's own sample, or by the ratio of probabilities (decoding/verify.py)
    seed: int = 0
    # Slots of layers with a window: as many as the text has tokens, or a ring of little more than the window (models/cache.py).
    window_cache: Literal["full", "ring"] = "full"
    min_confidence: float = 0.0  # propose no more once the product of the drafts' probabilities is below; 0 is always num_draft
    # Steps whose proposals are no longer than one of these (ascending, below num_draft) have a verify pass of that many drafts.
    short_drafts: tuple[int, ...] = ()
    exit_layer: int = 0  # layers of the backbone that the early_exit drafter runs; 0 is half of them
    keep_logits: bool = False  # keep the logits that every new token was chosen from (memory: 4 bytes x vocabulary x slots a row)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
        _require(not isinstance(self.stop_strings, str), "stop_strings", self.stop_strings, "must be a sequence of strings, not one string")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        _require(
            all(isinstance(s, str) and s for s in self.stop_strings), "stop_strings", self.stop_strings, "every one must be a string of at least one character"
        )
        for text in self.stop_strings:
            lone = any("\ud800" <= letter <= "\udfff" for letter in text)
            _require(not lone, "stop_strings", text, "must be Unicode text, and half of a surrogate pair is none")
        _require_positive(self, "max_new_tokens")
        _require(isinstance(self.num_draft, int) and self.num_draft >= 0, "num_draft", self.num_draft, "must be an integer of at least 0")
        _require(self.temperature >= 0, "temperature", self.temperature, "must not be negative; 0 is greedy")
        _require(self.top_k >= 0, "top_k", self.top_k, "must not be negative; 0 is no limit")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        _require(0 <= self.min_confidence <= 1, "min_confidence", self.min_confidence, "must be in [0, 1]; 0 always drafts num_draft tokens")
        object.__setattr__(self, "short_drafts", tuple(self.short_drafts))
        bounds = (-1, *self.short_drafts, self.num_draft)
        ascending = all(one < other for one, other in zip(bounds, bounds[1:], strict=False))
        _require(
            not self.short_drafts or ascending, "short_drafts", self.short_drafts, f"must be ascending numbers from 0 to num_draft - 1 = {self.num_draft - 1}"
        )
        _require(isinstance(self.exit_layer, int) and self.exit_layer >= 0, "exit_layer", self.exit_layer, "must be an integer of at least 0")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in [0, 1]; 0 is no limit")
        _require(self.window_cache in ("full", "ring"), "window_cache", self.window_cache, "must be 'full' or 'ring'")
        _require(self.accept in get_args(AcceptRule), "accept", self.accept, f"must be one of {', '.join(get_args(AcceptRule))}")
        _require_seed(self.seed)

    @property
    def by_rejection(self) -> bool:
        """Whether drafts are kept by the ratio of probabilities; greedy decoding has one rule only."""
        return self.accept == "rejection" and self.temperature > 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run of a head. Times are in optimizer steps, lengths in tokens."""

    steps: int = 1000  # optimizer steps of the whole run
    batch_size: int = 16  # sequences per step
    max_length: int = 320  # tokens per sequence; longer ones are cut at the end
    num_draft: int = 4  # M: draft steps unrolled, as deployed
    step_decay: float = 0.8  # weight of draft step k is step_decay ** (k - 1), normalised
    loss: tuple[str, ...] = ("soft_ce",)  # NAME or NAME:WEIGHT each, added up: hard_ce soft_ce kl reverse_kl tv lk lk_hybrid hidden (training/objectives.py)
    after_miss: AfterMiss = "keep"  # rows behind a draft that misses the text: keep, drop, or weigh by the probability to get there (training/loss.py)
    normalise: Normalise = "tokens"  # the mean is over all rows of a batch, or over each sequence's rows first and then over sequences
    rows: Literal["all", "answer"] = "all"  # which rows carry loss; soft labels exist on prompts too
    rows_per_sequence: int = 64  # rows drawn from each sequence and step; 0 takes all
    rows_per_chunk: int = 0  # rows of each sequence whose draft logits are in memory at a time (slower, same result); 0 is all of them
    remat: bool = False  # compute draft steps again in the backward pass instead of keeping their arrays (slower, same result)
    accumulate: int = 1  # parts of a batch that are worked on one after the other (slower, same result)
    mesh: tuple[int, int, int] = (1, 1, 1)  # devices along data, fsdp and tensor (training/sharding.py)
    optimizer: Literal["muon", "adamw"] = "muon"  # muon (optax.contrib) learns in far fewer steps (README, A recipe)
    learning_rate: float = 2e-2  # the highest, after warm-up; adamw wants about 1e-3
    warmup_fraction: float = 0.04  # share of the steps over which the learning rate rises from 0
    final_fraction: float = 0.1  # learning rate at the end of the cosine, as a fraction of learning_rate
    weight_decay: float = 0.01  # of matrices only
    clip_norm: float = 1.0  # gradients are scaled down to this global norm
    seed: int = 0  # of initialisation and data order
    checkpoint_every: int = 200  # steps between checkpoints

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "batch_size", "max_length", "num_draft", "accumulate", "checkpoint_every")
        object.__setattr__(self, "mesh", tuple(self.mesh))
        sizes = len(self.mesh) == 3 and all(isinstance(size, int) and size >= 1 for size in self.mesh)
        _require(sizes, "mesh", self.mesh, "must be three integers of at least 1: devices along data, fsdp and tensor")
        parts = self.accumulate * self.mesh[0] * self.mesh[1]
        rule = f"must be a multiple of accumulate * data * fsdp = {self.accumulate} * {self.mesh[0]} * {self.mesh[1]} = {parts}"
        _require(self.batch_size % parts == 0, "batch_size", self.batch_size, rule)
        _require(self.max_length >= self.num_draft + 3, "max_length", self.max_length, f"must be at least num_draft + 3 = {self.num_draft + 3}")
        _require(0 < self.step_decay <= 1, "step_decay", self.step_decay, "must be in (0, 1]")
        _require(self.rows in ("all", "answer"), "rows", self.rows, "must be 'all' or 'answer'")
        _require(self.rows_per_sequence >= 0, "rows_per_sequence", self.rows_per_sequence, "must not be negative; 0 takes all rows")
        _require(self.rows_per_chunk >= 0, "rows_per_chunk", self.rows_per_chunk, "must not be negative; 0 is all rows at once")
        _require(isinstance(self.loss, (tuple, list)), "loss", self.loss, "must be a sequence of terms, as ('soft_ce',)")
        object.__setattr__(self, "loss", tuple(self.loss))
        loss_terms(self.loss)
        for name, kind in (("after_miss", AfterMiss), ("normalise", Normalise)):
            _require(getattr(self, name) in get_args(kind), name, getattr(self, name), f"must be one of {', '.join(get_args(kind))}")
        _require(self.optimizer in ("muon", "adamw"), "optimizer", self.optimizer, "must be 'muon' or 'adamw'")
        _require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "must be positive and finite")
        _require(0 <= self.warmup_fraction < 1, "warmup_fraction", self.warmup_fraction, "must be in [0, 1)")
        _require(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "must be in [0, 1]")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must not be negative")
        _require(self.clip_norm > 0, "clip_norm", self.clip_norm, "must be positive")
        _require_seed(self.seed)


def loss_terms(loss: tuple[str, ...]) -> tuple[tuple[LossName, float], ...]:
    """Names and weights of TrainConfig.loss: ("tv:0.9", "soft_ce") is (("tv", 0.9), ("soft_ce", 1.0))."""
    terms: list[tuple[LossName, float]] = []
    for term in loss:
        name, colon, number = str(term).partition(":")
        _require(name in get_args(LossName), "loss", term, f"must be NAME or NAME:WEIGHT with NAME one of {', '.join(get_args(LossName))}")
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            weight = math.nan
        _require(0 < weight < math.inf, "loss", term, "its weight must be a positive number")
        _require(name not in dict(terms), "loss", loss, f"must name {name} once")
        terms.append((cast(LossName, name), weight))
    _require(bool(terms), "loss", loss, "must have at least one term")
    return tuple(terms)


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON-ready dict of a config dataclass."""
    omitted = {f.name for f in dataclasses.fields(config) if f.metadata.get("omit") and getattr(config, f.name) == f.default}
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in omitted}


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
    "BaselineConfig",
    "ConfigError",
    "DRAFT_LENGTHS",
    "HEADLESS",
    "DecodeConfig",
    "HeadConfig",
    "Rope",
    "RopeScaling",
    "TrainConfig",
    "assistant_head_config_for",
    "baseline_config_for",
    "from_dict",
    "head_config_for",
    "loss_terms",
    "to_dict",
]
