"""What can be wrong with a checkpoint. Every message names the file, the tensor or field, its value and the rule it breaks."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint can't be used as asked."""


class MissingTensor(CheckpointError):
    """The model needs a tensor that the checkpoint doesn't hold."""


class UnexpectedTensor(CheckpointError):
    """The checkpoint holds a tensor that the model has no place for, or holds one twice."""


class MisshapenTensor(CheckpointError):
    """A tensor's shape isn't the one that the configuration implies."""


class DamagedFile(CheckpointError):
    """A file is absent from its set, cut short, or not what it says it is."""


class UnsupportedModel(CheckpointError):
    """The file is sound, but asks for something this package doesn't implement."""


class UnknownName(CheckpointError):
    """A name is neither in a catalog nor a path that exists."""


__all__ = ["CheckpointError", "DamagedFile", "MissingTensor", "MisshapenTensor", "UnexpectedTensor", "UnknownName", "UnsupportedModel"]
