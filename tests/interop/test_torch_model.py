"""Models against PyTorch with the same weights: losses, logits and every gradient of the three architectures.

Arguments: the shared libraries of fp8core and fp8gpt. Exits with 77 where PyTorch is missing.

FP32: loss, logits and each gradient within 1e-5 (of its norm) of PyTorch in FP32 and in FP64. BF16, whose weights and
activations are rounded to 2^-9: the loss within 2e-3 and each gradient within 3e-2 of PyTorch in FP64 with the same
weights; PyTorch's own BF16 autocast is printed beside it. Where the transformers package is there, its GPT-2, GPT-NeoX
and Llama must have the same logits as the plain ones.
"""
import sys

try:
    import numpy as np
    import torch
except ImportError as missing:
    print(f"skipped: {missing}; see requirements-torch.txt and the option interop_python")
    sys.exit(77)

from fp8gpt_ctypes import Model
from torch_models import logits_of, loss_of

core, gpt = sys.argv[1:3]
failures = 0


def expect(what, difference, bound):
    global failures
    if not difference <= bound:
        failures += 1
        print(f"FAILED {what}: {difference:.3g}, expected at most {bound:g}")


def relative(ours, theirs):
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-30))


def peer(config, weights, tokens, targets, dtype, autocast=False):
    """PyTorch's loss, logits and gradients."""
    leaves = {name: torch.tensor(value, dtype=dtype, requires_grad=True) for name, value in weights.items()}
    tokens = torch.from_numpy(tokens).long()
    targets = torch.from_numpy(targets).long()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(config, leaves, tokens, targets)
    loss.backward()
    with torch.no_grad():
        logits = logits_of(config, leaves, tokens).numpy()
    return loss.item(), logits, {name: leaf.grad.double().numpy() for name, leaf in leaves.items()}


def texts(config, sequences, length):
    generator = np.random.default_rng(7)
    tokens = generator.integers(0, config.vocabulary, (sequences, length), np.int32)
    targets = generator.integers(0, config.vocabulary, (sequences, length), np.int32)
    targets[generator.random(targets.shape) < 0.1] = -1
    return tokens, targets


def transformers_logits(config, weights, tokens):
    """The same model of the transformers package; None where it is missing."""
    try:
        import transformers
    except ImportError:
        return None
    transformers.logging.set_verbosity_error()
    hidden, heads = config.hidden, config.heads
    head_dim = hidden // heads
    common = {"vocab_size": config.vocabulary}
    state = {}
    tensors = {name: torch.tensor(value) for name, value in weights.items()}

    def copy(to, name, transpose=False):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in tensors:
                value = tensors[f"{name}.{part}"]
                state[f"{to}.{part}"] = value.T if transpose and part == "weight" else value

    if config.activation == 1:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=config.ffn_hidden, num_hidden_layers=config.layers,
            num_attention_heads=heads, num_key_value_heads=config.kv_heads, rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta, tie_word_embeddings=False, max_position_embeddings=config.sequence, **common))
        copy("model.embed_tokens", "embedding.token")
        copy("model.norm", "final_norm")
        copy("lm_head", "output")
        for i in range(config.layers):
            to, name = f"model.layers.{i}.", f"layers.{i}."
            qkv = tensors[name + "attention.qkv.weight"].split([hidden] + [config.kv_heads * head_dim] * 2)
            for part, value in zip("qkv", qkv):
                state[f"{to}self_attn.{part}_proj.weight"] = value
            gate, up = tensors[name + "ffn.fc1.weight"].chunk(2)
            state[to + "mlp.gate_proj.weight"] = gate
            state[to + "mlp.up_proj.weight"] = up
            copy(to + "self_attn.o_proj", name + "attention.projection")
            copy(to + "mlp.down_proj", name + "ffn.fc2")
            copy(to + "input_layernorm", name + "attention_norm")
            copy(to + "post_attention_layernorm", name + "ffn_norm")
    elif config.position == 1:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_embd=hidden, n_layer=config.layers, n_head=heads, n_inner=config.ffn_hidden, n_positions=config.sequence,
            layer_norm_epsilon=config.norm_eps, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **common))
        copy("transformer.wte", "embedding.token")
        copy("transformer.wpe", "embedding.position")
        copy("transformer.ln_f", "final_norm")
        copy("lm_head", "embedding.token")
        for i in range(config.layers):
            to, name = f"transformer.h.{i}.", f"layers.{i}."
            copy(to + "ln_1", name + "attention_norm")
            copy(to + "attn.c_attn", name + "attention.qkv", transpose=True)
            copy(to + "attn.c_proj", name + "attention.projection", transpose=True)
            copy(to + "ln_2", name + "ffn_norm")
            copy(to + "mlp.c_fc", name + "ffn.fc1", transpose=True)
            copy(to + "mlp.c_proj", name + "ffn.fc2", transpose=True)
    else:
        model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
            hidden_size=hidden, num_hidden_layers=config.layers, num_attention_heads=heads, rotary_pct=1.0,
            intermediate_size=config.ffn_hidden, layer_norm_eps=config.norm_eps, use_parallel_residual=False,
            hidden_act="gelu_new", rotary_emb_base=config.rope_theta, tie_word_embeddings=False,
            max_position_embeddings=config.sequence, **common))
        copy("gpt_neox.embed_in", "embedding.token")
        copy("gpt_neox.final_layer_norm", "final_norm")
        copy("embed_out", "embedding.token")
        for i in range(config.layers):
            to, name = f"gpt_neox.layers.{i}.", f"layers.{i}."
            copy(to + "input_layernorm", name + "attention_norm")
            copy(to + "post_attention_layernorm", name + "ffn_norm")
            copy(to + "attention.dense", name + "attention.projection")
            copy(to + "mlp.dense_h_to_4h", name + "ffn.fc1")
            copy(to + "mlp.dense_4h_to_h", name + "ffn.fc2")
            for part in ("weight", "bias"):
                # Theirs has queries, keys and values of a head side by side.
                value = tensors[f"{name}attention.qkv.{part}"]
                value = value.reshape(3, heads, head_dim, -1).transpose(0, 1).reshape(3 * hidden, -1)
                state[f"{to}attention.query_key_value.{part}"] = value if part == "weight" else value.flatten()
    lacking = model.load_state_dict(state, strict=False)
    assert not lacking.unexpected_keys, lacking.unexpected_keys
    assert all("rotary" in key or "bias" in key.split(".")[-1] or "masked" in key for key in lacking.missing_keys), lacking
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.double().numpy()


