#!/usr/bin/env python3
"""Writes chain.gguf: a model whose text is known exactly.

    tools/make_chain.py FOLDER

Each byte is a token and the next one follows from the last alone: A to Z in a ring, 0 to 9 in a ring, the four bytes of
the llama emoji in a ring (a character spread over four tokens), p q r s each equally likely after any of them, x y z .
and then the end, which also follows every other byte. Embeddings are unit vectors and the output matrix is the table
of successors; attention and feed-forward end in zero matrices, so that they run but change nothing.
"""

import os
import sys

import numpy as np
import tiny_gguf

VOCABULARY = WIDTH = 288
HEADS, KV_HEADS, FEED_FORWARD = 9, 3, 32
HEAD_DIM = WIDTH // HEADS
LLAMA = "\N{LLAMA}".encode()


def successors():
    """{byte: tokens that may follow, each as likely}"""
    table = {}
    for ring in (bytes(range(ord("A"), ord("Z") + 1)), bytes(range(ord("0"), ord("9") + 1)), LLAMA):
        for here, there in zip(ring, ring[1:] + ring[:1]):
            table[here] = [there]
    for here, there in zip(b"xyz", b"yz."):
        table[here] = [there]
    for here in b"pqrs":
        table[here] = list(b"pqrs")
    return table


def output_matrix():
    matrix = np.zeros((VOCABULARY, WIDTH), np.float32)
    table = successors()
    for token in range(VOCABULARY):
        matrix[table.get(token, [tiny_gguf.END]), token] = 1
    return matrix


def fill(writer):
    random = np.random.default_rng(0)

    def noise(*shape):
        return (random.standard_normal(shape) / 16).astype(np.float32)

    def ones():
        return np.ones(WIDTH, np.float32)

    writer.add_name("chain")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCABULARY)
    tiny_gguf.add_byte_vocabulary(writer, VOCABULARY, "{{ messages[-1].content }}")
    writer.add_tensor("token_embd.weight", np.eye(VOCABULARY, WIDTH, dtype=np.float32))
    writer.add_tensor("output.weight", output_matrix())
    writer.add_tensor("output_norm.weight", ones())
    writer.add_tensor("blk.0.attn_norm.weight", ones())
    writer.add_tensor("blk.0.ffn_norm.weight", ones())
    writer.add_tensor("blk.0.attn_q.weight", noise(HEADS * HEAD_DIM, WIDTH))
    writer.add_tensor("blk.0.attn_k.weight", noise(KV_HEADS * HEAD_DIM, WIDTH))
    writer.add_tensor("blk.0.attn_v.weight", noise(KV_HEADS * HEAD_DIM, WIDTH))
    writer.add_tensor("blk.0.attn_output.weight", np.zeros((WIDTH, HEADS * HEAD_DIM), np.float32))
    writer.add_tensor("blk.0.ffn_gate.weight", noise(FEED_FORWARD, WIDTH))
    writer.add_tensor("blk.0.ffn_up.weight", noise(FEED_FORWARD, WIDTH))
    writer.add_tensor("blk.0.ffn_down.weight", np.zeros((WIDTH, FEED_FORWARD), np.float32))


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    tiny_gguf.write(os.path.join(sys.argv[1], "chain.gguf"), "llama", fill)
    return 0


if __name__ == "__main__":
    sys.exit(main())
