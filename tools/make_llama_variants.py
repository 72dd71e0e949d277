#!/usr/bin/env python3
"""Writes tiny random models of the llama family, one for each way its files may differ, with float32 weights.

    tools/make_llama_variants.py FOLDER      writes FOLDER/llama-variants/<name>.gguf

Where llama.cpp refuses a variant that the file format allows, <name>.twin.gguf holds the same function in a form that it
takes, to compare with:
  partial RoPE      all elements turn, those beyond the first ones by an angle of almost nothing (rope_freqs of 1e30)
  value_length      the shorter of key and value heads padded with zeros
  yarn_beta_*       read by llama.cpp for its architecture mistral3 alone, whose graph is the same
"""

import dataclasses
import os
import sys

import numpy as np
import tiny_gguf

VOCABULARY = 288
LAYERS = 2


@dataclasses.dataclass
class Variant:
    width: int = 64
    heads: int = 4
    kv_heads: int = 4
    key_dim: int = 0          # 0: width / heads, and no key in the file
    value_dim: int = 0
    feed_forward: int = 96
    tied: bool = False
    fused: bool = False       # q, k and v in one matrix
    biases: tuple = ()        # of attn_q, attn_k, attn_v, attn_qkv, attn_output, ffn_gate, ffn_up, ffn_down
    rope_freqs: bool = False
    keys: dict = dataclasses.field(default_factory=dict)

    def head_dims(self):
        return self.key_dim or self.width // self.heads, self.value_dim or self.width // self.heads


ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v")
ALL_BIASES = ATTENTION_BIASES + ("attn_output", "ffn_gate", "ffn_up", "ffn_down")
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}

