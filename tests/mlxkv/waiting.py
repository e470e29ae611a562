"""An engine that never ends, for `mlxkv.engines.rank`."""

from __future__ import annotations

import time
from typing import Any


def follow(*_: Any) -> None:
    time.sleep(600)
