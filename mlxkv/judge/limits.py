"""The limits of a verdict, each with the measurement that chose it.

A value is in units of the noise floor (`floors.py`) unless its comment says otherwise. Most limits
were chosen on SmolLM2-135M-Instruct in float32, over 24 tokens, on two cores of a Linux machine:
"the port reads" is what the correct port reads there, "members read" what a run of transformers
reads when the other runs of the pool judge it. `mlxkv calibrate` measures both again, on several
models; `mlxkv selftest` measures what known faults read.
"""

from __future__ import annotations

# Correct engines read 0.8 to 2: the port 0.8, members 0.9 to 1.1, an earlier port 1.7. The weakest
# known fault reads 149 on SmolLM2 and 37 on a tiny random model.
SIGMA = 8.0

# No correct engine was seen above 2. From here on the report says so, and the verdict stands.
SIGMA_NOISY = 3.0

# Engines that compute in float32 throughout read 0.7 and more, one in float64 inside 0.05, and
# tables made in float64 0.18 to 0.28 at 300 to 4,100 tokens. Below this a note says so. In float16
# the port and members alike read 0.45, so the note is for float32 only.
SIGMA_LEAST = 0.3

# The port reads 1.4, members 1.6, the worst row of an earlier port on candle's goldens 2.3. Twice
# the limit of sigma, since a single row varies more than the mean of all.
WORST = 16.0

# The port reads 1.2, members 1.1: little, since this floor is a maximum already. A single wrong
# weight among 134 million peaks at 30.
PEAK = 8.0

# Engines that add up products in 2 to 64 parts, in reverse, in pairs or in strides read 1.8 to 2.7
# on SmolLM2 and 2.9 at most on small random models (up to 8.1 in a pool that did not know sums in
# strict order). It grows with the width, most where a BLAS adds up in strict order too: at 8192 and
# a vocabulary of 256 the port reads 2.9 on BLIS and 7.9 on MLX's own. Members read 5.0 (4.4 in
# float16, 4.9 in bfloat16). Every logit 0.05 too high, which sigma cannot see, reads 3e3.
SHIFT = 20.0

# A changed token counts where the truth's two best logits are further apart than so many peak
# floors: nearer ones the noise alone could swap. A weak gate: 13 of 24 faults swap nothing.
FLIP_MARGIN = 16.0

# The port reads 1.4 (2.9 in float16, 2.8 in bfloat16). Where one row of the cache is stale from
# position 60 on, sigma reads 709.
CACHED = 8.0

# Median over positions. The port reads 0.8, members 1.1, products added up in reverse 1.9. Of width
# 2048 to 8192 with weights of bfloat16 the port and mlx-lm read 1.0 (5.3 to 6.2 in a pool that does
# not know MLX's order of sums), on MLX's own BLAS 1.5; with weights of float32 2.3 there at 4096. A
# cache in float16 reads a sigma of 150.
KV_MEDIAN = 4.0

# 95th percentile over positions. The port reads 1.5, members 1.6. Not the maximum, since single
# tokens have massive activations.
KV_MOST = 10.0

# A percentile cannot see n/20 of the rows, and one stale row is the commonest fault of a cache. The
# port reads 3.9, members 2.3. A key row replaced by the one before it reads 1.8e5 and more in
# float32, 22 and more in float16 (median 145), 3 and more in bfloat16 (median 18; where all heads
# of all layers are stale together, the worst head reads 46 and more).
KV_WORST = 30.0

# Of max |T|, where T is the truth. The port reads 1.2e-14, its cache 1.6e-14, an earlier port
# 1.0e-13. A wrong eps in a single norm reads 4.4e-7.
ALGEBRA = 1e-10

# Relative. MLX's float64 matmul, tanh, sqrt, rsqrt and sums read 4e-16 against numpy; its functions
# that are accurate in float32 only read 1e-8.
PROBE = 1e-14

# Of the pooled floor over max |T|. torch reads 2e-7 in float32, 5e-4 in float16, 8e-3 in bfloat16.
FLOOR_MOST = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}

# Logits times such a factor must be seen, else the judge is blind. 1.001 reads a sigma of 526 in
# float32, but 0.5 in float16 and 0.4 in bfloat16, no more than a correct run; the larger factors
# read 18 and 22 there. The report says whether 1.001 would have been seen.
CONTROL_SCALE = {"float32": 1.001, "float16": 1.1, "bfloat16": 2.0}

# Members that are not bitwise equal to another one: 5 of 5 in float32, 3 in bfloat16.
DISTINCT_LEAST = 3

# The device classes on which these limits were measured.
CALIBRATED = {("linux", "cpu")}


def current_limits() -> dict[str, float]:
    """The limits that a verdict on a port with plain weights depends on, by their names here."""
    of_logits = "SIGMA", "WORST", "PEAK", "SHIFT", "FLIP_MARGIN", "CACHED"
    names = *of_logits, "KV_MEDIAN", "KV_MOST", "KV_WORST", "ALGEBRA", "PROBE"
    return {name: globals()[name] for name in names}
