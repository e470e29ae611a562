"""The proofs of what a run folder measures by, and their limits.

Each is a measured value, rms in units of the largest |logit|. One that is not there is no pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from oracle.formats.run_folder import Manifest

# `truth_agreement`: the truth's step, chunked and full agree. A correct truth reads 1e-14; any
# wrong mask, position or cache row makes it 1e-5 or more.
# `transformers_double`: the distance from transformers' own code with every float32 in it widened.
# A correct truth reads 2e-16 to 8e-16 on random Llamas of every RoPE type, 4e-15 with 40 layers of
# weights of std 0.3, with transformers 5.0.0 as with 5.24.0; an eps of 1.1e-5 instead of 1e-5 makes
# it 7e-6 or more. With RMSNorm, softmax and angles in float32, as `.double()` alone leaves them, a
# correct truth read 5e-8 on text and up to 1e-5 where weights are large.
TRUTH = {"truth_agreement": 1e-10, "transformers_double": 1e-10}

# Where there is no truth. `members_apart`: a member that computes something else, such as a cache
# that loses a row, makes this pool's noise no measure. `mean_double`: transformers' float64 form
# against the mean; a pool that is noisier than its dtype fails by it. In float32 18 random
# architectures read 7.0e-8 to 1.1e-6 (one with very sharp attention 2.4e-6), and 5.5e-8 to 9.3e-7.
# In half precision both may be as coarse as the judge allows a noise floor to be.
MEAN = {
    "float32": {"members_apart": 1e-5, "mean_double": 5e-6},
    "float16": {"members_apart": 5e-3, "mean_double": 5e-3},
    "bfloat16": {"members_apart": 5e-2, "mean_double": 5e-2},
}


def limits_of(manifest: Manifest) -> dict[str, float]:
    """The limit of each proof, whatever the manifest says of it."""
    return TRUTH if manifest.has_truth else MEAN[manifest.dtype]


def failed(manifest: Manifest) -> Iterator[tuple[str, object, float]]:
    """The proofs that do not hold: name, stored value, limit."""
    for name, limit in limits_of(manifest).items():
        value = manifest.proofs.get(name)
        if not (isinstance(value, int | float) and value <= limit):
            yield name, value, limit
