"""Our decoder against transformers' `generate`: the same weights, prompts, threads and budget, greedy, float32, batch 1, on CPU.

    python experiments/compare_transformers.py --prompts prompts.jsonl --out experiments/results/transformers.json

Needs the parity extras: `pip install -e ".[parity]"`. The backbone is written, from the parameters that we loaded, as a
folder that transformers reads. All methods run in one process and take turns prompt by prompt, every second time in
reverse; a prompt's time is the median of its rounds, everything from token ids to token ids. A first, untimed run of each
prompt compiles and warms up, and its tokens are compared.

Torch's threads wait for each other in every product: when another program takes one of the cores, its times grow several
fold and ours do not. The load average before and after is in the result; only runs on a quiet machine count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
import torch
import transformers

import mtp_jax
from mtp_jax import config as config_lib
from mtp_jax import files
from mtp_jax import prompts as prompts_lib
from mtp_jax.checkpoints import families, hf, load
from mtp_jax.decoding import generate as generate_lib
from mtp_jax.evaluation import acceptance

UNIT, REFERENCE = "transformers dynamic cache", "mtp_jax vanilla"  # of speed, and of the tokens
LOOKUP = 10  # tokens that transformers' prompt lookup drafts, its default and our hybrid's most
PAUSE = 0.05  # seconds before each timed call, for the other library's idle threads to go to sleep
NOT_MEASURED = {
    "assisted generation": "needs a smaller model with the same tokenizer; the 135M model is the smallest of the SmolLM2 family, so there is none",
    "compiled forward pass": "transformers compiles for a static cache by itself on accelerators only; on CPU it runs eagerly",
}
Method = Callable[[list[int]], list[int]]  # prompt -> new tokens


def write_folder(folder: Path, backbone: load.LoadedBackbone) -> None:
    """Write a Llama backbone in transformers' layout; SystemExit when its config says more than config.json does here."""
    config = backbone.config
    tensors = {}
    for name, entry in families.transformers_table(config).entries.items():
        leaf = np.asarray(reduce(lambda tree, key: tree[key], entry.path, backbone.params))
        tensors[name] = np.ascontiguousarray(leaf.T if entry.path[-1] == "kernel" else leaf)
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(values))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if hf.read_config(folder) != config:
        sys.exit(f"{backbone.name}: only plain Llama backbones are written here; this one's config has other switches on")


def our_methods(backbone: load.LoadedBackbone, head: load.LoadedHead, config: config_lib.DecodeConfig) -> dict[str, Method]:
    vanilla = generate_lib.make_runtime(backbone)
    num_draft, short_drafts = config_lib.DRAFT_LENGTHS["hybrid"]
    long = dataclasses.replace(config, num_draft=num_draft, short_drafts=short_drafts)
    ways = {
        "mtp_jax vanilla": (vanilla, config),
        "mtp_jax head": (generate_lib.attach(vanilla, head), config),
        "mtp_jax hybrid": (generate_lib.attach(vanilla, head, "hybrid"), long),
    }

    def method(runtime: generate_lib.Runtime, config: config_lib.DecodeConfig) -> Method:
        return lambda ids: generate_lib.run(runtime, [ids], config).outputs[0].tokens

    return {name: method(*way) for name, way in ways.items()}


def their_methods(folder: Path, config: config_lib.DecodeConfig) -> dict[str, Method]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    variants = {
        "transformers dynamic cache": {},
        "transformers static cache": {"cache_implementation": "static"},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": LOOKUP},
    }
    stops = list(config.stop_tokens)

    def method(options: dict) -> Method:
        def run(ids: list[int]) -> list[int]:
            given = torch.tensor([ids])
            with torch.inference_mode():
                rows = model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    max_new_tokens=config.max_new_tokens,
                    do_sample=False,
                    eos_token_id=stops,
                    pad_token_id=stops[0],
                    **options,
                )
            return rows[0, len(ids) :].tolist()

        return run

    return {name: method(options) for name, options in variants.items()}


def take_turns(methods: dict[str, Method], prompts: list[list[int]], rounds: int) -> tuple[dict[str, list[list[int]]], dict[str, list[list[float]]]]:
    """(tokens, seconds of each round) of each method, by prompt."""
    tokens: dict[str, list[list[int]]] = {name: [] for name in methods}
    times: dict[str, list[list[float]]] = {name: [] for name in methods}
    for index, ids in enumerate(prompts):
        for name, method in methods.items():
            tokens[name].append(method(ids))
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for number in range(rounds):
            for name in list(methods)[:: -1 if (index + number) % 2 else 1]:
                time.sleep(PAUSE)
                start = time.perf_counter()
                methods[name](ids)
                seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            times[name].append(values)
        print(f"prompt {index + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    return tokens, times


def summary(name: str, tokens: dict[str, list[list[int]]], times: dict[str, list[list[float]]]) -> dict:
    """Speed against `UNIT`, and where the tokens part from those of `REFERENCE`."""
    found = []
    own, unit = ([statistics.median(rounds) for rounds in times[method]] for method in (name, UNIT))
    for index, (one, other) in enumerate(zip(tokens[REFERENCE], tokens[name], strict=True)):
        position = acceptance.first_difference(one, other)
        if position is not None:
            found.append({"prompt": index, "position": position})
    count = sum(map(len, tokens[name]))
    return {
        "tokens": count,
        "seconds": round(sum(own), 4),
        "seconds_of_best_rounds": round(sum(map(min, times[name])), 4),
        "tokens_per_second": round(count / sum(own), 3),
        "speedup": round(sum(unit) / sum(own), 4),
        "speedup_of_prompts": [round(one / other, 4) for one, other in zip(unit, own, strict=True)],
        "identical": len(tokens[name]) - len(found),
        "differences": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="smollm2-135m-instruct")
    parser.add_argument("--head", default="smollm2-135m-instruct-mtp")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSON-lines files of prompts")
    parser.add_argument("--limit", type=int, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch; JAX takes the cores it is given")
    parser.add_argument("--out", default="experiments/results/transformers.json")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    prompts = prompts_lib.read(args.prompts, limit=args.limit)
    backbone = mtp_jax.load_backbone(args.backbone)
    head = mtp_jax.load_head(args.head, backbone)
    config = config_lib.DecodeConfig(max_new_tokens=args.max_new_tokens, num_draft=args.num_draft)
    config = generate_lib.with_stop_tokens(config, backbone)
    ids = [generate_lib.encode_prompt(backbone, prompt.text) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), backbone)
        methods = our_methods(backbone, head, config) | their_methods(Path(folder), config)
        load_before = os.getloadavg()[0]
        tokens, times = take_turns(methods, ids, args.rounds)
    summaries = {name: summary(name, tokens, times) for name in methods}
    result = {
        "experiment": "compare_transformers",
        "methods": summaries,
        "against_our_vanilla": {name: round(summaries[REFERENCE]["seconds"] / summaries[name]["seconds"], 4) for name in ("mtp_jax head", "mtp_jax hybrid")},
        "load_average": [round(load, 2) for load in (load_before, os.getloadavg()[0])],
        "not_measured": NOT_MEASURED,
        "settings": {
            **acceptance.run_settings(backbone, head, config, args.num_draft, 1),
            "prompts": [str(Path(path).name) for path in args.prompts],
            "prompts_digest": prompts_lib.digest(prompts),
            "count": len(prompts),
            "rounds": args.rounds,
            "threads": args.threads,
            "speedup_against": UNIT,
            "identical_to": REFERENCE,
        },
    }
    result["settings"]["versions"] |= {"torch": torch.__version__, "transformers": transformers.__version__, "jax": jax.__version__}
    files.write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
