"""Trained heads on disk: a folder with head.safetensors (parameters and draft vocabulary) and head.json (everything else; the config of a
baseline has its `kind`).

Folders in the layout of Gemma 4's assistants load as heads, too; see assistant.py.

head.json is written last and holds the SHA-256 of head.safetensors, so a folder that was cut short, or whose two files
don't belong together, is refused rather than read. A head only makes sense on the backbone it was trained on; its
fingerprint is in head.json and is compared on loading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mtp_jax import config as config_lib
from mtp_jax.checkpoints import errors
from mtp_jax.checkpoints.hf import read_json

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone

FORMAT = 1  # of head.json; raised when an older reader would misread it
TENSORS, RECORD = "head.safetensors", "head.json"
SHIPPED = Path(__file__).resolve().parent.parent / "heads"  # heads that come with the package, one folder each
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class LoadedHead:
    """A trained head."""

    name: str
    config: config_lib.HeadConfig | config_lib.BaselineConfig
    params: dict[str, Any]  # nested dict of float32 arrays in the plain layout; shapes from `models.forms.param_shapes`
    draft_ids: np.ndarray  # int32 [C]: draft vocabulary entry -> token id, each id once
    fingerprint: str  # of the backbone it was trained on
    backbone_name: str = ""  # for people; the fingerprint decides
    card: dict[str, Any] = field(default_factory=dict)  # JSON-ready: how it was trained, what it reached, licence

    @property
    def mtp_config(self) -> config_lib.HeadConfig:
        """The config, of an MTP head.

        Raises:
          CheckpointError: it is a baseline's draft model.
        """
        if isinstance(self.config, config_lib.BaselineConfig):
            raise errors.CheckpointError(f"head {self.name!r}: kind={self.config.kind!r}: must be an MTP head here, and not a baseline's draft model")
        return self.config


def save_head(folder: str | Path, head: LoadedHead, *, dtype: str = "float32") -> Path:
    """Write a head, replacing one that is there.

    Args:
      folder: made if absent.
      head: what to write.
      dtype: that all parameters are stored in; float16 and bfloat16 halve the file, and loading gives float32 again.

    Returns:
      The folder.

    Raises:
      CheckpointError: the dtype is none of the three, a parameter isn't finite in it, or draft_ids doesn't fit the config.
    """
    folder = Path(folder)
    _check_draft_ids(head.draft_ids, head.config, str(folder / TENSORS))
    data = serialise(flatten(head.params) | {"draft_ids": head.draft_ids}, dtype, str(folder / TENSORS))
    record = {
        "format": FORMAT,
        "name": head.name,
        "backbone": {"name": head.backbone_name, "fingerprint": head.fingerprint},
        "dtype": dtype,
        "sha256": hashlib.sha256(data).hexdigest(),
        "config": config_lib.to_dict(head.config),
        "card": head.card,
    }
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"  # before anything is written: a card may not be JSON
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / TENSORS, data)
    _write(folder / RECORD, text.encode())
    return folder


def serialise(tensors: Mapping[str, Any], dtype: str, where: str, metadata: dict[str, str] | None = None) -> bytes:
    """Bytes of a safetensors file with floating-point tensors stored in `dtype` and integers as they are.

    Raises:
      CheckpointError: the dtype is none of the three, or a value isn't finite in it.
    """
    from safetensors.numpy import save

    if dtype not in _DTYPES:
        raise errors.CheckpointError(f"dtype={dtype!r}: must be one of {', '.join(_DTYPES)}")
    stored: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.integer):
            with np.errstate(over="ignore"):  # refused in the next line
                array = array.astype(jnp.dtype(dtype))
            if not np.isfinite(array.astype(np.float32)).all():
                raise errors.CheckpointError(f"{where}: tensor {name!r} has values that aren't finite in {dtype}; not written")
        stored[name] = np.ascontiguousarray(array)
    return save(stored, metadata)


def load_head(name_or_path: str | Path, backbone: LoadedBackbone, *, any_backbone: bool = False) -> LoadedHead:
    """Read a head for `backbone`.

    Args:
      name_or_path: a folder with head.json, a training run's folder (its `head/`, or the folder that its latest.json
        names under "folder"), a folder in transformers' `gemma4_assistant` layout, or the name of a head that comes with
        the package.
      backbone: what it will read. Shapes must fit always.
      any_backbone: True accepts a head trained on another backbone of the same shape: output stays exact, drafts get worse.

    Raises:
      UnknownName: no such head.
      DamagedFile: head.safetensors isn't the file that head.json was written for.
      MissingTensor, UnexpectedTensor, MisshapenTensor: the tensors aren't those the config implies.
      CheckpointError: another format, another backbone, or impossible draft_ids.
      ConfigError: the config is impossible, or doesn't fit the backbone's shape.
    """
    from mtp_jax.checkpoints import assistant

    folder = _locate(name_or_path)
    if not (folder / RECORD).is_file():
        return assistant.read(folder, backbone, any_backbone=any_backbone)
    path = folder / RECORD
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise errors.CheckpointError(f"{path}: format={record.get('format')!r}: this version reads format {FORMAT}")
    for key, kind in (("name", str), ("backbone", dict), ("sha256", str), ("config", dict)):
        if not isinstance(record.get(key), kind):
            raise errors.DamagedFile(f"{path}: {key}={record.get(key)!r}: must be a {kind.__name__}")
    kind = config_lib.BaselineConfig if "kind" in record["config"] else config_lib.HeadConfig
    config: config_lib.HeadConfig | config_lib.BaselineConfig = config_lib.from_dict(kind, record["config"], where=str(path))
    config.check_fits(backbone.config)
    trained_on = record["backbone"].get("fingerprint")
    if trained_on != backbone.fingerprint and not any_backbone:
        raise errors.CheckpointError(
            f"{path}: head {record['name']!r} was trained for another backbone (fingerprint {trained_on}, this backbone {backbone.fingerprint}): "
            "drafts would be poor; pass any_backbone=True to use it all the same"
        )
    tensors = _read_tensors(folder / TENSORS, record["sha256"])
    draft_ids = tensors.pop("draft_ids", None)
    if draft_ids is None:
        raise errors.MissingTensor(f"{folder / TENSORS}: tensor 'draft_ids' is missing")
    _check_draft_ids(draft_ids, config, str(folder / TENSORS))
    _check_shapes(tensors, config, backbone.config, str(folder / TENSORS))
    params = unflatten({name: jnp.asarray(value.astype(np.float32)) for name, value in tensors.items()})
    return LoadedHead(record["name"], config, params, draft_ids, trained_on, record["backbone"].get("name", ""), record.get("card") or {})


def flatten(tree: dict[str, Any]) -> dict[str, Any]:
    """Nested dict -> {"a/b/c": leaf}."""
    from flax import traverse_util

    return traverse_util.flatten_dict(tree, sep="/")


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a/b/c": leaf} -> nested dict."""
    from flax import traverse_util

    return traverse_util.unflatten_dict(flat, sep="/")


