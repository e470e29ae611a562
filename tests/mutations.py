"""Planted mistakes that the tests must find, so that no test that finds one is lost unnoticed.

`python tests/mutations.py PART...` takes every mistake whose name holds one of the parts, `--all`
takes them all. For each it copies the sources, plants the mistake in the copy, runs the test files
that are named for it, and prints the first test that failed, or SURVIVED.

`--tree DIR` takes the sources from another checkout, `--was` the places that the mistakes have in
version 0.1.0. `--check` only looks whether each place is still there, once. `--draw DIR` lists the
sites that chance picks in a checkout; the entries with `drawn=True` come from version 0.1.0.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
COPIED = ("mlxkv", "oracle", "tests", "reports", "pyproject.toml", "README.md", "constraints.txt")
SEED = 20260101


@dataclass(frozen=True)
class Mutation:
    """One mistake: `find` stands once in `file` and becomes `put`; `tests` are pytest's arguments.

    `was` is the file in version 0.1.0, "" where it had no such place; `was_find`, `was_put` and
    `was_tests` are given where they differ there.
    """

    name: str
    file: str
    find: str
    put: str
    tests: str
    was: str
    was_find: str = ""
    was_put: str = ""
    was_tests: str = ""
    drawn: bool = False

    @property
    def room(self) -> str:
        """The folder that the mistake is planted in."""
        return str(Path(self.file).parent)

    def place(self, *, was: bool) -> tuple[str, str, str, str]:
        """File, text to find, text to put and tests, today or in version 0.1.0."""
        if not was:
            return self.file, self.find, self.put, self.tests
        put = self.was_put or self.put
        return self.was, self.was_find or self.find, put, self.was_tests or self.tests


M = Mutation
MUTATIONS = (
    # oracle/formats
    M(
        "a file of a run folder is not hashed",
        "oracle/formats/run_folder.py",
        "if found != expected:",
        "if False:",
        "tests/oracle/test_folder.py",
        "oracle/trace.py",
    ),
    M(
        "an unknown key of a plan is accepted",
        "oracle/formats/plan.py",
        "forbid_unknown_fields=True, tag_field",
        "tag_field",
        "tests/oracle/test_robust.py",
        "oracle/plan.py",
        was_find="unknown = sorted(set(map(str, value)) - keys)",
        was_put="unknown = sorted(set())",
        was_tests="tests/oracle",
    ),
    M(
        "JSON may name a key twice",
        "oracle/formats/strict_json.py",
        "if key in made:",
        "if False:",
        "tests/oracle/test_fuzz.py tests/oracle/test_checkpoint.py",
        "oracle/files.py",
    ),
    M(
        "a file is written in place and not renamed when whole",
        "oracle/formats/disk.py",
        "yield made\n        made.replace(path)",
        "yield path",
        "tests/oracle/test_robust.py tests/mlxkv/test_cache_file.py",
        "oracle/trace.py",
        was_find="yield part\n        part.replace(path)",
    ),
    M(
        "a trace's tensors may overlap",
        "oracle/formats/header.py",
        "if start != end or",
        "if",
        "tests/oracle/test_robust.py",
        "oracle/trace.py",
        was_find="if start != end or",
        was_put="if",
        was_tests="tests/oracle",
    ),
    M(
        "a refusal ends with 1, which means that engines differ",
        "oracle/formats/exits.py",
        "file=sys.stderr)\n    return 2",
        "file=sys.stderr)\n    return 1",
        "tests/oracle/test_oracle_cli.py tests/mlxkv/test_cli.py",
        "oracle/cli.py",
        was_find="""{' '.join(text.split())}", file=sys.stderr)\n        sys.exit(2)""",
        was_put="""{' '.join(text.split())}", file=sys.stderr)\n        sys.exit(1)""",
    ),
    M(
        "a kept answer without a tap passes for one with it",
        "oracle/formats/run_folder.py",
        "inputs.threads, sorted(inputs.taps), inputs.probe,",
        "inputs.threads, inputs.probe,",
        "tests/oracle/test_folder.py",
        "oracle/trace.py",
        was_find="[dtype, threads, sorted(taps)]",
        was_put="[dtype, threads]",
        was_tests="tests/oracle",
    ),
    M(
        "the neighbours of a border are no rows of the sample",
        "oracle/formats/rows.py",
        "for near in (-1, 0, 1)}",
        "for near in (0,)}",
        "tests/oracle/test_rows.py",
        "",
    ),
    # oracle/model
    M(
        "a fingerprint leaves out the shapes",
        "oracle/model/fingerprint.py",
        "list(t.shape), hashes",
        "hashes",
        "tests/oracle/test_checkpoint.py tests/oracle/test_default_model.py",
        "oracle/safetensors_file.py",
        was_find="list(found[name].shape), digests",
        was_put="digests",
    ),
    M(
        "a tensor may lie in another shard than the index says",
        "oracle/model/safetensors.py",
        "if where.get(name) != path.name:",
        "if False:",
        "tests/oracle/test_checkpoint.py",
        "oracle/safetensors_file.py",
    ),
    M(
        "a remembered hash serves a file that was changed since",
        "oracle/model/fingerprint.py",
        "value == stamp and set(found.hashes)",
        "set(found.hashes)",
        "tests/oracle/test_checkpoint.py",
        "oracle/safetensors_file.py",
        was_find="value == stamp and set(found)",
        was_put="set(found)",
    ),
    M(
        "weights of an unknown quantisation are read bare",
        "oracle/model/packing.py",
        "_OTHER_TENSORS.fullmatch(name) and",
        "False and",
        "tests/oracle/test_checkpoint.py tests/oracle/test_packed.py",
        "oracle/checkpoint.py",
        was_find="_QUANTISED_TENSORS.fullmatch(name) and",
    ),
    M(
        "rows of q and k of a GGUF stay in pairs order",
        "oracle/model/gguf_llama.py",
        "pairs.swapaxes(1, 2)",
        "rows",
        "tests/oracle/test_gguf.py",
        "oracle/gguf_llama.py",
        was_find="2, rows.shape[1]).swapaxes(1, 2)",
        was_put="2, rows.shape[1])",
    ),
    # oracle/truth
    M(
        "the truth's mask shows one token of the future",
        "oracle/truth/llama.py",
        "torch.arange(start, start + rows)[:, None]",
        "torch.arange(start + 1, start + rows + 1)[:, None]",
        "tests/oracle/test_truth.py",
        "oracle/truth.py",
    ),
    M(
        "the truth is computed from unrounded weights",
        "oracle/truth/weights.py",
        ".to(DTYPES[self.dtype]).to(torch.float64)",
        ".to(torch.float64)",
        "tests/oracle/test_truth.py tests/oracle/test_folder.py",
        "oracle/truth.py",
    ),
    M(
        "YaRN's upper bound is that of pairs",
        "oracle/truth/llama.py",
        "min(last, D - 1)",
        "min(last, D // 2 - 1)",
        "tests/oracle/test_rope.py",
        "oracle/truth.py",
        was_find="config.head_dim - 1)",
        was_put="config.head_dim // 2 - 1)",
    ),
    M(
        "an unknown key of config.json is accepted",
        "oracle/truth/config.py",
        "if k not in {*_NEUTRAL, *_WITHOUT_EFFECT, *_USED}]",
        "if False]",
        "tests/oracle/test_config.py",
        "oracle/config.py",
        was_find="and value is not False",
        was_put="and value is ...",
    ),
    # oracle/pool
    M(
        "a pool error keeps its common offset",
        "oracle/pool/errors.py",
        "error -= shift[:, None]",
        "error -= 0.0 * shift[:, None]",
        "tests/oracle/test_reference.py tests/oracle/test_folder.py",
        "oracle/floors.py",
    ),
    M(
        "a cloned cache of transformers shares its rows",
        "oracle/pool/reference.py",
        "copy.deepcopy(caches[source])",
        "caches[source]",
        "tests/oracle/test_reference.py",
        "oracle/reference.py",
        was_find="copy.deepcopy(self._caches[step.source])",
        was_put="self._caches[step.source]",
    ),
    M(
        "one run of transformers is taken for a noise",
        "oracle/pool/mean.py",
        "if len(distinct) < 2:",
        "if len(distinct) < 1:",
        "tests/oracle/test_neighbour.py",
        "oracle/mean.py",
    ),
    # oracle
    M(
        "a proof may read ten times its limit",
        "oracle/formats/proofs.py",
        "value <= limit)",
        "value <= 10 * limit)",
        "tests/mlxkv/test_verdict.py",
        "oracle/folder.py",
        was_find="if not value <= limit:",
        was_put="if not value <= 10 * limit:",
        was_tests="tests/oracle/test_folder.py",
    ),
    M(
        "a run that is not finite becomes part of the pool",
        "oracle/answer.py",
        "errors.require_finite(made)",
        "pass",
        "tests/oracle/test_folder.py tests/oracle/test_truth.py tests/oracle/test_reference.py",
        "oracle/answer.py",
        was_find="floors.require_finite(made)",
        was_tests="tests/oracle",
    ),
    M(
        "a run folder is replaced without --force",
        "oracle/place.py",
        "if names and not force:",
        "if False:",
        "tests/oracle/test_folder.py",
        "oracle/folder.py",
    ),
    M(
        "a sequence may be one token longer than the model's positions",
        "oracle/question.py",
        "if self.length > most:",
        "if self.length > most + 1:",
        "tests/oracle/test_folder.py",
        "oracle/question.py",
    ),
    M(
        "of several prompts for the oracle one is taken",
        "oracle/cli.py",
        "if len(given) != 1:",
        "if not given:",
        "tests/oracle/test_oracle_cli.py",
        "oracle/cli.py",
    ),
    # mlxkv/port
    M(
        "a clone is the cache itself",
        "mlxkv/port/cache.py",
        "other = object.__new__(Cache)",
        "return self",
        "tests/mlxkv/test_cache.py",
        "mlxkv/port/cache.py",
    ),
    M(
        "the port's mask shows one token of the future",
        "mlxkv/port/cache.py",
        "columns[None, :] > rows[:, None]",
        "columns[None, :] > rows[:, None] + 1",
        "tests/mlxkv/test_cache.py tests/mlxkv/test_llama.py",
        "mlxkv/port/cache.py",
    ),
    M(
        "RoPE's rows are taken one position early",
        "mlxkv/port/cache.py",
        "return self.cos[start : start + length]",
        "start -= start > 0\n        return self.cos[start : start + length]",
        "tests/mlxkv/test_cache.py tests/mlxkv/test_llama.py",
        "mlxkv/port/cache.py",
    ),
    M(
        "other weights may go on with a cache's rows",
        "mlxkv/port/cache.py",
        "if held and fingerprint != self.fingerprint:",
        "if False:",
        "tests/mlxkv/test_cache_refusals.py tests/mlxkv/test_cache_file.py",
        "mlxkv/port/cache.py",
    ),
    M(
        "another thread may go on with what is not computed",
        "mlxkv/port/cache.py",
        "self._owner() is threading.current_thread()",
        "True",
        "tests/mlxkv/test_cache_threads.py",
        "",
    ),
    M(
        "a call does not wait for the one before it",
        "mlxkv/port/cache.py",
        "mx.depends([ids], [self._last])[0]",
        "ids",
        "tests/mlxkv/test_cache_memory.py",
        "",
    ),
    M(
        "a cache in a file is not of the model's weights",
        "mlxkv/port/cache_file.py",
        "_made_of(cache, model.fingerprint)",
        '_made_of(cache, meta.get("fingerprint"))',
        "tests/mlxkv/test_cache_file.py",
        "mlxkv/port/cache_file.py",
    ),
    M(
        "a call that fails leaves half its layers longer",
        "mlxkv/port/cache.py",
        'self.restore(before["_layers"])',
        "pass",
        "tests/mlxkv/test_cache.py tests/mlxkv/test_cache_refusals.py",
        "mlxkv/port/llama.py",
        was_find="cache.restore(before)",
    ),
    M(
        "Llama 3.1's scaling is dropped",
        "mlxkv/port/rope.py",
        'case "llama3":',
        'case "llama 3":',
        "tests/mlxkv/test_rope.py",
        "mlxkv/port/rope.py",
    ),
    M(
        "a tensor that the model lacks is left unread",
        "mlxkv/port/weights.py",
        "sorted(found - set(expected))",
        "[]",
        "tests/mlxkv/test_weights.py",
        "mlxkv/port/weights.py",
        was_find="in sorted(found - set(expected)):",
        was_put="in ():",
    ),
    M(
        "rms_norm_eps of zero is read",
        "mlxkv/port/config/llama.py",
        "above=0.0",
        "least=0.0",
        "tests/mlxkv/test_config.py",
        "mlxkv/port/config.py",
    ),
    # mlxkv/engines
    M(
        "an engine that a signal ended is believed",
        "mlxkv/engines/process.py",
        "if code != 0:",
        "if code > 0:",
        "tests/mlxkv/test_port_engine.py",
        "mlxkv/engines/job.py",
    ),
    M(
        "a row's position is counted one too far",
        "mlxkv/engines/runner.py",
        "held + np.array(places, np.int32)",
        "held + 1 + np.array(places, np.int32)",
        "tests/mlxkv/test_port_engine.py",
        "mlxkv/engines/runner.py",
        was_find="last = held + len(tokens)",
        was_put="last = held + len(tokens) + 1",
    ),
    M(
        "a kept answer to another question is used again",
        "mlxkv/engines/oracle.py",
        "if manifest.inputs != self.digest:\n            return None",
        "if False:\n            return None",
        "tests/mlxkv/test_cli.py tests/mlxkv/test_robust.py",
        "mlxkv/engines/oracle.py",
        was_find="if manifest.inputs != digest:\n        return None",
        was_put="if False:\n        return None",
    ),
    # mlxkv/judge
    M(
        "sigma's limit is ten times too wide",
        "mlxkv/judge/limits.py",
        "SIGMA = 8.0",
        "SIGMA = 80.0",
        "tests/mlxkv/test_limits.py",
        "mlxkv/judge/verdict.py",
        was_tests="tests/mlxkv/test_verdict.py tests/mlxkv/test_selftest.py",
    ),
    M(
        "NaN passes a gate",
        "mlxkv/judge/result.py",
        "return self.ran and not (self.value <= self.limit)",
        "return self.ran and self.value > self.limit",
        "tests/mlxkv/test_verdict.py",
        "mlxkv/judge/result.py",
    ),
    M(
        "a trace of other weights is measured",
        "mlxkv/judge/admission.py",
        "if meta.fingerprint not in (None, manifest.fingerprint):",
        "if False:",
        "tests/mlxkv/test_verdict.py",
        "mlxkv/judge/case.py",
        was_find="if meta.fingerprint is not None and meta.fingerprint != manifest.fingerprint:",
    ),
    M(
        "a position without a row is not missed",
        "mlxkv/judge/admission.py",
        "if missing:",
        "if False:",
        "tests/mlxkv/test_verdict.py",
        "mlxkv/judge/case.py",
    ),
    M(
        "of several prompts the best decides",
        "mlxkv/judge/many.py",
        '("differ", "cannot tell", "agree")',
        '("agree", "cannot tell", "differ")',
        "tests/mlxkv/test_prompts.py",
        "mlxkv/judge/many.py",
    ),
    # mlxkv/report
    M(
        "a candidate that differs does not count",
        "mlxkv/commands/compare/page.py",
        "(self.verdict, self.third)",
        "(self.verdict,)",
        "tests/mlxkv/test_cli.py",
        "mlxkv/reporting.py",
        was_find="*([self.third] if self.third else [])",
        was_put="*[]",
    ),
    M(
        "a report hides why nothing could be told",
        "mlxkv/report/page.py",
        "*verdict.reasons, *verdict.notes",
        "*verdict.notes",
        "tests/mlxkv/test_markdown.py",
        "mlxkv/report/markdown.py",
    ),
    M(
        "a refusal leaves an empty output folder",
        "mlxkv/report/publish.py",
        "path.rmdir()",
        "pass",
        "tests/mlxkv/test_robust.py",
        "mlxkv/session.py",
    ),
    # mlxkv/commands
    M(
        "a wrong head is looked for only in the first layer",
        "mlxkv/commands/locate/place.py",
        "for number in range(layers):",
        "for number in range(1):",
        "tests/mlxkv/test_locate.py",
        "mlxkv/judge/locate.py",
    ),
    M(
        "a correct run beyond a limit is no failure of calibrate",
        "mlxkv/commands/selftest/calibrate.py",
        "for one in self.ranges) and not self.accused",
        "for one in self.ranges) or not self.accused",
        "tests/mlxkv/test_calibrate.py",
        "mlxkv/calibrating.py",
        "if self.beyond or self.accused",
        "if self.beyond and self.accused",
    ),
    M(
        "a silently wrong answer is taken for a refusal",
        "mlxkv/commands/pitfalls/behaviour.py",
        "if sigma is not None and worst is not None and not (sigma",
        "if error is None and sigma is not None and worst is not None and not (sigma",
        "tests/mlxkv/test_behaviour.py",
        "mlxkv/judge/behaviour.py",
        "if good and outcome.error is not None:",
        "if outcome.error is not None:",
    ),
    M(
        "bench shows mlx-lm's speed over the port's",
        "mlxkv/commands/bench/result.py",
        "tuple(other / port for",
        "tuple(port / other for",
        "tests/mlxkv/test_bench.py",
        "mlxkv/bench.py",
        was_tests="tests/mlxkv/test_cli.py",
    ),
    M(
        "reports that are a thousand times off still say the same",
        "mlxkv/commands/diff.py",
        "FACTOR = 2.0",
        "FACTOR = 2000.0",
        "tests/mlxkv/test_diff.py",
        "mlxkv/recheck.py",
        was_tests="tests/mlxkv/test_recheck.py",
    ),
    M(
        "a judgement of stored traces takes two of one plan",
        "mlxkv/judge/admission.py",
        "if name in found:",
        "if False:",
        "tests/mlxkv/test_delta.py",
        "mlxkv/judge/case.py",
    ),
    M(
        "the index of reports counts right runs as wrong",
        "mlxkv/commands/reports.py",
        "sum(not t['passed'] for t in trials)",
        "sum(t['passed'] for t in trials)",
        "tests/mlxkv/test_reports.py",
        "mlxkv/reports.py",
    ),
    M(
        "inspect says half of what a cache takes",
        "mlxkv/commands/show.py",
        "{dtype: rows * size for",
        "{dtype: rows * size // 2 for",
        "tests/mlxkv/test_cli.py",
        "mlxkv/show.py",
        was_find="{4 * row} bytes in float32",
        was_put="{2 * row} bytes in float32",
    ),
    M(
        "a judgement leaves the plot of an earlier run",
        "mlxkv/commands/judge.py",
        'stale=("compare.svg",)',
        "stale=()",
        "tests/mlxkv/test_stored.py",
        "mlxkv/stored.py",
        was_find='(out / "compare.svg").unlink(missing_ok=True)',
        was_put="pass",
    ),
    # mlxkv
    M(
        "one's own suite passes where nothing could be told",
        "mlxkv/testing.py",
        'if verdict.outcome != "agree":',
        'if verdict.outcome == "differ":',
        "tests/mlxkv/test_testing.py",
        "mlxkv/testing.py",
    ),
    M(
        "an option of one sequence is dropped beside --prompts",
        "mlxkv/cli.py",
        "beside = [name for name, value in of_one.items() if value is not None]",
        "beside = []",
        "tests/mlxkv/test_prompts.py tests/mlxkv/test_cli.py",
        "mlxkv/cli.py",
        was_find="beside = [typed[name] for name in others if name in typed]",
    ),
    # Drawn by `--draw`. One that it drew is left out, as nothing but the width of a wide terminal's
    # help depends on it: 110 or 111.
    M(
        "a planted fault tiles keys along another axis too",
        "mlxkv/commands/selftest/faults.py",
        "repeats = (1, queries.shape[1] // keys.shape[1], 1, 1)",
        "repeats = (1, queries.shape[1] // keys.shape[1], 2, 1)",
        "tests/mlxkv/test_faults.py tests/mlxkv/test_selftest.py",
        "mlxkv/engines/faults.py",
        "mx.tile(keys, (1, groups, 1, 1))",
        "mx.tile(keys, (1, groups, 2, 1))",
        drawn=True,
    ),
    M(
        "an optional number of RoPE is not read",
        "mlxkv/port/config/rope.py",
        "return None if value is None else number(",
        "return None if value is not None else number(",
        "tests/mlxkv/test_config_rope.py",
        "mlxkv/port/config_rope.py",
        was_find="return None if value is None else self.values.number(",
        was_put="return None if value is not None else self.values.number(",
        drawn=True,
    ),
    M(
        "bench adds the time of day to the time of the prompt",
        "mlxkv/commands/bench/worker.py",
        "perf_counter() - begun",
        "perf_counter() + begun",
        "tests/mlxkv/test_bench.py",
        "mlxkv/bench.py",
        "[[token]]), cache=cache)[0, -1])\n        return [prefilled - begun",
        "[[token]]), cache=cache)[0, -1])\n        return [prefilled + begun",
        was_tests="tests/mlxkv/test_cli.py",
        drawn=True,
    ),
    M(
        "the truth's keys may be missing in one layer",
        "oracle/formats/contents.py",
        "for name in sorted((names ^ {*found}) if wanted else ()):",
        "for name in ():",
        "tests/mlxkv/test_fuzz.py tests/mlxkv/test_trust.py",
        "mlxkv/judge/case.py",
        was_find="pair is None or pair[0].shape",
        was_put="pair is None and pair[0].shape",
        was_tests="tests/mlxkv/test_fuzz.py",
        drawn=True,
    ),
    M(
        "a planted fault of one layer acts in all",
        "mlxkv/commands/selftest/faults.py",
        "if layer != place.middle or",
        "if layer != place.middle and",
        "tests/mlxkv/test_faults.py tests/mlxkv/test_selftest.py",
        "mlxkv/engines/faults.py",
        "if layer != place.early or",
        "if layer != place.early and",
        drawn=True,
    ),
    M(
        "pitfalls' table stresses what is not wrong",
        "mlxkv/commands/pitfalls/page.py",
        "if bold and seen.behaviour == WRONG",
        "if bold and seen.behaviour != WRONG",
        "tests/mlxkv/test_pitfalls.py tests/mlxkv/test_markdown.py tests/mlxkv/test_behaviour.py",
        "mlxkv/report/pitfalls.py",
        drawn=True,
    ),
    M(
        "calibrate's process leaves no result",
        "mlxkv/commands/selftest/worker.py",
        'return {mode: found, "environment": ports.meta.environment}',
        "return None",
        "tests/mlxkv/test_calibrate.py",
        "mlxkv/engines/calibrate.py",
        'return {"runs": runs, "environment": loaded.meta.environment}',
        drawn=True,
    ),
    M(
        "nobody is told that there is no truth",
        "mlxkv/judge/notes.py",
        "if case.has_truth:\n        return None\n    left",
        "if True:\n        return None\n    left",
        "tests/mlxkv/test_neighbour.py",
        "mlxkv/judge/mean.py",
        was_find="if case.has_truth:\n        return []",
        was_put="if True:\n        return None",
        drawn=True,
    ),
    M(
        "a run folder's plans must not be those of its manifest",
        "oracle/formats/run_folder.py",
        "if found[name].digest != digest:",
        "if found[name].digest == digest:",
        "tests/oracle/test_folder.py",
        "oracle/folder.py",
        was_find="if plan.digest != manifest.plans[name]:",
        was_put="if plan.digest == manifest.plans[name]:",
        drawn=True,
    ),
    M(
        "a pair of runs has no figures",
        "mlxkv/judge/delta.py",
        "return Pair(",
        "return None and Pair(",
        "tests/mlxkv/test_delta.py",
        "mlxkv/judge/delta.py",
        drawn=True,
    ),
)


