#!/usr/bin/env python3
"""Writes tiny random models, one for each family and each way in which its files may differ, with float32 weights.

    tools/make_model_variants.py FOLDER      writes FOLDER/model-variants/<name>.gguf

Where llama.cpp refuses a variant that the file format allows, <name>.twin.gguf holds the same function in a form that it
takes, to compare with:
  partial RoPE      all elements turn, those beyond the first ones by an angle of almost nothing (rope_freqs of 1e30)
  value_length      the shorter of key and value heads padded with zeros
  yarn_beta_*       read by llama.cpp for its architecture mistral3 alone, whose graph is the same
  sliding_window    of llama files ignored by llama.cpp; its granite_swa has the same graph, with sinks that weigh nothing
"""

import dataclasses
import os
import sys

import numpy as np
import tiny_gguf

VOCABULARY = 288


@dataclasses.dataclass
class Variant:
    family: str = "llama"
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 4
    key_dim: int = 0          # 0: width / heads, and no key in the file
    value_dim: int = 0
    feed_forward: int = 96
    tied: bool = False
    fused: bool = False       # q, k and v in one matrix
    biases: tuple = ()        # of attn_q, attn_k, attn_v, attn_qkv, attn_output, ffn_gate, ffn_up, ffn_down
    output_bias: bool = False
    rope_freqs: bool = False
    head_norms: bool = False  # of q and k
    post_norms: bool = False  # after attention and feed-forward
    keys: dict = dataclasses.field(default_factory=dict)

    def head_dims(self):
        return self.key_dim or self.width // self.heads, self.value_dim or self.width // self.heads


ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v")
ALL_BIASES = ATTENTION_BIASES + ("attn_output", "ffn_gate", "ffn_up", "ffn_down")
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}

WINDOW = {"attention.sliding_window": 96}
GEMMA_KEYS = WINDOW | {"rope.freq_base": 1000000.0, "rope.freq_base_swa": 20000.0}


def qwen3(kv_heads=2, key_dim=40, value_dim=40, **rest):
    return Variant("qwen3", kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, head_norms=True, **rest)


def gemma3(layers=7, tied=True, kv_heads=1, keys=GEMMA_KEYS, **rest):
    return Variant("gemma3", layers=layers, tied=tied, kv_heads=kv_heads, key_dim=32, value_dim=32, head_norms=True,
                   post_norms=True, keys=keys, **rest)


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
    "window": Variant(kv_heads=2, keys={"attention.sliding_window": 100}),
    "qwen2": Variant("qwen2", kv_heads=2, tied=True, biases=ATTENTION_BIASES, keys={"rope.freq_base": 1000000.0}),
    "qwen2_untied": Variant("qwen2", width=504, heads=14, kv_heads=2, biases=ATTENTION_BIASES, output_bias=True),
    "qwen2_yarn": Variant("qwen2", kv_heads=1, biases=ATTENTION_BIASES, keys=YARN),
    "qwen3": qwen3(tied=True),
    "qwen3_untied": qwen3(kv_heads=1, key_dim=64, value_dim=64),
    "qwen3_fused": qwen3(fused=True),
    "qwen3_yarn": qwen3(keys=YARN),
    "gemma3": gemma3(),
    "gemma3_untied": gemma3(tied=False, kv_heads=2),
    "gemma3_old_keys": gemma3(keys=WINDOW),
    "gemma3_pattern": gemma3(layers=5, keys=WINDOW | {"attention.sliding_window_pattern": [True, False, False, True, True]}),
    "gemma3_period": gemma3(layers=5, keys=WINDOW | {"attention.sliding_window_pattern": 3}),
    "gemma3_all_windows": gemma3(layers=3),
    "gemma3_no_window": gemma3(layers=2, keys={"rope.freq_base": 1000000.0}),
    "gemma3_linear": gemma3(keys=GEMMA_KEYS | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "gemma3_softcap": gemma3(layers=2, keys=GEMMA_KEYS | {"final_logit_softcapping": 3.0}),
    "gemma3_wide_scale": gemma3(layers=62, feed_forward=32),
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
    if v.output_bias:
        out["output.bias"] = vector(VOCABULARY, 0, 0.5)
    if v.rope_freqs:
        out["rope_freqs.weight"] = random.uniform(1, 8, key_dim // 2).astype(np.float32)
    norms = {"attn_norm": v.width, "ffn_norm": v.width}
    if v.head_norms:
        norms |= {"attn_q_norm": key_dim, "attn_k_norm": key_dim}
    if v.post_norms:
        norms |= {"post_attention_norm": v.width, "post_ffw_norm": v.width}
    for i in range(v.layers):
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
        out |= {f"{p}{name}.weight": vector(size, 1, 0.1) for name, size in norms.items()}
    return out


def write(path, v, tensors):
    def fill(writer):
        writer.add_name(os.path.basename(path).removesuffix(".gguf"))
        writer.add_context_length(512)
        writer.add_embedding_length(v.width)
        writer.add_block_count(v.layers)
        writer.add_feed_forward_length(v.feed_forward)
        writer.add_head_count(v.heads)
        writer.add_head_count_kv(v.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(VOCABULARY)
        if v.key_dim:
            writer.add_key_length(v.key_dim)
            writer.add_value_length(v.value_dim)
        for key, value in v.keys.items():
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            add[type(value)](f"{v.family}.{key}", value)
        tiny_gguf.add_byte_vocabulary(writer, VOCABULARY, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
                                      "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")
        for name, array in tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(array))

    tiny_gguf.write(path, v.family, fill)


def pad_heads(matrix, heads, dim):
    """Rows of each head padded with rows of zeros to `dim`."""
    split = matrix.reshape(heads, -1, matrix.shape[1])
    return np.pad(split, ((0, 0), (0, dim - split.shape[1]), (0, 0))).reshape(heads * dim, -1)


def padded_twin(v, tensors):
    key_dim, value_dim = v.head_dims()
    dim = max(key_dim, value_dim)
    out = dict(tensors)
    for i in range(v.layers):
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


def windowed_twin(v, tensors):
    keys = v.keys | {"attention.sliding_window_pattern": [True] * v.layers, "logit_scale": 1.0}
    sinks = {f"blk.{i}.attn_sinks.weight": np.full(v.heads, -1e30, np.float32) for i in range(v.layers)}
    return dataclasses.replace(v, family="granite_swa", keys=keys), tensors | sinks


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = os.path.join(sys.argv[1], "model-variants")
    os.makedirs(folder, exist_ok=True)
    for seed, (name, v) in enumerate(VARIANTS.items()):
        tensors = random_tensors(v, seed)
        write(os.path.join(folder, name + ".gguf"), v, tensors)
        twin = os.path.join(folder, name + ".twin.gguf")
        if name == "partial_rope":
            write(twin, *full_rope_twin(v, tensors))
        elif name == "yarn_betas":
            write(twin, dataclasses.replace(v, family="mistral3"), tensors)
        elif name == "window":
            write(twin, *windowed_twin(v, tensors))
        elif name in ("short_values", "long_values"):
            write(twin, *padded_twin(v, tensors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