def shipped_heads() -> list[str]:
    """Names of the heads that come with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{RECORD}"))


def _locate(name_or_path: str | Path) -> Path:
    from mtp_jax.checkpoints import assistant

    text, path = str(name_or_path), Path(name_or_path).expanduser()
    if text in shipped_heads():
        return SHIPPED / text
    candidates = [path, path / "head"]
    latest = path / "latest.json"
    if latest.is_file():
        named = read_json(latest).get("folder")
        if not isinstance(named, str):
            raise errors.DamagedFile(f"{latest}: folder={named!r}: must name the folder of the last checkpoint")
        candidates += [path / named, path / named / "head"]
    for candidate in candidates:
        if (candidate / RECORD).is_file():
            return candidate
    if assistant.is_assistant(path):
        return path
    problem = f"holds no {RECORD}" if path.exists() else "doesn't exist"
    raise errors.UnknownName(
        f"head {text!r} {problem}: give a folder that holds {RECORD} and {TENSORS}, a training run's folder, a Gemma 4 assistant's folder, "
        f"or a head that comes with the package ({', '.join(shipped_heads()) or 'there is none'})"
    )


def _read_tensors(path: Path, sha256: str) -> dict[str, np.ndarray]:
    import safetensors

    if not path.is_file():
        raise errors.DamagedFile(f"{path}: no such file, though {RECORD} is there")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise errors.DamagedFile(f"{path}: SHA-256 is {found}, but {RECORD} was written for {sha256}")
    try:
        with safetensors.safe_open(path, framework="np") as file:  # safetensors.numpy.load doesn't know bfloat16
            return {name: file.get_tensor(name) for name in file.keys()}
    except safetensors.SafetensorError as error:
        raise errors.DamagedFile(f"{path}: not a safetensors file: {error}") from error


def _check_shapes(
    tensors: dict[str, np.ndarray], config: config_lib.HeadConfig | config_lib.BaselineConfig, backbone: config_lib.BackboneConfig, where: str
) -> None:
    from mtp_jax.models.forms import param_shapes

    expected = param_shapes(config, backbone)
    for name in sorted(set(expected) | set(tensors)):
        if name not in tensors:
            raise errors.MissingTensor(f"{where}: tensor {name!r} {list(expected[name])} is missing")
        if name not in expected:
            raise errors.UnexpectedTensor(f"{where}: tensor {name!r} {list(tensors[name].shape)} has no place in this head")
        if tensors[name].shape != tuple(expected[name]):
            raise errors.MisshapenTensor(f"{where}: tensor {name!r} has shape {list(tensors[name].shape)}; the config implies {list(expected[name])}")


def _check_draft_ids(draft_ids: np.ndarray, config: config_lib.HeadConfig | config_lib.BaselineConfig, where: str) -> None:
    if draft_ids.shape != (config.draft_vocab_size,) or draft_ids.dtype != np.int32:
        raise errors.MisshapenTensor(f"{where}: tensor 'draft_ids' is {draft_ids.dtype} {list(draft_ids.shape)}; must be int32 [{config.draft_vocab_size}]")
    if draft_ids.min() < 0 or draft_ids.max() >= config.backbone_vocab_size:
        worst = draft_ids.min() if draft_ids.min() < 0 else draft_ids.max()
        raise errors.CheckpointError(f"{where}: draft_ids holds {worst}; must be token ids in 0..{config.backbone_vocab_size - 1}")
    ids, counts = np.unique(draft_ids, return_counts=True)
    if len(ids) != len(draft_ids):
        raise errors.CheckpointError(f"{where}: draft_ids holds {ids[counts > 1][0]} {counts.max()} times; each id must be there once")


def _write(path: Path, data: bytes) -> None:
    """Write under a temporary name, then rename: readers see the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = ["FORMAT", "LoadedHead", "flatten", "load_head", "save_head", "serialise", "shipped_heads", "unflatten"]
