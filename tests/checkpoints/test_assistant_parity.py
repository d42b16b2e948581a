"""Heads in the form of Gemma 4's assistants against transformers' own class, on tiny random models, both ways.

transformers is an exact oracle only for single queries over K/V cut by hand: with its own bookkeeping a sliding layer sees
two slots more than the window, and after a rejection a slot of the rejected draft is seen.
"""

import importlib.util
from pathlib import Path

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers", minversion="5.24", reason="parity with transformers needs transformers with Gemma 4 assistants")

from mtp_jax import config as config_lib  # noqa: E402
from mtp_jax import drafters  # noqa: E402
from mtp_jax.checkpoints import assistant, heads, hf, load  # noqa: E402
from mtp_jax.decoding import generate  # noqa: E402
from mtp_jax.models import backbone as backbone_lib  # noqa: E402
from mtp_jax.models import head as head_lib  # noqa: E402

_spec = importlib.util.spec_from_file_location("make_golden", Path(__file__).resolve().parent.parent / "golden" / "make_golden.py")
assert _spec is not None and _spec.loader is not None
make_golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_golden)

S, F = make_golden.S, make_golden.F
WINDOW, M = 5, 4
LENGTHS = (1, 3, 4, 5, 6, 11)  # slots 0..p: less than the window, as many, and more
SHARED = ("vocab_size", "num_key_value_heads", "head_dim", "sliding_window", "attention_k_eq_v", "global_head_dim", "num_global_key_value_heads")
# name -> backbone, head layers, centroids; E2B's backbone (shared K/V, own inputs) and 31B's (values from keys)
CASES = {
    "own table": ("gemma4", [S, F, S, F], None),
    "centroids": ("gemma4-31b", [S, S, S, F], dict(use_ordered_embeddings=True, num_centroids=8, centroid_intermediate_top_k=3)),
}


def make_backbone(name, folder):
    """transformers' model, and the same one loaded by us."""
    model = make_golden.make_model(name, seed=11)
    model.save_pretrained(folder)
    config = hf.read_config(folder)
    params = hf.read_params(folder, config)
    return model, load.LoadedBackbone(name, config, params, fakes.Tokenizer(), load.fingerprint(config, params))  # type: ignore[arg-type]


def make_assistant(name, kinds, ordered):
    """A random assistant for a backbone of make_golden: norms, scalars and the order of the tokens random, too."""
    fields = make_golden.MODELS[name][1]
    text = dict(hidden_size=10, intermediate_size=14, num_attention_heads=8, num_hidden_layers=len(kinds), layer_types=kinds, initializer_range=0.3)
    text |= {field: fields[field] for field in (*SHARED, "rope_parameters", "max_position_embeddings") if field in fields}
    text |= dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=len(kinds))
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**text), backbone_hidden_size=fields["hidden_size"], **(ordered or {})
    )
    torch.manual_seed(3)
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in path or "layer_scalar" in path:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif "projection" in path or "centroids" in path or "embed_tokens" in path:
                tensor.copy_(0.3 * torch.randn_like(tensor))
            if "q_norm" in path:
                tensor.mul_(0.3)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(fields["vocab_size"]))
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    name, kinds, ordered = CASES[request.param]
    folder = tmp_path_factory.mktemp("pair")
    model, backbone = make_backbone(name, folder / "backbone")
    theirs = make_assistant(name, kinds, ordered)
    theirs.save_pretrained(folder / "assistant")
    head = load.load_head(folder / "assistant", backbone)
    tokens = np.random.default_rng(5).integers(2, backbone.config.vocab_size, 14)
    return model, backbone, theirs, head, tokens


def draft(model, theirs, tokens, slots):
    """transformers' drafts after `slots` cached tokens, with tokens[slots] pending: logits, hidden states and greedy tokens of M steps."""
    with torch.no_grad():
        output = model(torch.tensor(tokens[None, :slots]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        hidden, token = output.hidden_states[-1][:, -1:], torch.tensor(tokens[None, slots : slots + 1])
        cut = {F: slice(0, slots), S: slice(max(0, slots + 1 - WINDOW), slots)}  # slot `slots`, the query's, is the window's last
        kv = {kind: tuple(part[:, :, cut[kind]] for part in output.shared_kv_states[kind]) for kind in (F, S)}
        steps = []
        for _ in range(M):
            inputs = torch.cat([model.get_input_embeddings()(token), hidden], dim=-1)
            out = theirs(inputs_embeds=inputs, position_ids=torch.tensor([[slots]]), shared_kv_states=kv)
            hidden, token = out.last_hidden_state, out.logits.argmax(dim=-1)
            steps.append((out.logits[0, 0].numpy(), hidden[0, 0].numpy(), int(token)))
    return steps


def ours(backbone, head, tokens):
    """The same by us, in the layouts of the decode loop; one program for all lengths."""
    runtime = generate.make_runtime(backbone, head)
    module, params = runtime.drafter.head, runtime.drafter_params
    output = jax.jit(backbone_lib.Backbone(backbone.config).apply)({"params": backbone.params}, tokens[None])
    table = backbone.params["embed"]["embedding"]
    inverse = np.argsort(head.draft_ids)

    @jax.jit
    def run(slots):
        cache = output.cache.replace(lengths=slots[None])
        context = drafters.Context(
            tokens=jnp.asarray(tokens)[None],
            pending=jnp.asarray(tokens)[slots][None],
            hidden=output.hidden[:, slots - 1],
            cache=cache,
            backbone_params=runtime.step_params,
        )
        proposal, _ = runtime.drafter.draft(params, (), context, config_lib.DecodeConfig(num_draft=M))
        drafts = proposal.tokens
        hidden, token, steps = context.hidden[:, None], context.pending[:, None], []
        keys, values = ({donor: part[donor] for donor in head.config.donors} for part in (cache.keys, cache.values))
        for k in range(M):
            out = module.apply({"params": params.head}, table[token], hidden, keys, values, slots[None, None] - 1, ())
            hidden, token = out.hidden, drafts[:, k : k + 1]
            steps.append((out.logits[0, 0], out.hidden[0, 0], token[0, 0]))
        return steps

    return lambda slots: [(np.asarray(logits)[inverse], hidden, int(token)) for logits, hidden, token in run(jnp.asarray(slots))]


def test_every_draft_step(case):
    """Each step with its own draft and hidden state of the step before."""
    model, backbone, theirs, head, tokens = case
    run = ours(backbone, head, tokens)
    drafted = set()
    for slots in LENGTHS:
        for k, (found, expected) in enumerate(zip(run(slots), draft(model, theirs, tokens, slots), strict=True)):
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=2e-4, err_msg=f"logits of draft {k + 1} after {slots} slots")
            np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=2e-4, err_msg=f"hidden state of draft {k + 1} after {slots} slots")
            assert found[2] == expected[2]
            drafted.add(found[2])
    assert len(drafted) > 3  # not one token always


