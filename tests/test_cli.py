"""Every command on a tiny model, in this process: what --json holds, and what each mistake costs (one line, an exit code, nothing half-written)."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny_files

from mtp_jax import cli, demo
from mtp_jax.checkpoints import heads, load
from mtp_jax.config import DecodeConfig, head_config_for
from mtp_jax.evaluation import exactness
from mtp_jax.models import head as head_lib

PROMPTS = [{"task": "greet", "prompt": "hello 12"}, {"task": "greet", "prompt": "hello hello"}, {"task": "sea", "prompt": "tell me about the sea"}]
SIZES = ["--max-new-tokens", "12", "--num-draft", "2"]  # the same everywhere, so that commands share compiled programs
TRAIN = ["--steps", "2", "--batch-size", "2", "--max-length", "64", "--num-draft", "2", "--rows-per-sequence", "8", "--draft-vocab-size", "20"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a backbone, a head for it, a head for another one, and prompts. `random` takes drafts from anywhere."""
    root = tmp_path_factory.mktemp("cli")
    tiny_files.write_hf_tokenizer(tiny_files.write_hf(root / "backbone", max_position_embeddings=2048))
    tiny_files.write_gguf(root / "backbone.gguf", llama__context_length=2048)
    backbone = load.load_backbone(root / "backbone")
    config = head_config_for(backbone.config, draft_vocab_size=20)
    shapes, rng = head_lib.param_shapes(config, backbone.config), np.random.default_rng(0)
    params = heads.unflatten({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})
    head = heads.LoadedHead("tiny-head", config, params, np.arange(60, 80, dtype=np.int32), backbone.fingerprint, "backbone")
    heads.save_head(root / "head", head)
    heads.save_head(root / "foreign", dataclasses.replace(head, fingerprint="f" * 16))
    heads.save_head(root / "misfit", dataclasses.replace(head, config=dataclasses.replace(config, backbone_layers=7)))
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return root


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # set, so the command line leaves it alone


@pytest.fixture
def run(capsys):
    """Run a command; gives (exit code, lines of stdout, lines of stderr)."""

    def call(*args):
        capsys.readouterr()
        code = cli.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


@pytest.fixture
def ends_well(run):
    """Run a command with --json; gives its document."""

    def call(*args):
        code, out, err = run(*args, "--json")
        assert code == 0, err
        return json.loads(out[-1])

    return call


def _model(files):
    return ["--backbone", files / "backbone", "--head", files / "head"]


def test_generate_one_prompt(files, ends_well, run):
    record = ends_well("generate", "hello 12", *_model(files), *SIZES)
    assert list(record) == ["text", "tokens", "prompt_tokens", "steps", "tokens_per_step", "accepted_per_position", "tokens_per_second", "finish_reason"]
    assert 1 <= len(record["tokens"]) <= 12 and len(record["accepted_per_position"]) == 2
    tokenizer = load.load_backbone(files / "backbone").tokenizer
    assert record["text"] == tokenizer.decode(record["tokens"])
    assert record["prompt_tokens"] == len(tokenizer.apply_chat([{"role": "user", "content": "hello 12"}]))
    vanilla = ends_well("generate", "hello 12", "--backbone", files / "backbone", "--head", "none", *SIZES)
    assert vanilla["tokens"] == record["tokens"] and vanilla["accepted_per_position"] == []
    code, out, err = run("generate", "hello 12", *_model(files), *SIZES)
    assert code == 0 and "\n".join(out) == "\n".join(record["text"].splitlines())
    assert "finish: length" in err[-1]


def test_generate_several_prompts(files, ends_well):
    several = ends_well("generate", "hello 12", "tell me about the sea", "hello hello", *_model(files), *SIZES)
    assert list(several) == ["outputs", "tokens_per_second"] and len(several["outputs"]) == 3
    assert several["tokens_per_second"] == pytest.approx(sum(record["tokens_per_second"] for record in several["outputs"]), rel=1e-3)
    from_file = ends_well("generate", "--prompts", files / "prompts.jsonl", *_model(files), *SIZES)
    assert from_file["outputs"][1]["tokens"] == several["outputs"][2]["tokens"]


