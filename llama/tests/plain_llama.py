"""A Llama by the book, in float64 NumPy: from a checkpoint's tensors to the logits of a text."""

import numpy as np
from oracles import dense_attention


def rotate(x, frequencies):
    """Rotary embedding of x (n, h, d) at positions 0 … n − 1: pairs as complex numbers."""
    a, b = np.split(x, 2, axis=-1)
    angles = np.arange(len(x))[:, None] * frequencies
    z = (a + 1j * b) * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def plain_logits(checkpoint, tokens, frequencies):
    """(n, vocabulary) for tokens (n,); `frequencies` (head_dim / 2,) as the configuration says."""
    c = checkpoint.config

    def read(name):
        return checkpoint.read(name).astype(np.float64)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_epsilon) * read(name)

    def linear(x, name):
        bias = f"{name}.bias"
        y = x @ read(f"{name}.weight").T
        return y + read(bias) if bias in checkpoint.shapes else y

    x = read("model.embed_tokens.weight")[tokens]
    causal = np.tri(len(tokens), dtype=bool)[None, None]
    for i in range(c.layers):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            linear(y, f"{at}self_attn.{n}_proj").reshape(len(x), -1, c.head_dim) for n in "qkv"
        )
        q, k = rotate(q, frequencies), rotate(k, frequencies)
        out = dense_attention(q[None], k[None], v[None], mask=causal)[0]
        x = x + linear(out.reshape(len(x), -1), at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = linear(y, at + "mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(y, at + "mlp.up_proj"), at + "mlp.down_proj"
        )
    head = "model.embed_tokens.weight" if c.tied else "lm_head.weight"
    return norm(x, "model.norm.weight") @ read(head).T
