"""`mtp-jax export`: a head as a folder for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mtp_jax.commands import shared


@dataclass(frozen=True, kw_only=True)
class Export(shared.HeadFlags):
    """Write a head as a folder that other programs read: config.json and model.safetensors.

    A head in the form of Gemma 4's assistants on a Gemma 4 backbone becomes a gemma4_assistant folder, which transformers loads
    and generates with. Any other becomes a plain folder whose config.json explains every tensor."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder to make; nothing may be there."""
    format: Literal["auto", "assistant", "plain"] = "auto"
    """What to write: a gemma4_assistant folder, a plain one, or whichever fits."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the stored tensors."""

    def run(self) -> dict[str, Any]:
        """Returns the folder, its format, the number of tensors, and the bytes of all its files."""
        if self.head == "none":
            raise shared.UsageError("--head none: there is nothing to export; give a folder or the name of a shipped head")
        if self.out.exists():
            raise shared.UsageError(f"--out {self.out}: exists already; choose another folder")
        backbone, head = shared.load_both(self.backbone, self.head)
        assert head is not None
        from mtp_jax.checkpoints import assistant, plain

        problem = assistant.obstacle(head.mtp_config, backbone.config)
        chosen = self.format if self.format != "auto" else ("plain" if problem else "assistant")
        names = (assistant if chosen == "assistant" else plain).write(self.out, head, backbone, self.dtype)
        size = sum(path.stat().st_size for path in self.out.iterdir())
        if problem and self.format == "auto":
            shared.say(f"not an assistant's form ({problem}), so it is a plain folder")
        shared.say(f"{len(names)} tensors, {size:,} bytes written to {self.out}")
        return {"path": str(self.out), "format": "gemma4_assistant" if chosen == "assistant" else "plain", "tensors": len(names), "bytes": size}