def run(mutation: Mutation, tree: Path, *, was: bool) -> str:
    """Plants it in a copy of the sources; the first test that failed, or SURVIVED."""
    file, find, put, tests = mutation.place(was=was)
    with tempfile.TemporaryDirectory(prefix="mlxkv-mutation-") as scratch:
        for name in COPIED:
            if (tree / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(tree / name, Path(scratch, name), ignore=ignore)
            elif (tree / name).exists():
                shutil.copy(tree / name, Path(scratch, name))
        path = Path(scratch, file)
        path.write_text(path.read_text(encoding="utf-8").replace(find, put), encoding="utf-8")
        # One half at a time: with both the order of their failures would be chance.
        for half in ("tests/oracle", "tests/mlxkv"):
            asked = [word for word in tests.split() if word.startswith(half)]
            failed = _first_failure(asked, Path(scratch)) if asked else None
            if failed is not None:
                return failed
    return "SURVIVED"


def _first_failure(tests: Sequence[str], copy: Path) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if ended.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ended.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with {ended.returncode}"


def unplaced(tree: Path, *, was: bool) -> Iterator[str]:
    """Mutations whose text does not stand once in its file, or whose tests are not there."""
    for mutation in MUTATIONS:
        file, find, _, tests = mutation.place(was=was)
        if not file:
            continue
        path = tree / file
        times = path.read_text(encoding="utf-8").count(find) if path.exists() else 0
        if times != 1:
            yield f"{mutation.name}: {find!r} stands {times} times in {file}, expected once"
        for test in tests.split():
            if not (tree / test).exists():
                yield f"{mutation.name}: no {test}"


FLIPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


def sites(path: Path) -> list[tuple[int, int, str]]:
    """Every place of one file that can be mutated: first and last byte, and what is put there."""
    raw = path.read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree, found = ast.parse(raw), set()

    def span(node: ast.expr) -> tuple[int, int]:
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return starts[node.lineno - 1] + node.col_offset, end

    def between(left: ast.expr, right: ast.expr, before: str, after: str) -> None:
        start, stop = span(left)[1], span(right)[0]
        gap = raw[start:stop].decode()
        if before in gap:
            found.add((start, stop, gap.replace(before, after)))

    annotations = set()
    for node in ast.walk(tree):
        for one in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            annotations |= (
                {id(part) for part in ast.walk(one)} if isinstance(one, ast.AST) else set()
            )
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        match node:
            case ast.Compare():
                for op, left, right in zip(
                    node.ops, [node.left, *node.comparators], node.comparators, strict=False
                ):
                    found.add((span(left)[1], span(right)[0], f" {FLIPPED[type(op)]} "))
            case ast.BinOp(op=ast.Add()):
                between(node.left, node.right, "+", "-")
            case ast.BinOp(op=ast.Sub()):
                between(node.left, node.right, "-", "+")
            case ast.BoolOp():
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    between(left, right, *words)
            case ast.Constant(value=int() | float()) if type(node.value) is not bool:
                found.add((*span(node), repr(node.value + 1)))
            case ast.UnaryOp(op=ast.Not()):
                found.add((span(node)[0], span(node.operand)[0], ""))
            case ast.Return(value=ast.expr() as value) if not (
                isinstance(value, ast.Constant) and value.value is None
            ):
                found.add((*span(value), "None"))
    return sorted(found)


def draw(tree: Path, n: int) -> Iterator[str]:
    """So many sites of all sources, by chance with a fixed seed: the line before and after."""
    paths = sorted([*tree.glob("mlxkv/**/*.py"), *tree.glob("oracle/**/*.py")])
    every = [(path, *site) for path in paths for site in sites(path)]
    for path, start, stop, put in random.Random(SEED).sample(every, n):
        raw = path.read_bytes()
        first, last = raw.rfind(b"\n", 0, start) + 1, raw.find(b"\n", stop)
        number = raw[:start].count(b"\n") + 1
        after = (raw[first:start] + put.encode() + raw[stop:last]).decode()
        yield f"{path.relative_to(tree)}:{number}\n- {raw[first:last].decode()}\n+ {after}"


def main() -> int:
    """The command: 1 where a mutation survived or lost its place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of mutations' names")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tree", type=Path, default=HERE.parent)
    parser.add_argument("--was", action="store_true", help="the tree is version 0.1.0")
    parser.add_argument("--draw", type=Path, metavar="DIR")
    given = parser.parse_args()
    if given.draw:
        print("\n".join(draw(given.draw.resolve(), 30)))
        return 0
    lost = list(unplaced(given.tree.resolve(), was=given.was))
    print(*lost, sep="\n", end="\n" if lost else "")
    if lost or given.check:
        return 1 if lost else 0
    survived = 0
    for mutation in MUTATIONS:
        wanted = given.all or any(name in mutation.name for name in given.names)
        if wanted and mutation.place(was=given.was)[0]:
            caught = run(mutation, given.tree.resolve(), was=given.was)
            survived += caught == "SURVIVED"
            print(f"| {mutation.name} | {mutation.room} | {caught} |", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
