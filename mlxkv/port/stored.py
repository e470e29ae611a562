"""What the tensors of a checkpoint must be for the port, as far as can be said without MLX."""

from __future__ import annotations

from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint

STORED = ("F32", "F16", "BF16")
"""What MLX reads as floats; it reads no F64. Integers are weights only where the checkpoint says
how they are packed."""


def require_usable(checkpoint: Checkpoint, *, tied: bool) -> None:
    """Refuses weights of a dtype that MLX lacks, and a tied head that is stored and differs."""
    if tied:
        require_same_head(checkpoint)
    for name in weights_of(checkpoint):
        require_floats(checkpoint, name)


def weights_of(checkpoint: Checkpoint) -> list[str]:
    """The weights' names, without RoPE's frequencies, which old checkpoints keep."""
    return [name for name in checkpoint.weights if not name.endswith("rotary_emb.inv_freq")]


def require_floats(checkpoint: Checkpoint, name: str) -> None:
    stored = checkpoint.tensors[name].dtype
    if stored not in STORED and name not in checkpoint.packed:
        what = f"{name} is stored as {stored}, expected one of {', '.join(STORED)}"
        raise Refusal(what, where=checkpoint.tensors[name].file, remedy="save it in F32")


def require_same_head(checkpoint: Checkpoint) -> None:
    """Refuses a head that is stored beside the embedding that it is tied to, and is not the same.

    Which of the two would count differs by engine.
    """
    tensors, hashes = checkpoint.tensors, checkpoint.hashes
    for part in ("weight", "scales", "biases"):
        head, tied_to = f"lm_head.{part}", f"model.embed_tokens.{part}"
        pair = [(tensors[n].dtype, hashes[n]) for n in (head, tied_to) if n in tensors]
        if head in tensors and (len(pair) < 2 or pair[0] != pair[1]):
            what = f"{head} differs from {tied_to} though tie_word_embeddings is true"
            remedy = "set it to false in config.json if the head is its own, or take the head out"
            raise Refusal(what, where=tensors[head].file, remedy=remedy)
