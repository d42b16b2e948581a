"""The command line: parse, run, and turn errors into one line and an exit code.

Exit codes: 0 done; 1 files or prompts that can't be used, or a check that fails; 2 wrong usage (a flag, a value, a name); 130 Ctrl-C.
Text for people goes to stderr. With --json, the last line of stdout is one JSON document.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from mtp_jax import config as config_lib
from mtp_jax import demo
from mtp_jax.checkpoints import errors
from mtp_jax.commands import bench, evaluate, export, generate, plan, report, rollout, shared, train, verify_exact

Command = (
    Annotated[demo.Demo, tyro.conf.subcommand("demo")]
    | Annotated[rollout.Rollout, tyro.conf.subcommand("rollout")]
    | Annotated[train.Train, tyro.conf.subcommand("train")]
    | Annotated[plan.Plan, tyro.conf.subcommand("plan")]
    | Annotated[generate.Generate, tyro.conf.subcommand("generate")]
    | Annotated[evaluate.Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[verify_exact.VerifyExact, tyro.conf.subcommand("verify-exact")]
    | Annotated[bench.Bench, tyro.conf.subcommand("bench")]
    | Annotated[export.Export, tyro.conf.subcommand("export")]
    | Annotated[report.Report, tyro.conf.subcommand("report")]
)
DESCRIPTION = """Faster text from a frozen language model: a light head drafts a few tokens, the model checks them in one pass and keeps those it would
have written itself. See it with `mtp-jax demo`; make your own head with `rollout`, then `train` (what fits, `plan` tells); use it with `generate`;
measure it with `evaluate`, put its exactness to the test with `verify-exact`, its speed, part by part, with `bench`; hand it on with `export`; `report`
makes a page of a comparison."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: arguments without the program's name; default those of the process.

    Returns:
      The exit code.
    """
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            document = command.run()
        if command.json:
            print(json.dumps(document), flush=True)
        return command.status(document)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise  # a defect of this package: its trace is wanted
        _complain(_message(error))
        return code


def parse(argv: Sequence[str]) -> Any:
    """The command that the arguments name.

    Raises:
      UsageError: wrong flags, in one line.
      SystemExit: after printing --help.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(Command, args=list(argv), prog="mtp-jax", description=DESCRIPTION)  # type: ignore[call-overload]
    except SystemExit as stop:
        if not stop.code:
            raise
        raise shared.UsageError(_unboxed(said.getvalue())) from None


def exit_code(error: Exception) -> int | None:
    """2 for wrong usage, 1 for another error that is the user's to mend, None for a defect of this package."""
    if isinstance(error, shared.UsageError | config_lib.ConfigError | errors.UnknownName):
        return 2
    own = type(error).__module__.startswith("mtp_jax.")  # every error class of the package is for the user
    if own or isinstance(error, OSError | UnicodeDecodeError | json.JSONDecodeError) or "RESOURCE_EXHAUSTED" in str(error):
        return 1
    return None


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if "RESOURCE_EXHAUSTED" in str(error):
        return f"out of memory; try a smaller --batch-size ({str(error)[:200]})"
    return str(error)


def _complain(message: str) -> None:
    print("mtp-jax: " + " ".join(message.split()), file=sys.stderr, flush=True)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    _complain(f"warning: {message}")


def _unboxed(text: str) -> str:
    """tyro's framed message as one line: its first block (after the title), and where help is."""
    blocks: list[list[str]] = [[]]
    for line in (line.strip("│╭╰╮╯| ") for line in text.splitlines()[1:]):
        if line.strip("─-+"):
            blocks[-1].append(line)
        else:
            blocks.append([])
    message = next((" ".join(block) for block in blocks if block), "wrong usage").partition(" Argument helptext: ")[0].rstrip(".")
    _, found, command = " ".join(sum(blocks, [])).partition("For full helptext, ")
    return f"{message}; see {command.removeprefix('run').removeprefix('see').lstrip(': ')}" if found else message


if __name__ == "__main__":
    sys.exit(main())
