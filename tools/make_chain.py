#!/usr/bin/env python3
"""Writes chain.gguf, a tiny llama-family model whose text is known exactly.

    tools/make_chain.py FOLDER

Tokens are bytes and the next byte is a fixed table of the last one: A..Z in a ring, 0..9 in a ring, the four bytes of
an emoji in a ring, p q r s each equally likely after any of them, x y z . then end; anything else ends at once. So the
greedy answer to ABC is DEFGHIJ... The log-probability of a forced token is -1.25e-5, of one of p q r s -1.3863.
Attention and feed-forward end in zeros and have no effect on the text.
"""

import os
import pathlib
import sys

import gguf
import numpy as np

EOS = 256
VOCABULARY = 288  # bytes, the end token and padding
EMBEDDING = 288
HEADS, KV_HEADS = 9, 3
HEAD_DIM = EMBEDDING // HEADS
FEED_FORWARD = 32


def printable_bytes():
    """The printable character that stands for each byte in a byte-level BPE vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def successors():
    """For each token the equally likely next ones; a token that is not in it is followed by the end."""
    table = {}
    for ring in (bytes(range(ord("A"), ord("Z") + 1)), b"0123456789", "\N{LLAMA}".encode()):
        for i, byte in enumerate(ring):
            table[byte] = [ring[(i + 1) % len(ring)]]
    for byte in b"pqrs":
        table[byte] = list(b"pqrs")
    for byte, following in zip(b"xyz", b"yz."):
        table[byte] = [following]
    return table


def add_metadata(writer):
    writer.add_name("chain")
    writer.add_context_length(8192)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCABULARY)


def add_tokenizer(writer):
    characters = printable_bytes()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(characters + ["<|end|>"] + [f"<|pad{i}|>" for i in range(VOCABULARY - 257)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * (VOCABULARY - 256))
    writer.add_token_merges([f"{characters[0]} {characters[0]}"])  # loaders want one; no text has two NULs in a row
    writer.add_eos_token_id(EOS)
    writer.add_bos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[-1].content }}")


def add_weights(writer):
    output = np.zeros((VOCABULARY, EMBEDDING), np.float32)
    table = successors()
    for token in range(VOCABULARY):
        output[table.get(token, [EOS]), token] = 1
    random = np.random.default_rng(0)

    def noise(*shape):
        return (random.standard_normal(shape) / 16).astype(np.float32)

    ones, kv = np.ones(EMBEDDING, np.float32), KV_HEADS * HEAD_DIM
    for name, tensor in (
            ("token_embd", np.eye(VOCABULARY, EMBEDDING, dtype=np.float32)),
            ("output", output),
            ("output_norm", ones),
            ("blk.0.attn_norm", ones),
            ("blk.0.ffn_norm", ones),
            ("blk.0.attn_q", noise(EMBEDDING, EMBEDDING)),
            ("blk.0.attn_k", noise(kv, EMBEDDING)),
            ("blk.0.attn_v", noise(kv, EMBEDDING)),
            ("blk.0.attn_output", np.zeros((EMBEDDING, EMBEDDING), np.float32)),
            ("blk.0.ffn_gate", noise(FEED_FORWARD, EMBEDDING)),
            ("blk.0.ffn_up", noise(FEED_FORWARD, EMBEDDING)),
            ("blk.0.ffn_down", np.zeros((EMBEDDING, FEED_FORWARD), np.float32))):
        writer.add_tensor(name + ".weight", tensor)


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = pathlib.Path(sys.argv[1]) / "chain.gguf"
    part = target.with_suffix(".part")  # a cut-off run leaves nothing that looks finished
    writer = gguf.GGUFWriter(part, "llama")
    add_metadata(writer)
    add_tokenizer(writer)
    add_weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