def test_generate_ends_before_a_stop_string(files, ends_well):
    whole = ends_well("generate", "hello 12", *_model(files), *SIZES)
    string = whole["text"][2:4]
    record = ends_well("generate", "hello 12", *_model(files), *SIZES, "--stop", string, "never")
    assert record["text"] == whole["text"][: whole["text"].index(string)] and record["finish_reason"] == "stop"
    assert record["tokens"] == whole["tokens"][: len(record["tokens"])] and len(record["tokens"]) < 12


def test_generate_prints_as_it_comes_on_a_terminal(files, run, monkeypatch):
    """What stands on the terminal in the end is what a file would hold."""
    from mtp_jax.decoding import stream

    taken = []
    monkeypatch.setattr(stream.Row, "take", lambda row, *args, take=stream.Row.take: taken.append(take(row, *args)) or taken[-1])
    expected = run("generate", "hello 12", *_model(files), *SIZES)
    assert not taken
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, err = run("generate", "hello 12", *_model(files), *SIZES)
    assert (code, out) == (0, expected[1]) and len(taken) >= 2 and taken[0].finish_reason is None
    assert "finish: length" in err[-1] and err[-1].partition(",")[0] == expected[2][-1].partition(",")[0]
    count = len(taken)
    assert run("generate", "hello 12", "hello", *_model(files), *SIZES)[0] == run("generate", "hello 12", "--json", *_model(files), *SIZES)[0] == 0
    assert len(taken) == count


def test_evaluate(files, ends_well, tmp_path):
    out = tmp_path / "new" / "results.json"
    result = ends_well("evaluate", "--prompts", files / "prompts.jsonl", *_model(files), *SIZES, "--out", out)
    assert json.loads(out.read_text()) == result and [path.name for path in out.parent.iterdir()] == ["results.json"]
    assert list(result) == ["overall", "tasks", "drafter_bytes", "settings"] and list(result["tasks"]) == ["greet", "sea"]
    keys = ["prompts", "tokens", "steps", "tokens_per_step", "accept_unconditional", "accept_conditional", "identical"]
    keys += ["vanilla_tokens_per_second", "tokens_per_second", "speedup"]
    for numbers in (result["overall"], *result["tasks"].values()):
        assert list(numbers) == keys and numbers["identical"] == numbers["prompts"]
    assert result["overall"]["prompts"] == 3 and set(result["drafter_bytes"]) == {"parameters", "state"}
    assert result["settings"]["head"] == "tiny-head" and result["settings"]["num_draft"] == 2
    limited = ends_well("evaluate", "--prompts", files / "prompts.jsonl", files / "prompts.jsonl", "--limit", "1", *_model(files), *SIZES)
    assert limited["overall"]["prompts"] == 2 and list(limited["tasks"]) == ["greet"]


