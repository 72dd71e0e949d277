"""MTPLX's Paged KV Cache by its own names, over our pages. docs/mtplx.md says what is equal, better and absent."""
