"""What the commands share: flags, loading, progress on stderr. JAX is imported inside functions, so that --help is quick."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro
from rich.console import Console

from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax.checkpoints import errors
from mtp_jax.evaluation import journal as journal_lib

if TYPE_CHECKING:
    from mtp_jax.checkpoints.load import LoadedBackbone, LoadedHead

console = Console(stderr=True)
QUIET_SECONDS = 10.0  # between two progress lines when stderr is not a terminal

Switch = tyro.conf.FlagCreatePairsOff[bool]  # --x without a --no-x
Unset = tyro.conf.arg(metavar="INT", help_behavior_hint="")  # None, with a default that the help text explains
Drafter = Annotated[
    config_lib.DrafterName,
    tyro.conf.arg(
        help="Who drafts: mtp is the head; prompt_lookup copies what followed the last tokens earlier in the text; hybrid copies where at least three "
        "tokens match, and lets the head draft elsewhere, four tokens at most; early_exit is the backbone's first layers; jacobi its own earlier "
        "choices; standalone, eagle, eagle3, deepseek, own_cache and medusa are a --head trained with that --form. prompt_lookup, early_exit and "
        "jacobi need no head."
    ),
]
Report = Callable[[int, int, str], None]  # (done, total, note)


class UsageError(ValueError):
    """The command line asks for something impossible."""


@dataclass(frozen=True, kw_only=True)
class BackboneFlags:
    """Flags of every command."""

    backbone: str = "smollm2-135m-instruct"
    """The frozen language model: a catalog name (smollm2-135m-instruct; fetched once and cached), a folder with config.json, model.safetensors
    and tokenizer.json, or a .gguf file."""
    json: Switch = False
    """Print the result as one JSON document, the last line on stdout."""

    def status(self, document: Any) -> int:
        """The exit code of a command that ran to its end and returned this document."""
        return 0


@dataclass(frozen=True, kw_only=True)
class HeadFlags(BackboneFlags):
    """Flags of every command that decodes with a head."""

    head: str = "auto"
    """The head that drafts: a folder (a head, or a training run), the name of a shipped head, or none for one token a step.
    auto is the head that comes with the package for this backbone."""


@dataclass(frozen=True, kw_only=True)
class DraftFlags(HeadFlags):
    """Flags of every command that drafts."""

    drafter: Drafter = "mtp"


@dataclass(frozen=True, kw_only=True)
class DraftLengthFlags(DraftFlags):
    """Flags of every command that decodes with one drafter, the hybrid unless another is named."""

    drafter: Drafter = "hybrid"
    num_draft: Annotated[int | None, Unset] = None
    """Tokens drafted per step at most. Default: 4; 8 with jacobi, 10 with prompt_lookup and hybrid."""
    short_drafts: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...", help_behavior_hint="")] = None
    """Steps that propose no more than one of these numbers get a verify pass for so many, which is cheaper; each takes time to compile.
    Default: 0 with prompt_lookup, 4 with hybrid, else none."""

    def __post_init__(self) -> None:
        if self.head == "none" and self.drafter == "hybrid":
            object.__setattr__(self, "drafter", "mtp")  # --head none is the backbone alone
        num_draft, short_drafts = config_lib.DRAFT_LENGTHS[self.drafter]
        if self.num_draft is None:
            object.__setattr__(self, "num_draft", num_draft)
        if self.short_drafts is None:
            object.__setattr__(self, "short_drafts", tuple(drafts for drafts in short_drafts if drafts < (self.num_draft or 0)))

    def draft_lengths(self) -> dict[str, Any]:
        """Fields of a DecodeConfig."""
        return {"num_draft": self.num_draft, "short_drafts": self.short_drafts}


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags of every command that chooses tokens."""

    temperature: float = 0.0
    """0 takes the most probable token always; higher samples more freely."""
    top_k: int = 0
    """Sample among the k most probable tokens; 0 is no limit."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together reach this probability; 1 is no limit."""
    min_p: float = 0.0
    """Sample among the tokens at least this share as probable as the most probable one; 0 is no limit."""
    seed: int = 0
    """Of the random numbers, when sampling."""
    stop_tokens: Annotated[tuple[int, ...], tyro.conf.arg(metavar="ID ...", help_behavior_hint="")] = ()
    """Token ids that end an answer. Default: the tokenizer's own."""

    def decode_config(self, **others: Any) -> config_lib.DecodeConfig:
        """What these flags ask of the decoder, with the fields that other flags set.

        Raises:
          ConfigError: a value that its rule forbids.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop_tokens")
        return config_lib.DecodeConfig(**{name: getattr(self, name) for name in names}, **others)


@dataclass(frozen=True, kw_only=True)
class SampledDraftFlags(DraftLengthFlags, SamplingFlags):
    """Flags of every command that drafts and samples."""

    accept: config_lib.AcceptRule = "match"
    """When sampling, which drafts are kept. match: those that are the backbone's own samples, so the text is what it alone would sample with
    this seed. rejection: the head draws its drafts, and they are kept by the ratio of probabilities; other texts of the same distribution.
    Which keeps more depends on head and temperature."""
    min_confidence: float = 0.0
    """Let the head draft no further in a step once the product of its drafts' probabilities is below this; 0 is always as many as it may."""
    exit_layer: int = 0
    """With --drafter early_exit, layers of the backbone that draft; 0 is half of them."""
    window_cache: Literal["full", "ring"] = "full"
    """Slots of layers with a sliding window: as many as the text has tokens, or a ring of little more than the window. Same output; a ring needs
    less memory for long texts."""

    def draft_config(self, **others: Any) -> config_lib.DecodeConfig:
        """`decode_config` with the flags of drafting as well."""
        names = ("accept", "min_confidence", "exit_layer", "window_cache")
        return self.decode_config(**{name: getattr(self, name) for name in names}, **self.draft_lengths(), **others)


