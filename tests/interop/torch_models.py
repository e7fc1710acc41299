"""The three architectures in plain operations of PyTorch, with the parameters of a libfp8gpt model by their names."""
import torch
import torch.nn.functional as F


def norm(config, x, weights, name):
    if config.normalization == 0:
        return F.layer_norm(x, (x.shape[-1],), weights[name + ".weight"], weights[name + ".bias"], config.norm_eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weights[name + ".weight"]


def linear(x, weights, name):
    return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))


def rotate(x, theta):
    """x [batch, heads, length, head_dim]: pairs (i, i + head_dim / 2)."""
    length, head_dim = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    cosines = torch.cos(angles).repeat(1, 2).to(x.dtype)
    sines = torch.sin(angles).repeat(1, 2).to(x.dtype)
    low, high = x.chunk(2, -1)
    return x * cosines + torch.cat((-high, low), -1) * sines


def attention(config, x, weights, name, fused):
    batch, length, hidden = x.shape
    head_dim = hidden // config.heads
    queries, keys, values = linear(x, weights, name + ".qkv").split(
        [hidden, config.kv_heads * head_dim, config.kv_heads * head_dim], -1)
    queries = queries.view(batch, length, config.heads, head_dim).transpose(1, 2)
    keys = keys.view(batch, length, config.kv_heads, head_dim).transpose(1, 2)
    values = values.view(batch, length, config.kv_heads, head_dim).transpose(1, 2)
    if config.position == 0:
        queries = rotate(queries, config.rope_theta)
        keys = rotate(keys, config.rope_theta)
    keys = keys.repeat_interleave(config.heads // config.kv_heads, 1)
    values = values.repeat_interleave(config.heads // config.kv_heads, 1)
    if fused:
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    else:
        scores = queries @ keys.transpose(-1, -2) * head_dim ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ values
    return linear(mixed.transpose(1, 2).reshape(batch, length, hidden), weights, name + ".projection")


def feed_forward(config, x, weights, name):
    x = linear(x, weights, name + ".fc1")
    if config.activation == 0:
        x = F.gelu(x, approximate="tanh")
    else:
        gate, up = x.chunk(2, -1)
        x = F.silu(gate) * up
    return linear(x, weights, name + ".fc2")


def logits_of(config, weights, tokens, fused=False):
    x = weights["embedding.token.weight"][tokens]
    if config.position == 1:
        x = x + weights["embedding.position.weight"][: tokens.shape[1]]
    for layer in range(config.layers):
        name = f"layers.{layer}."
        x = x + attention(config, norm(config, x, weights, name + "attention_norm"), weights, name + "attention", fused)
        x = x + feed_forward(config, norm(config, x, weights, name + "ffn_norm"), weights, name + "ffn")
    x = norm(config, x, weights, "final_norm")
    return F.linear(x, weights["embedding.token.weight" if config.tied_embeddings else "output.weight"])


def loss_of(config, weights, tokens, targets, fused=False):
    """tokens, targets: int64 tensors [batch, length]; -1 does not count."""
    logits = logits_of(config, weights, tokens, fused)
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten(),
                           ignore_index=-1)