def test_verify_exact(files, ends_well, run, tmp_path, monkeypatch):
    out = tmp_path / "new" / "exact.json"
    flags = ["--prompts", files / "prompts.jsonl", *_model(files), *SIZES]
    result = ends_well("verify-exact", *flags, "--batch-size", "2", "--out", out)
    assert json.loads(out.read_text()) == result and [path.name for path in out.parent.iterdir()] == ["exact.json"]
    keys = ["exact", "prompts", "tokens", "steps", "tokens_per_step", "accept_unconditional", "accept_conditional", "against", "settings"]
    assert list(result) == keys and list(result["against"]) == ["fixed_width", "one_token"]
    assert (result["exact"], result["prompts"], result["settings"]["tokens_only"]) == (True, 3, False)
    for numbers in result["against"].values():
        assert (numbers["identical"], numbers["tokens_identical"], numbers["differences"]) == (3, result["tokens"], [])
    assert result["against"]["fixed_width"]["other_bits"] == 0

    monkeypatch.setattr(demo, "PROMPTS", (("one", "hello 12"), ("two", "hello hello"), ("three", "hello")))
    by_default = ends_well("verify-exact", *_model(files), *SIZES, "--tokens-only", "--limit", "1")
    assert (by_default["exact"], by_default["prompts"], by_default["against"]["fixed_width"]["other_bits"]) == (True, 1, None)

    place = {"prompt": 1, "position": 2, "reference_token": 8, "drafted_token": None, "gap": 1e-6}
    loose = result["against"]["one_token"] | {"identical": 2, "differences": [place], "largest_gap": 1e-6}
    parted = result | {"against": result["against"] | {"one_token": loose}}
    monkeypatch.setattr(exactness, "verify_exact", lambda *args, **kwargs: parted)
    code, _, err = run("verify-exact", *flags)
    said = "prompt 1, generated token 2: token 8 alone, one token a pass, no token with the head; the two best logits are 1e-06 apart"
    assert code == 0 and said in err and any(line.startswith("warning: 1 of 3 prompts differ from one token a pass") for line in err)
    assert err[-1] == "exact: the same tokens and logits, in every bit"
    assert run("verify-exact", *flags, "--strict")[0] == 1
    strict = loose | {"other_bits": 4, "first_other_bits": [{"prompt": 1, "position": 0}], "differences": [place | {"gap": None}]}
    monkeypatch.setattr(exactness, "verify_exact", lambda *args, **kwargs: parted | {"exact": False, "against": {"fixed_width": strict, "one_token": loose}})
    code, lines, err = run("verify-exact", *flags, "--json")
    assert code == 1 and json.loads(lines[-1])["exact"] is False
    assert "prompt 1: logits differ from generated token 0 on" in err and err[-1].startswith("NOT EXACT")


def test_bench(files, ends_well, tmp_path):
    out, plan = tmp_path / "new" / "bench.json", ["--num-draft", "1", "--context", "10", "--passes", "2", "--rounds", "1", "--decode-rounds", "0"]
    flags = ["--prompts", files / "prompts.jsonl", "--limit", "1", *_model(files), "--max-new-tokens", "12", *plan, "--bandwidth", "100", "--tflops", "5"]
    result = ends_well("bench", *flags, "--out", out)
    assert json.loads(out.read_text()) == result and list(result) == ["roofline", "passes", "end_to_end", "predicted", "drafter_bytes", "settings"]
    assert result["passes"]["one_token"]["ratio"] == 1.0 and [item["width"] for item in result["passes"]["verify"]] == [1, 2]
    (device,) = result["roofline"]["accelerators"]
    assert (device["name"], device["gb_per_second"], device["tflop_per_second"]) == ("given", 100, 5)
    assert result["end_to_end"] == [] and result["settings"]["plan"]["max_new_tokens"] == 12


def test_bench_flags(files):
    command = cli.parse(["bench", "--num-draft", "1", "3", "--widths", "8", "16", "--batch-sizes", "1", "4", "--both-layouts", "--limit", "2"])
    assert (command.num_draft, command.widths, command.batch_sizes, command.both_layouts) == ((1, 3), (8, 16), (1, 4), True)
    assert [prompt.text for prompt in command._read_prompts()] == [text for _, text in demo.PROMPTS[:2]]


def test_demo(files, ends_well, monkeypatch):
    monkeypatch.setattr(demo, "PROMPTS", (("one", "hello 12"), ("two", "hello hello"), ("three", "hello")))
    result = ends_well("demo", *_model(files), *SIZES)
    assert [record["kind"] for record in result["prompts"]] == ["one", "two", "three"]
    assert all(record["identical"] and record["tokens_per_second"] > 0 for record in result["prompts"])
    assert result["summary"]["identical"] == 3 and result["drafter_bytes"]["parameters"] > 0