def test_what_was_read(case):
    _, backbone, theirs, head, _ = case
    assert head.config.query_position == "pending" and not head.config.pointer and head.config.width == 10
    assert [backbone.config.layer_types[donor] for donor in head.config.donors] == [
        kind.removesuffix("_attention") for kind in theirs.config.text_config.layer_types
    ]
    assert all(donor == backbone.config.donor(backbone.config.layer_types[donor]) for donor in head.config.donors)
    assert head.config.output == ("centroids" if theirs.config.use_ordered_embeddings else "own")


def test_it_drafts_in_the_decode_loop(case):
    """The text is transformers' without an assistant; each step keeps what transformers' drafts have in common with it."""
    model, backbone, theirs, head, tokens = case
    prompt, config = tokens[:7].tolist(), config_lib.DecodeConfig(max_new_tokens=M + 2, num_draft=M)
    output = generate.run(generate.make_runtime(backbone, head), [prompt], config).outputs[0]
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=M + 2, do_sample=False, eos_token_id=None)[0].tolist()
    assert output.tokens == expected[7:]
    slots, kept = 7, np.zeros(M, int)
    while slots < len(expected) - 1:
        drafts = [token for _, _, token in draft(model, theirs, np.asarray(expected), slots)]
        right = np.cumprod([a == b for a, b in zip(drafts, expected[slots + 1 :], strict=False)]).sum()
        kept[:right] += 1
        slots += 1 + right
    assert output.accepted == kept.tolist()


def test_every_draft_in_the_decode_loop(case):
    """One to five tokens are committed a step, so hidden states come from each row of a verify pass, over leftovers of rejected drafts.

    The text is, of 256, the one with most tokens that differ from the one before: where a tiny model repeats itself, so do its hidden states.
    """
    model, backbone, theirs, head, _ = case
    gaps = [3, 5, 2, 1, 3, 4, 5, 1]
    prompts = np.random.default_rng(5).integers(2, backbone.config.vocab_size, (256, 4))
    with torch.no_grad():
        texts = model.generate(torch.tensor(prompts), max_new_tokens=sum(gaps) + 1, do_sample=False, eos_token_id=None).numpy()
    changes = (np.diff(texts) != 0).sum(axis=1)
    assert changes.max() > 10
    text = texts[changes.argmax()]
    for (_, slots), found in fakes.drafts_in_the_loop(generate.make_runtime(backbone, head), text[None], 4, [gaps]).items():
        assert found == [token for _, _, token in draft(model, theirs, text, slots)], f"after {slots} slots"


def test_export_and_back(case, tmp_path):
    """What we write, transformers loads: the same state dict, so the same drafts; and we read it back."""
    model, backbone, theirs, head, tokens = case
    assistant.write(tmp_path / "out", head, backbone)
    loaded, info = transformers.Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.set_attn_implementation("eager")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()
    }
    for name, tensor in theirs.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[name].numpy(), tensor.numpy(), err_msg=name)
    for slots in (3, 11):
        for found, expected in zip(draft(model, loaded, tokens, slots), draft(model, theirs, tokens, slots), strict=True):
            np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)  # the last bits depend on where weights lie in memory
            np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-4)
            assert found[2] == expected[2]
    again = load.load_head(tmp_path / "out", backbone)
    assert again.config == head.config and jax.tree.all(jax.tree.map(np.array_equal, again.params, head.params))
    np.testing.assert_array_equal(again.draft_ids, head.draft_ids)


def test_assisted_generation_in_transformers(case, tmp_path):
    """A head made here, of random numbers, loaded by name of its class: the text is that of the model alone."""
    model, backbone, _, read, tokens = case
    shapes = head_lib.param_shapes(read.config, backbone.config)
    params = {name: np.asarray(np.random.default_rng(8).normal(size=shape), np.float32) for name, shape in shapes.items()}
    head = load.LoadedHead("mine", read.config, heads.unflatten(params), read.draft_ids, backbone.fingerprint)
    assistant.write(tmp_path / "out", head, backbone, dtype="bfloat16")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(loaded).__name__ == "Gemma4AssistantForCausalLM"
    loaded.generation_config.num_assistant_tokens = 3
    prompt, settings = torch.tensor(tokens[None, :9]), dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    alone = model.generate(prompt, **settings)
    assert alone.shape[1] == 21
    assert model.generate(prompt, assistant_model=loaded, **settings).tolist() == alone.tolist()
