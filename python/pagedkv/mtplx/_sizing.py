"""How large a cache is, and becomes: MTPLX's rules, by its names."""

from __future__ import annotations

from pagedkv import _pagedkv
from pagedkv.mtplx._environment import env_int, env_strict_int, env_truthy

DYNAMIC = "MTPLX_DYNAMIC_PAGED_KV"


def _blocks(tokens: int, block_size: int) -> int:
    return -(-int(tokens) // block_size)


def window_tokens() -> int:
    """MTPLX_CONTEXT_WINDOW_TOKENS; 0: none."""
    return min(2**31 - 1, max(0, env_int("MTPLX_CONTEXT_WINDOW_TOKENS", 0)))


def paged_grown_blocks(current_blocks: int, required_tokens: int, block_size: int) -> int:
    """Blocks that a cache of current_blocks grows to so that required_tokens fit: what is required, or half as many
    more, or one more; not beyond MTPLX_CONTEXT_WINDOW_TOKENS unless more is required."""
    size = max(1, int(block_size))
    return _pagedkv.grown_pages(
        int(current_blocks), _blocks(required_tokens, size), _blocks(window_tokens(), size)
    )


def _dynamic_paged_growth_blocks(
    *, block_size: int, current_blocks: int, required_tokens: int
) -> int | None:
    """paged_grown_blocks(); None where growth is off."""
    if not env_truthy(DYNAMIC):
        return None
    return paged_grown_blocks(current_blocks, required_tokens, block_size)


def _dynamic_paged_num_blocks(
    *, block_size: int, configured_blocks: int, request_tokens: int | None = None
) -> int:
    """Blocks that a cache starts with: those configured; where growth is on, as many more as the coming request
    (MTPLX_DYNAMIC_PAGED_KV_TOKENS where request_tokens is None) and _MIN_BLOCKS, _PREVIOUS_HIGH_WATER, _MARGIN ask."""
    configured = int(configured_blocks)
    if not env_truthy(DYNAMIC):
        return configured
    if request_tokens is None:
        request_tokens = env_int(f"{DYNAMIC}_TOKENS", 0)
    return _pagedkv.initial_num_blocks(
        configured,
        int(block_size),
        env_int(f"{DYNAMIC}_MIN_BLOCKS", configured),
        int(request_tokens),
        env_int(f"{DYNAMIC}_PREVIOUS_HIGH_WATER", 0),
        env_int(f"{DYNAMIC}_MARGIN", 128),
    )


def paged_lease_capacity_after(
    capacity_tokens: int,
    block_size: int,
    *,
    prompt_tokens: int,
    reserved_tokens: int,
    repages: bool,
) -> int:
    """Tokens of capacity that a live cache ends a prefill with: grown where the prompt does not fit, and, where the
    cache is installed again with a reservation and growth is on, for that too."""
    size, capacity = max(1, int(block_size)), int(capacity_tokens)
    wanted = [int(prompt_tokens)]
    if repages and env_truthy(DYNAMIC):
        wanted.append(
            size
            * _dynamic_paged_num_blocks(
                block_size=size,
                configured_blocks=env_strict_int("MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS", 1024),
                request_tokens=int(reserved_tokens),
            )
        )
    for tokens in wanted:
        if tokens > capacity:
            capacity = size * paged_grown_blocks(capacity // size, tokens, size)
    return capacity


# What a quantised cache costs to attend. MTPLX asks these before a request runs; ours reads pages as they are, at every
# offset, whatever the shape, and keeps nothing beside them.


def kv_quant_decode_route(
    bits: int, *, route_offset: int, attention_shape: tuple[int, int, int, int] | None
) -> str:
    """Which way a request attends over quantised pages: always "kernel", from the pages themselves."""
    return "kernel"


def kv_quant_kernel_q_len(bits: int, attention_shape: tuple[int, int, int, int]) -> int:
    """The most query rows that a call over quantised pages takes. (query heads, kv heads, head_dim of K, of V) -> any
    number, told as 2**31 - 1; 0 where query heads are no multiple of kv heads."""
    query_heads, kv_heads = int(attention_shape[0]), int(attention_shape[1])
    return 0 if kv_heads < 1 or query_heads % kv_heads else 2**31 - 1


def kv_quant_working_copy_peak_rows(
    *, existing_rows: int, first_offset: int, last_offset: int, capacity_rows: int, block_size: int
) -> int:
    """Rows of a working copy beside the pages, at its peak: none."""
    return 0