def test_rollout_then_train_then_generate(files, ends_well, run, tmp_path):
    rollouts, folder = tmp_path / "rollouts.jsonl", tmp_path / "run"
    backbone = ["--backbone", files / "backbone"]
    rollout = ["rollout", "--prompts", files / "prompts.jsonl", *backbone, "--out", rollouts, "--max-new-tokens", "12", "--batch-size", "3"]
    report = ends_well(*rollout)
    assert report == {"input": 3, "done": 3, "failed": 0, "skipped": 0, "tokens": report["tokens"], "out": str(rollouts)}
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert sum(sum(line["answer_mask"]) for line in lines) == report["tokens"] > 0
    assert ends_well(*rollout)["tokens"] == 0  # all there: nothing is answered again
    assert run(*rollout, "--seed", "1")[0] == 1  # not the same run

    train = ["train", "--rollouts", rollouts, *backbone, "--out", folder, "--features", tmp_path / "features", "--held-out", "1", *TRAIN]
    result = ends_well(*train)
    assert result["head"] == str(folder / "head") and result["metrics"]["step"] == 2
    assert result["metrics"]["held_out"]["tokens_per_step"] >= 1 and len(result["metrics"]["accept"]) == 2
    assert json.loads((folder / "run.json").read_text())["head_config"]["pointer"] is True
    assert ends_well(*train, "--resume")["metrics"]["loss"] == result["metrics"]["loss"]  # finished already
    code, _, err = run(*train)
    assert code == 1 and err[-1].startswith(f"mtp-jax: {folder}: holds a run already; pass --resume")
    answer = ends_well("generate", "hello 12", *backbone, "--head", folder, *SIZES)
    assert answer["tokens"] == ends_well("generate", "hello 12", *_model(files), *SIZES)["tokens"]


def test_train_flags_reach_the_head(files):
    shape = ["--donors", "0", "1", "--no-pointer", "--width", "4", "--query-position", "last", "--no-input-norms"]
    args = ["train", "--rollouts", "r", "--out", "o", *shape, *TRAIN]
    command = cli.parse(args)
    config = command.head_config(load.load_backbone(files / "backbone").config)
    assert (config.donors, config.pointer, config.width, config.query_position, config.draft_vocab_size) == ((0, 1), False, 4, "last", 20)
    assert (command.config.steps, command.config.max_length, command.config.optimizer, command.config.learning_rate) == (2, 64, "muon", 2e-2)
    plain = cli.parse(["train", "--rollouts", "r", "--out", "o"]).head_config(load.load_backbone(files / "backbone").config)
    assert plain.input_norms and not config.input_norms


COMMANDS = {"generate": ["hello"], "evaluate": ["--prompts", "PROMPTS"], "rollout": ["--prompts", "PROMPTS", "--out", "OUT"]}


@pytest.mark.parametrize("command", COMMANDS)
def test_sampling_flags_reach_the_decoder(files, run, monkeypatch, tmp_path, command):
    from mtp_jax.decoding import generate as generate_lib
    from mtp_jax.evaluation import acceptance
    from mtp_jax.training import rollout

    seen = []

    def stop(*args, **options):
        seen.extend(value for value in args if isinstance(value, DecodeConfig))
        raise KeyboardInterrupt

    for module, name in ((generate_lib, "generate"), (acceptance, "evaluate"), (rollout, "rollout")):
        monkeypatch.setattr(module, name, stop)
    places = {"PROMPTS": files / "prompts.jsonl", "OUT": tmp_path / "out.jsonl"}
    args = [command, *(places.get(arg, arg) for arg in COMMANDS[command]), "--backbone", files / "backbone", "--max-new-tokens", "9"]
    args += ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--seed", "4", "--stop-tokens", "5", "7"]
    drafting = command != "rollout"
    assert run(*args, *(["--head", files / "head", "--num-draft", "2", "--accept", "rejection", "--window-cache", "ring"] if drafting else []))[0] == 130
    (config,) = seen
    assert (config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.min_p, config.seed) == (9, 0.7, 5, 0.9, 0.1, 4)
    assert config.stop_tokens == (5, 7)
    assert (config.num_draft, config.accept, config.window_cache) == ((2, "rejection", "ring") if drafting else (0, "match", "full"))


def _cut(source, target):
    """Copy a file, or a folder and its weights, without the last bytes."""
    path = shutil.copytree(source, target) / "model.safetensors" if source.is_dir() else shutil.copy(source, target)
    with open(path, "r+b") as file:
        file.truncate(file.seek(0, 2) - 50)
    return target


