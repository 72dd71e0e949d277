"""PAGEDKV_TEST_WITHOUT_MLX hides mlx, as on a machine that does not have it."""

from __future__ import annotations

import os
import sys

if os.environ.get("PAGEDKV_TEST_WITHOUT_MLX"):
    for name in ("mlx", "mlx.core", "mlx_lm"):
        sys.modules[name] = None  # type: ignore[assignment]