VARIANTS = {
    "tied": Variant(tied=True),
    "untied": Variant(),
    "gqa3_dim64": Variant(width=576, heads=9, kv_heads=3),
    "gqa4_dim64": Variant(width=256, heads=4, kv_heads=1),
    "gqa7_dim36": Variant(width=504, heads=14, kv_heads=2),
    "gqa1_dim80": Variant(width=160, heads=2, kv_heads=2),
    "attention_biases": Variant(kv_heads=2, biases=ATTENTION_BIASES),
    "all_biases": Variant(kv_heads=2, biases=ALL_BIASES),
    "fused": Variant(kv_heads=2, fused=True),
    "fused_bias": Variant(kv_heads=2, fused=True, biases=("attn_qkv",)),
    "fused_split_biases": Variant(kv_heads=2, fused=True, biases=ATTENTION_BIASES),
    "rope_freqs": Variant(rope_freqs=True, keys={"rope.freq_base": 500000.0}),
    "linear": Variant(keys={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear_old_key": Variant(keys={"rope.scale_linear": 2.0}),
    "no_scaling": Variant(keys={"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "yarn": Variant(keys=YARN),
    "yarn_attn_factor": Variant(keys=YARN | {"rope.scaling.attn_factor": 0.8}),
    "yarn_betas": Variant(keys=YARN | {"rope.scaling.yarn_beta_fast": 12.0, "rope.scaling.yarn_beta_slow": 2.0,
                                       "rope.scaling.yarn_log_multiplier": 0.7}),
    "yarn_rope_freqs": Variant(rope_freqs=True, keys=YARN),
    "partial_rope": Variant(width=128, keys={"rope.dimension_count": 12}),
    "key_length": Variant(key_dim=40, value_dim=40, kv_heads=2),
    "short_values": Variant(key_dim=32, value_dim=16, kv_heads=2),
    "long_values": Variant(key_dim=16, value_dim=32, kv_heads=2),
    "k_quants": Variant(width=256, heads=4, kv_heads=2, feed_forward=512),  # rows of 256 can be K-quantised
}


def random_tensors(v, seed):
    """{name: array}; matrices as [out, in]"""
    random = np.random.default_rng(seed)
    key_dim, value_dim = v.head_dims()
    q, k, val = v.heads * key_dim, v.kv_heads * key_dim, v.kv_heads * value_dim

    def matrix(rows, columns, gain=1.0):
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def vector(size, mean, deviation):
        return (mean + deviation * random.standard_normal(size)).astype(np.float32)

    out = {"token_embd.weight": random.standard_normal((VOCABULARY, v.width)).astype(np.float32),
           "output_norm.weight": vector(v.width, 1, 0.1)}
    if not v.tied:
        out["output.weight"] = matrix(VOCABULARY, v.width)
    if v.rope_freqs:
        out["rope_freqs.weight"] = random.uniform(1, 8, key_dim // 2).astype(np.float32)
    for i in range(LAYERS):
        p = f"blk.{i}."
        sizes = {"attn_q": (q, v.width), "attn_k": (k, v.width), "attn_v": (val, v.width),
                 "attn_output": (v.width, v.heads * value_dim), "ffn_gate": (v.feed_forward, v.width),
                 "ffn_up": (v.feed_forward, v.width), "ffn_down": (v.width, v.feed_forward)}
        # large queries and keys, so that attention is far from an average
        weights = {name: matrix(*size, 2.0 if name in ("attn_q", "attn_k") else 1.0) for name, size in sizes.items()}
        biases = {name: vector(size[0], 0, 0.5) for name, size in sizes.items() if name in v.biases}
        if v.fused:
            weights["attn_qkv"] = np.concatenate([weights.pop(name) for name in ATTENTION_BIASES])
            if "attn_qkv" in v.biases:
                biases["attn_qkv"] = vector(q + k + val, 0, 0.5)
        out |= {f"{p}{name}.weight": array for name, array in weights.items()}
        out |= {f"{p}{name}.bias": array for name, array in biases.items()}
        out |= {f"{p}{name}.weight": vector(v.width, 1, 0.1) for name in ("attn_norm", "ffn_norm")}
    return out


def write(path, v, tensors, architecture="llama"):
    def fill(writer):
        writer.add_name(os.path.basename(path).removesuffix(".gguf"))
        writer.add_context_length(512)
        writer.add_embedding_length(v.width)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(v.feed_forward)
        writer.add_head_count(v.heads)
        writer.add_head_count_kv(v.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(VOCABULARY)
        if v.key_dim:
            writer.add_key_length(v.key_dim)
            writer.add_value_length(v.value_dim)
        for key, value in v.keys.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{architecture}.{key}", value)
        tiny_gguf.add_byte_vocabulary(writer, VOCABULARY, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
                                      "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")
        for name, array in tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(array))

    tiny_gguf.write(path, architecture, fill)


def pad_heads(matrix, heads, dim):
    """Rows of each head padded with rows of zeros to `dim`."""
    split = matrix.reshape(heads, -1, matrix.shape[1])
    return np.pad(split, ((0, 0), (0, dim - split.shape[1]), (0, 0))).reshape(heads * dim, -1)


def padded_twin(v, tensors):
    key_dim, value_dim = v.head_dims()
    dim = max(key_dim, value_dim)
    out = dict(tensors)
    for i in range(LAYERS):
        p = f"blk.{i}."
        # scores are scaled by 1 / sqrt(dim) there
        gain = np.float32(np.sqrt(dim / key_dim))
        out[p + "attn_q.weight"] = pad_heads(tensors[p + "attn_q.weight"], v.heads, dim) * gain
        out[p + "attn_k.weight"] = pad_heads(tensors[p + "attn_k.weight"], v.kv_heads, dim)
        out[p + "attn_v.weight"] = pad_heads(tensors[p + "attn_v.weight"], v.kv_heads, dim)
        out[p + "attn_output.weight"] = pad_heads(tensors[p + "attn_output.weight"].T, v.heads, dim).T
    # angles are base ** (-2 i / dim) there
    keys = {"rope.freq_base": float(10000.0 ** (dim / key_dim))}
    return dataclasses.replace(v, key_dim=dim, value_dim=dim, keys=keys), out


def full_rope_twin(v, tensors):
    key_dim = v.head_dims()[0]
    turning = v.keys["rope.dimension_count"]
    freqs = np.where(np.arange(key_dim // 2) < turning // 2, 1, 1e30).astype(np.float32)
    keys = {"rope.freq_base": float(10000.0 ** (key_dim / turning))}
    return dataclasses.replace(v, keys=keys), tensors | {"rope_freqs.weight": freqs}


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = os.path.join(sys.argv[1], "llama-variants")
    os.makedirs(folder, exist_ok=True)
    for seed, (name, v) in enumerate(VARIANTS.items()):
        tensors = random_tensors(v, seed)
        write(os.path.join(folder, name + ".gguf"), v, tensors)
        twin = os.path.join(folder, name + ".twin.gguf")
        if name == "partial_rope":
            write(twin, *full_rope_twin(v, tensors))
        elif name == "yarn_betas":
            write(twin, v, tensors, architecture="mistral3")
        elif name in ("short_values", "long_values"):
            write(twin, *padded_twin(v, tensors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