MISTAKES = {
    "unknown backbone": (2, ["generate", "hi", "--backbone", "no-such", "--head", "none"], "backbone 'no-such' doesn't exist: give a catalog name"),
    "unknown head": (2, ["generate", "hi", "--backbone", "ROOT/backbone", "--head", "no-such"], "head 'no-such' doesn't exist"),
    "no shipped head": (2, ["demo", "--backbone", "ROOT/backbone"], "--head: no head comes with the package for backbone"),
    "empty prompt": (2, ["generate", " \n", "--backbone", "ROOT/backbone", "--head", "none"], "prompt 1 is empty"),
    "no prompt": (2, ["generate", "--head", "none"], "give either prompts on the command line or --prompts FILE"),
    "long prompt": (1, ["generate", "x" * 3000, "--backbone", "ROOT/backbone", "--head", "none"], r"prompt 0 has 30\d\d tokens: .*max_positions=2048"),
    "no drafts": (2, ["generate", "hi", "--backbone", "ROOT/backbone", "--head", "ROOT/head", "--num-draft", "0"], "num_draft=0: must be at least 1"),
    "no drafts, evaluate": (
        2,
        ["evaluate", "--prompts", "ROOT/prompts.jsonl", "--backbone", "ROOT/backbone", "--head", "ROOT/head", "--num-draft", "0"],
        "num_draft=0",
    ),
    "no drafts, demo": (2, ["demo", "--backbone", "ROOT/backbone", "--head", "ROOT/head", "--num-draft", "0"], "num_draft=0"),
    "half an accelerator": (2, ["bench", "--bandwidth", "819", "--out", "OUT"], "--bandwidth and --tflops: give both, or neither"),
    "a slow accelerator": (2, ["bench", "--bandwidth", "819", "--tflops", "0", "--out", "OUT"], "--tflops 0.0: must be above 0"),
    "no drafts, bench": (2, ["bench", "--num-draft", "0", "--out", "OUT"], "num_drafts=0: each must be at least 1"),
    "no rounds, bench": (2, ["bench", "--rounds", "0", "--out", "OUT"], "rounds=0: must be at least 1"),
    "nothing to bench": (1, ["bench", "--prompts", "ROOT/none.jsonl", "--out", "OUT"], "none.jsonl: no such file"),
    "long context": (
        1,
        ["bench", "--backbone", "ROOT/backbone", "--head", "ROOT/head", "--context", "2040", "--out", "OUT"],
        r"prompt 0 has 2040 tokens: .*max_positions=2048",
    ),
    "nothing to verify": (2, ["verify-exact", "--backbone", "ROOT/backbone", "--head", "none", "--out", "OUT"], "--head none: leaves nothing to check"),
    "no drafts, verify-exact": (2, ["verify-exact", "--backbone", "ROOT/backbone", "--head", "ROOT/head", "--num-draft", "0"], "num_draft=0"),
    "wrong value": (2, ["generate", "hi", "--temperature", "-1"], "temperature=-1.0: must not be negative"),
    "wrong share": (2, ["rollout", "--prompts", "ROOT/prompts.jsonl", "--out", "OUT", "--min-p", "2"], r"min_p=2.0: must be in \[0, 1\]"),
    "wrong seed": (2, ["generate", "hi", "--seed", "-1"], "seed=-1: must be an integer in 0..4294967295"),
    "wrong seed of a run": (2, ["train", "--rollouts", "ROOT/prompts.jsonl", "--out", "OUT", "--seed", "4294967296"], "seed=4294967296: must be an integer"),
    "wrong accept rule": (2, ["generate", "hi", "--accept", "typical"], "--accept"),
    "wrong batch": (2, ["rollout", "--prompts", "ROOT/prompts.jsonl", "--out", "OUT", "--batch-size", "0"], "--batch-size 0: must be at least 1"),
    "empty stop string": (2, ["generate", "hi", "--stop", ""], "stop_strings=.*: every one must be a string of at least one character"),
    "no steps": (2, ["train", "--rollouts", "ROOT/prompts.jsonl", "--out", "OUT", "--steps", "0"], "steps=0: must be an integer of at least 1"),
    "wrong flag": (2, ["generate", "hi", "--no-such-flag"], "Unrecognized options: --no-such-flag; see mtp-jax"),
    "wrong number": (2, ["generate", "hi", "--seed", "x"], "Error parsing --seed: .*'x'; see mtp-jax"),
    "wrong command": (2, ["no-such-command"], "Unrecognized or misplaced options: no-such-command"),
    "no file": (1, ["evaluate", "--prompts", "ROOT/none.jsonl", "--head", "none"], "none.jsonl: no such file"),
    "no rollouts": (1, ["train", "--rollouts", "ROOT/none.jsonl", "--backbone", "ROOT/backbone", "--out", "OUT"], "none.jsonl: No such file"),
    "wrong line": (1, ["rollout", "--prompts", "ROOT/bad.jsonl", "--out", "OUT"], "bad.jsonl:2: not JSON"),
    "wrong rollout": (1, ["train", "--rollouts", "ROOT/prompts.jsonl", "--backbone", "ROOT/backbone", "--out", "OUT"], "prompts.jsonl:1: not a rollout"),
    "half a surrogate pair": (
        1,
        ["generate", "hi \udc80", "--backbone", "ROOT/backbone", "--head", "none"],
        r"message 1: 'content' has '\\udc80' at character 4: must be Unicode text",
    ),
    "half a surrogate pair in a file": (
        1,
        ["evaluate", "--prompts", "ROOT/half.jsonl", "--backbone", "ROOT/backbone", "--head", "none", "--out", "OUT"],
        r"half.jsonl:1: 'prompt' isn't Unicode text: .*'\\ud800' in position 1: surrogates not allowed",
    ),
    "cut gguf": (1, ["generate", "hi", "--backbone", "ROOT/cut.gguf", "--head", "none"], "cut.gguf"),
    "cut safetensors": (1, ["generate", "hi", "--backbone", "ROOT/cut", "--head", "none"], "cut/model.safetensors"),
    "cut head": (1, ["generate", "hi", "--backbone", "ROOT/backbone", "--head", "ROOT/cut_head"], "head.safetensors: SHA-256 is"),
    "foreign head": (1, ["generate", "hi", "--backbone", "ROOT/backbone", "--head", "ROOT/foreign"], "was trained for another backbone"),
    "head that does not fit": (
        1,
        ["generate", "hi", "--backbone", "ROOT/backbone", "--head", "ROOT/misfit"],
        "does not fit backbone 'backbone': backbone_layers=7",
    ),
}