def journaled(title: str, out: Path | None, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """measure(journal=.., progress=..) behind a progress line. The result is written to `out`, and its journal goes only after that."""
    journal = journal_lib.beside(out)
    with progress(title) as report:
        result = measure(journal=journal, progress=lambda done, total: report(done, total, ""))
    if out is not None and journal is not None:
        files.write_json(out, result)
        journal.unlink()
    return result


def say(text: str) -> None:
    """One line for people, on stderr."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def head_name(backbone: str, head: str) -> str | None:
    """What --head means for this backbone: a folder or shipped name, or None for vanilla decoding.

    Raises:
      UsageError: auto, for a backbone without a shipped head.
    """
    from mtp_jax.checkpoints import heads

    if head == "none":
        return None
    if head != "auto":
        return head
    if f"{backbone}-mtp" not in heads.shipped_heads():
        raise UsageError(f"--head: no head comes with the package for backbone {backbone!r}; pass --head FOLDER, or --head none")
    return f"{backbone}-mtp"


def load_backbone(name: str, **options: Any) -> LoadedBackbone:
    """Load, with the options of `checkpoints.load.load_backbone`, a line on stderr, and JAX set up for the command line.

    Raises:
      UnknownName: neither in the catalog nor a path.
      CheckpointError: its files can't be used.
    """
    say(f"loading {name} ...")
    from mtp_jax.checkpoints import load

    use_compilation_cache()
    start = time.perf_counter()
    try:
        backbone = load.load_backbone(name, **options)
    except config_lib.ConfigError as error:  # the file's fault here, not the command line's
        raise errors.CheckpointError(f"backbone {name!r}: {error}") from None
    say(f"loaded in {time.perf_counter() - start:.1f} s")
    return backbone


def load_both(backbone: str, head: str, drafter: str = "mtp") -> tuple[LoadedBackbone, LoadedHead | None]:
    """Backbone, and head unless it is "none" or the drafter needs none.

    Raises:
      UsageError, UnknownName: no such backbone or head.
      CheckpointError: files that can't be used, or a head made for another backbone.
    """
    chosen = None if drafter in config_lib.HEADLESS else head_name(backbone, head)
    if chosen is None and drafter in ("hybrid", *get_args(config_lib.BaselineKind)):
        raise UsageError(f"--drafter {drafter}: needs a head; --head none leaves it without one")
    loaded = load_backbone(backbone)
    if chosen is None:
        return loaded, None
    from mtp_jax.checkpoints import load

    try:
        return loaded, load.load_head(chosen, loaded)
    except config_lib.ConfigError as error:
        raise errors.CheckpointError(f"head {chosen!r} does not fit backbone {loaded.name!r}: {error}") from None


def use_compilation_cache() -> None:
    """Keep compiled programs beside the cached weights, so that the second start need not compile; the user's own setting wins."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        import jax

        from mtp_jax.checkpoints import catalog

        jax.config.update("jax_compilation_cache_dir", str(catalog.cache_folder(None) / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)  # many small programs make up a start


@contextlib.contextmanager
def progress(label: str) -> Iterator[Report]:
    """A bar with the time that remains on a terminal; elsewhere a line every few seconds."""
    with contextlib.ExitStack() as stack:
        yield _bar(label, stack) if console.is_terminal else _lines(label)


def _bar(label: str, stack: contextlib.ExitStack) -> Report:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn()]
    bar = stack.enter_context(Progress(*columns, TextColumn("{task.fields[note]}", markup=False), console=console))
    task = bar.add_task(label, total=None, note="")

    def report(done: int, total: int, note: str = "") -> None:
        bar.update(task, completed=done, total=total, note=note)

    return report


def _lines(label: str) -> Report:
    start = last = time.perf_counter()

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal last
        now = time.perf_counter()
        if done < total and now - last < QUIET_SECONDS:
            return
        last = now
        left = f"{(now - start) / done * (total - done):.0f} s left" if 0 < done < total else f"{now - start:.0f} s"
        say(f"{label} {done}/{total}, {left}{', ' + note if note else ''}")

    return report


def check_positive(**values: int) -> None:
    """Raise UsageError unless every named flag is at least 1."""
    for name, value in values.items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
