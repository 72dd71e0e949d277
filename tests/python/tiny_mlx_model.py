"""A random Llama of mlx-lm, small enough for a CPU, the same each time it is built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

mx: Any = import_module("mlx.core")
llama: Any = import_module("mlx_lm.models.llama")
tree_map: Any = import_module("mlx.utils").tree_map

VOCABULARY = 512


def tiny_model(
    *, sliding_window: int | None = None, dtype: Any = None, head_dim: int = 32, layers: int = 3
) -> Any:
    """4 query heads on 2 key/value heads; with a window, layers but the first have it. Weights are
    as large as keeps logits apart, so that tokens do not hang on rounding."""
    mx.random.seed(7)
    kinds = ["full_attention"] * layers
    if sliding_window is not None:
        kinds[1:] = ["sliding_attention"] * (layers - 1)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=128,
            num_hidden_layers=layers,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
            layer_types=kinds,
            sliding_window=sliding_window,
        )
    )
    model.update(tree_map(lambda w: w * 2 if w.ndim > 1 else w, model.parameters()))
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def tiny_prompt(length: int) -> Any:
    """`length` token ids, each all but random."""
    return mx.array([(i * 131 + i * i * 17 + 5) % VOCABULARY for i in range(length)])