def check(preset, precision, sequences, length):
    changes = {"init_std": 0.06}
    model = Model(core, gpt, preset, precision, sequences, **changes)
    what = f"{preset} in {precision}"
    tokens, targets = texts(model.config, sequences, length)
    weights = model.weights()
    loss = model.train(tokens, targets)
    gradients = {name: value.astype(np.float64) for name, value in model.gradients().items()}
    inference = Model(core, gpt, preset, precision, sequences, inference=1, **changes)
    logits = inference.next(tokens[0], 0).astype(np.float64)
    right_loss, right_logits, right = peer(model.config, weights, tokens, targets, torch.float64)
    if precision == "fp32":
        peers = {"PyTorch in FP64": (right_loss, right_logits, right),
                 "PyTorch in FP32": peer(model.config, weights, tokens, targets, torch.float32)}
        bounds = (1e-5, 1e-5, 1e-5)
    else:
        peers = {"PyTorch in FP64": (right_loss, right_logits, right)}
        bounds = (2e-3, 3e-2, 3e-2)
    for name, (peer_loss, peer_logits, peer_gradients) in peers.items():
        differences = {key: relative(gradients[key], peer_gradients[key]) for key in gradients}
        expect(f"{what}, loss against {name}", abs(loss - peer_loss) / peer_loss, bounds[0])
        expect(f"{what}, logits against {name}", relative(logits, peer_logits[0, -1]), bounds[1])
        for key, difference in differences.items():
            expect(f"{what}, gradient of {key} against {name}", difference, bounds[2])
        print(f"{what} against {name}: loss {loss:.7f} and {peer_loss:.7f}, logits {relative(logits, peer_logits[0, -1]):.2g}, "
              f"gradients at most {max(differences.values()):.2g} apart")
    if precision == "bf16":
        cast_loss, _, cast = peer(model.config, weights, tokens, targets, torch.float32, autocast=True)
        print(f"  PyTorch's autocast: loss {cast_loss:.7f}, gradients at most "
              f"{max(relative(cast[key], right[key]) for key in right):.2g} apart")
    else:
        theirs = transformers_logits(model.config, weights, tokens)
        if theirs is None:
            print("  transformers is missing: not compared with it")
        else:
            expect(f"{what}, PyTorch's logits against transformers", relative(right_logits, theirs), 1e-5)
            print(f"  transformers: logits {relative(right_logits, theirs):.2g} apart")
    model.close()
    inference.close()


torch.manual_seed(1)
for preset in ("tiny-gpt", "tiny-gpt2", "tiny-llama"):
    for precision in ("fp32", "bf16"):
        check(preset, precision, 3, 67)
sys.exit(1 if failures else 0)
