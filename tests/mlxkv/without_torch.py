"""Imports mlx-lm as it is where torch is not installed: the tests here and torch never meet."""

from __future__ import annotations

import sys

hidden = "torch" not in sys.modules
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]

import mlx_lm.models.cache  # noqa: E402
import mlx_lm.models.llama  # noqa: E402, F401

if hidden:  # tests that start the oracle from here must not see it
    del sys.modules["torch"]
