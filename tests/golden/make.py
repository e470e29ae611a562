"""Copies candle's goldens into this folder. usage: python tests/golden/make.py GOLDENS

GOLDENS holds `tiny/{mha,gqa,mqa,llama3}/` and `smollm2/`, as the real candle 0.11.0 wrote them (see
README.md here). The tiny models are copied whole; of SmolLM2's rows every 96th column is kept, with
the highest logit's token of each whole row.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
EVERY = 96


def main(source: Path) -> None:
    for model in ("mha", "gqa", "mqa", "llama3"):
        target = HERE / "tiny" / model
        target.mkdir(parents=True, exist_ok=True)
        for name in (
            "config.json",
            "model.safetensors",
            "plans.json",
            "outcomes.json",
            "rows.safetensors",
        ):
            shutil.copyfile(source / "tiny" / model / name, target / name)
    target = HERE / "smollm2"
    target.mkdir(exist_ok=True)
    for name in ("plans.json", "outcomes.json"):
        shutil.copyfile(source / "smollm2" / name, target / name)
    kept: dict[str, np.ndarray] = {}
    for plan, rows in load_file(source / "smollm2" / "rows.safetensors").items():
        kept[plan] = np.ascontiguousarray(rows[:, ::EVERY])
        kept[f"{plan}.argmax"] = rows.argmax(1).astype(np.int32)
    save_file(kept, target / "rows.safetensors", metadata={"every": str(EVERY)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