@pytest.fixture(scope="module")
def damaged(files):
    (files / "bad.jsonl").write_text('{"prompt": "good"}\n{"prompt": \n')
    (files / "half.jsonl").write_text('{"prompt": "x\\ud800"}\n')
    _cut(files / "backbone.gguf", files / "cut.gguf")
    _cut(files / "backbone", files / "cut")
    with open(shutil.copytree(files / "head", files / "cut_head") / "head.safetensors", "r+b") as file:
        file.truncate(100)
    return files


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_an_exit_code(damaged, run, tmp_path, mistake):
    code, args, message = MISTAKES[mistake]
    args = [arg.replace("ROOT", str(damaged)).replace("OUT", str(tmp_path / "out")) for arg in args]
    found, out, err = run(*args, "--json")
    assert (found, out) == (code, [])
    complaints = [line for line in err if line.startswith("mtp-jax: ")]
    assert complaints == err[-1:] and len(complaints) == 1
    assert all(line.startswith(("loading ", "loaded ", "compiling", "evaluating", "decoding")) for line in err[:-1])
    assert re.search(message, complaints[0]), complaints[0]
    assert list(tmp_path.iterdir()) == []


def test_a_defect_keeps_its_trace_and_ctrl_c_does_not(run, monkeypatch):
    class Command:
        json = False

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", lambda argv: Command())
    assert run() == (130, [], ["mtp-jax: interrupted"])
    monkeypatch.setattr(Command, "run", lambda self: {}["missing"])
    with pytest.raises(KeyError):
        run()


@pytest.mark.parametrize("command", ["", "demo", "rollout", "train", "plan", "generate", "evaluate", "verify-exact", "bench", "export"])
def test_help(run, command):
    code, out, err = run(*command.split(), "--help")
    assert (code, err) == (0, []) and f"usage: mtp-jax {command}" in "\n".join(out)


def test_help_does_not_wait_for_jax():
    code = "import sys; from mtp_jax import cli; code = cli.main(['--help']); print('jax' in sys.modules, code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"
