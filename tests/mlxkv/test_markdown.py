"""What a comparison looks like, whole: the Markdown, the terminal, and the sentence for each outcome."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import meta, plans

from mlxkv.judge.delta import Figures, Pair, Run, Tables
from mlxkv.judge.result import Cause, Control, FirstWrong, Gate, Subject, Verdict
from mlxkv.report.page import markdown
from mlxkv.report.phrases import oracle_side, sentence, side
from mlxkv.report.terminal import console
from mlxkv.report.text import (
    clip,
    code,
    columns,
    headroom,
    markdown_table,
    ordered,
    power,
    quoted,
    where,
    wrapped,
)
from oracle.formats.run_folder import Manifest

MANIFEST = Manifest(
    source="default",
    name="SmolLM2-135M-Instruct",
    note="wheel, Q4_1 dequantised",
    revision=None,
    fingerprint="f0" * 4,
    config_digest="c0" * 4,
    dtype="float32",
    prompt="The capital of France is",
    prompt_tokens=5,
    tokens=list(range(24)),
    texts=["The", " capital", " of", " France", " is", *(f" t{i}" for i in range(5, 24))],
    plans={"full": "a" * 8, "step": "b" * 8, "prefixes": "c" * 8, "chunked": "d" * 8},
    files={},
    proofs={"truth_agreement": 1.1e-13, "transformers_double": 5.4e-16},
    generated=[7042, 30, 198],
    pool=[],
    pool_distinct=0,
    left_out={},
    ignored_keys=[],
    packed="",
    environment={
        "os": "Linux",
        "torch": "2.13.0",
        "threads": 2,
        "precision": {"tf32": False, "mkldnn": True},
    },
    inputs="",
)
PORT, THEIRS = Run("mlxkv", "step"), Run("transformers", "full")
VERDICT = Verdict(
    outcome="agree",
    scopes=("algebra", "logits"),
    plans=("full", "step"),
    subject=Subject("mlxkv", "0.1.0", "cpu", "float32", "SmolLM2", "f0", "c0", tuple(range(24)), 5),
    gates=(
        Gate("algebra (float64)", "full", 9.0e-14, 1e-10, 4, " is"),
        Gate("algebra (float64)", "step", 1.02e-13, 1e-10, 23, " t23"),
        Gate("sigma", "step", 1.71, 8.0),
        Gate("worst position", "step", 2.4, 16.0, 4, " is"),
        Gate("decisive flips", "step", 0.0, 0.0),
        Gate("keys worst row", "step", math.nan, 50.0, reason="not run: no keys in trace"),
    ),
    controls=(
        Control("sdpa-step, held out", "agree", True, 1.02, 8.0),
        Control("sdpa-step times 1.001", "differ", True, 812.3, 8.0),
    ),
    notes=("limits not calibrated on this device (macos gpu)",),
    unseen=(
        "positions beyond 23: give --tokens with more",
        "batches: `mlxkv pitfalls` tries them",
    ),
    figures=(Figures("step", 24, 8.1e-5, 1.65e-5, -104.26, 1 - 2.5e-12, 1.31e-11, 24, 23),),
    tables=Tables(
        cached=(
            Pair(
                Run("transformers", "step"), THEIRS, 5.2e-5, 1.0e-5, 2.0e-5, 9.7e-6, 20, 20, 38.246
            ),
            Pair(PORT, THEIRS, 8.1e-5, 3.0e-5, 4.0e-5, 1.65e-5, 20, 20, 38.246),
            Pair(PORT, Run("transformers", "step"), 7.7e-5, 3.0e-5, 4.0e-5, 1.5e-5, 19, 20, 38.246),
        ),
        chunked=(Pair(Run("mlxkv", "chunked"), PORT, 0.0, 0.0, 0.0, 0.0, 20, 20, 38.246),),
    ),
    distinct=5,
)
ENVIRONMENT = {
    "os": "Linux 6",
    "mlx": "0.32.4",
    "blas": "OpenBLAS (libopenblas.so.0)",
    "threads": 2,
}
SIDES = (
    side(replace(meta(plans()["step"]), engine="mlxkv", environment=ENVIRONMENT)),
    oracle_side(MANIFEST),
)


def test_the_terminal_shows_it_whole() -> None:
    assert console(VERDICT, MANIFEST, sides=SIDES, report="mlxkv-report/compare.md") == CONSOLE


def test_the_markdown_holds_it_whole() -> None:
    third = (Pair(Run("candle", "step"), PORT, 7e-5, 1e-5, 2e-5, 1e-5, 20, 20, 38.246),)
    text = markdown(
        VERDICT,
        MANIFEST,
        sides=SIDES,
        commands=["mlxkv compare --steps 20"],
        continuation=((7042, 30, 198), " Paris.\n"),
        svg="compare.svg",
        third=third,
        page_values=True,
    )
    assert text == MARKDOWN


def test_the_same_verdict_gives_the_same_text() -> None:
    texts = {
        console(VERDICT, MANIFEST, sides=SIDES)
        + markdown(VERDICT, MANIFEST, sides=SIDES, commands=[])
        for _ in range(3)
    }
    assert len(texts) == 1


DIFFERS = replace(
    VERDICT,
    outcome="differ",
    gates=(
        Gate("sigma", "step", 149.2, 8.0, first=16),
        Gate("peak", "step", math.nan, 8.0, 16, " t16", first=16),
        Gate("keys worst row", "step", 7e5, 50.0, 16, " t16", 29, 2, first=16),
        Gate("shift", "step", 1.0, 10.0),
    ),
    first_wrong=FirstWrong(16, " t16", "step", "keys worst row", 29),
    reasons=("port trace of plan 'chunked': no row for position 9, expected 20 rows",),
    notes=(),
    tables=Tables(),
)


def test_a_difference_names_its_gates_and_the_first_wrong_position() -> None:
    assert sentence(DIFFERS) == (
        'differ (logits, cache): first wrong position 16 " t16" (plan step, keys worst row, layer 29); plan full agrees; gates: sigma, peak, keys worst row'
    )
    assert console(DIFFERS, MANIFEST, sides=SIDES, report="r.md") == DIFFERENT


def test_what_was_found_and_its_cause_come_first_and_the_gates_last() -> None:
    found = replace(
        DIFFERS,
        found="the logits of position 16 are NaN in plan step",
        cause=Cause("theta", "rope_theta 500000 instead of 10000", 0.98),
        plans=("full", "step", "chunked", "mixed"),
    )
    assert sentence(found) == (
        "differ (logits, cache): the logits of position 16 are NaN in plan step; looks like rope_theta 500000 instead of 10000 (sigma 0.98 against a truth with that mistake); "
        'first wrong position 16 " t16" (plan step, keys worst row, layer 29); plans full, chunked and mixed agree; gates: sigma, peak, keys worst row'
    )
    text = console(found, MANIFEST, sides=SIDES, report="r.md")
    assert text.count("looks like") == 1
    assert text.splitlines()[-2:] == [sentence(found), "report: r.md"]
    page = markdown(found, MANIFEST, sides=SIDES, commands=[])
    assert page.splitlines()[2] == f"**{sentence(found)}**"
    assert page.count("looks like") == 1


def test_a_doubt_says_why() -> None:
    doubt = replace(
        VERDICT,
        outcome="cannot tell",
        gates=(),
        controls=(),
        tables=Tables(),
        notes=(),
        unseen=("everything: nothing was compared",),
        reasons=("a: wrong", "b: wrong"),
    )
    assert sentence(doubt) == "cannot tell: a: wrong (and 1 more)"
    assert sentence(replace(doubt, reasons=())) == "cannot tell: no gate could run"
    assert console(doubt, MANIFEST, sides=SIDES).splitlines()[3:] == [
        "",
        "cannot tell: a: wrong",
        "cannot tell: b: wrong",
        "not exercised: everything",
        "cannot tell",
    ]
    assert "- a: wrong\n- b: wrong" in markdown(doubt, MANIFEST, sides=SIDES, commands=[])


def test_a_prompt_of_one_token_given_as_ids_has_no_chunked_proof() -> None:
    one = replace(
        MANIFEST, prompt=None, prompt_tokens=1, plans={"full": "a", "step": "b", "prefixes": "c"}
    )
    assert console(VERDICT, one, sides=SIDES).splitlines()[1:3] == [
        '24 tokens: "The" + 23',
        "truth: step = full to 1.1e-13, transformers within 5.4e-16",
    ]


def test_of_many_controls_the_terminal_counts_those_that_passed() -> None:
    held = [Control(f"more {i}", "agree", i != 3, 0.5, 1.0) for i in range(5)]
    many = replace(VERDICT, controls=(*VERDICT.controls, *held), distinct=1)
    shown = console(many, MANIFEST, sides=SIDES).splitlines()
    start = next(i for i, line in enumerate(shown) if line.startswith("controls: "))
    lines = shown[start : start + 3]
    assert lines == [
        "controls: sdpa-step, held out: agrees (sigma 1.02); sdpa-step times 1.001: differs (sigma 812);",
        "  more 3: differs, must agree (sigma 0.5); 4 more passed; 1 distinct pool member",
        "",
    ]
    page = markdown(many, MANIFEST, sides=SIDES, commands=[])
    assert all(f"more {i}: " in page for i in range(5))


def test_a_long_line_is_broken_after_a_semicolon() -> None:
    clauses = ["a" * 60, "b" * 38, "c", "d" * 120, "e"]
    lines = wrapped("; ".join(clauses))
    assert lines == [clauses[0] + ";", f"  {'b' * 38}; c;", f"  {'d' * 120};", "  e"]
    assert wrapped("short; line") == ["short; line"]


@given(value=st.floats(0, 1e9), limit=st.sampled_from([1e-10, 8.0, 16.0, 50.0]))
def test_value_and_limit_are_shown_so_that_they_can_be_ordered(value: float, limit: float) -> None:
    a, b = ordered(value, limit)
    assert (float(a) <= float(b)) == (value <= limit)
    assert (float(a) == float(b)) == (value == limit)


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (1.71, 8.0, ("1.71", "8.00")),
        (8.0004, 8.0, ("8.0004", "8.0000")),
        (1.0e-13, 1e-10, ("1.0e-13", "1e-10")),
        (1.004e-10, 1e-10, ("1.004e-10", "1e-10")),
        (3.2e5, 8.0, ("3.20e+05", "8.00")),
        (math.inf, 8.0, ("inf", "8.00")),
        (math.nan, 8.0, ("nan", "8.00")),
        (3.0, 0.0, ("3", "0")),
    ],
)
def test_numbers_have_as_many_digits_as_it_takes(
    value: float, limit: float, shown: tuple[str, str]
) -> None:
    assert ordered(value, limit) == shown


def test_headroom_is_how_often_the_value_fits() -> None:
    values = [1.02e-13, 1.71, 100.0, 5e5, 0.0, math.nan]
    assert [headroom(Gate("g", "step", v, 8.0)) for v in values] == [
        "78431372549020x",
        "4.7x",
        "0.08x",
        "<0.01x",
        "-",
        "-",
    ]


def test_a_place_is_told_as_far_as_it_is_known() -> None:
    gate = Gate("g", "step", 1.0, 8.0, 4, 'a"b\n', 3, 1)
    assert where(gate) == 'layer 3 head 1 pos 4 "a\\"b\\n"'
    assert where(replace(gate, token=None, layer=None)) == "pos 4"
    assert where(replace(gate, position=None, layer=None)) == "-"
    assert where(replace(gate, reason="not run: why")) == "not run: why"


def test_no_text_can_steer_a_terminal_or_break_a_table() -> None:
    assert quoted("a\x1b[2J\u202e\u2028é日") == '"a\\u001b[2J\\u202e\\u2028é日"'
    assert [code(t) for t in ("a|b", "a`b", "`", "a``b")] == [
        "`a\\|b`",
        "``a`b``",
        "`` ` ``",
        "```a``b```",
    ]
    assert clip("abcdefgh", 8) == "abcdefgh"
    assert clip("abcdefghi", 8) == "abcde..."
    assert [power(5.5e-8), power(1e-13), power(1.24e-100, digits=2)] == [
        "6e-8",
        "1e-13",
        "1.2e-100",
    ]


def test_tables_are_aligned_in_their_source() -> None:
    assert columns(("name", "n"), [("a", "100"), ("long name", "2")], left={0}) == [
        "name         n",
        "a          100",
        "long name    2",
    ]
    assert markdown_table(("a", "number"), [("long", "2")], left={0}) == [
        "| a    | number |",
        "| ---- | -----: |",
        "| long |      2 |",
    ]


CONSOLE = """\
SmolLM2-135M-Instruct (wheel, Q4_1 dequantised)  float32  mlx 0.32.4 cpu (OpenBLAS) vs torch 2.13.0
24 tokens: "The capital of France is" + 19
truth: step = full = chunked to 1.1e-13, transformers within 5.4e-16

gate               plan    value  limit  headroom  where
algebra (float64)  step  1.0e-13  1e-10      980x  pos 23 " t23"
sigma              step     1.71   8.00      4.7x  -
worst position     step     2.40  16.00      6.7x  pos 4 " is"
decisive flips     step        0      0         -  -
keys worst row     step        -  50.00         -  not run: no keys in trace

controls: sdpa-step, held out: agrees (sigma 1.02); sdpa-step times 1.001: differs (sigma 812);
  5 distinct pool members

plan     max |d|     first      last       rms  top-1  (against transformers, as on the page)
cached  8.10e-05  3.00e-05  4.00e-05  1.65e-05  20/20

note: limits not calibrated on this device (macos gpu)
not exercised: positions beyond 23; batches
agree (algebra, logits)    report: mlxkv-report/compare.md
"""

DIFFERENT = """\
SmolLM2-135M-Instruct (wheel, Q4_1 dequantised)  float32  mlx 0.32.4 cpu (OpenBLAS) vs torch 2.13.0
24 tokens: "The capital of France is" + 19
truth: step = full = chunked to 1.1e-13, transformers within 5.4e-16

gate            plan     value  limit  headroom  where
sigma           step    149.20   8.00     0.05x  -
peak            step       nan   8.00         -  pos 16 " t16"
keys worst row  step  7.00e+05  50.00    <0.01x  layer 29 head 2 pos 16 " t16"
shift           step      1.00  10.00       10x  -

controls: sdpa-step, held out: agrees (sigma 1.02); sdpa-step times 1.001: differs (sigma 812);
  5 distinct pool members

also: port trace of plan 'chunked': no row for position 9, expected 20 rows
not exercised: positions beyond 23; batches
hint: `mlxkv locate` says in which layer and in which operation
differ (logits, cache): first wrong position 16 " t16" (plan step, keys worst row, layer 29); plan full agrees; gates: sigma, peak, keys worst row
report: r.md
"""

MARKDOWN = """\
# mlxkv against transformers: SmolLM2-135M-Instruct (wheel, Q4_1 dequantised), float32

**agree (algebra, logits)**

- limits not calibrated on this device (macos gpu)

## Gates

Each gate on the plan that did worst; values in units of the noise floor, algebra relative to the largest value.

| gate              | plan |   value | limit | headroom | where                       |
| ----------------- | ---- | ------: | ----: | -------: | --------------------------- |
| algebra (float64) | step | 1.0e-13 | 1e-10 |     980x | `pos 23 " t23"`             |
| sigma             | step |    1.71 |  8.00 |     4.7x | -                           |
| worst position    | step |    2.40 | 16.00 |     6.7x | `pos 4 " is"`               |
| decisive flips    | step |       0 |     0 |        - | -                           |
| keys worst row    | step |       - | 50.00 |        - | `not run: no keys in trace` |

Controls: sdpa-step, held out: agrees (sigma 1.02); sdpa-step times 1.001: differs (sigma 812); 5 distinct pool members.

## Not exercised

What this comparison does not speak of.

- positions beyond 23: give --tokens with more
- batches: `mlxkv pitfalls` tries them

## Cached against uncached

Table 3 of the page: a minus b in logits, from the prompt's last token on; first and last row's largest, rms over all.

On the page, candle 0.11.0 stands where this engine stands here.

| a                   | b                   | max abs delta |    first |     last |      rms | top-1 | max abs b | on the page |
| ------------------- | ------------------- | ------------: | -------: | -------: | -------: | ----: | --------: | ----------: |
| transformers cached | transformers full   |      5.20e-05 | 1.00e-05 | 2.00e-05 | 9.70e-06 | 20/20 |    38.246 |    8.01e-05 |
| mlxkv cached        | transformers full   |      8.10e-05 | 3.00e-05 | 4.00e-05 | 1.65e-05 | 20/20 |    38.246 |    8.20e-05 |
| mlxkv cached        | transformers cached |      7.70e-05 | 3.00e-05 | 4.00e-05 | 1.50e-05 | 19/20 |    38.246 |           - |

## Chunked prefill

Table 4 of the page: a minus b in logits, from the prompt's last token on; first and last row's largest, rms over all.

On the page, candle 0.11.0 stands where this engine stands here.

| a             | b            | max abs delta | first | last | rms | top-1 | max abs b | on the page |
| ------------- | ------------ | ------------: | ----: | ---: | --: | ----: | --------: | ----------: |
| mlxkv chunked | mlxkv cached |             0 |     0 |    0 |   0 | 20/20 |    38.246 |    2.91e-05 |

## Three engines

The same rows: a minus b in logits, from the prompt's last token on; first and last row's largest, rms over all.

| a             | b            | max abs delta |    first |     last |      rms | top-1 | max abs b |
| ------------- | ------------ | ------------: | -------: | -------: | -------: | ----: | --------: |
| candle cached | mlxkv cached |      7.00e-05 | 1.00e-05 | 2.00e-05 | 1.00e-05 | 20/20 |    38.246 |

## Tokens

|           | text                         | ids           |
| --------- | ---------------------------- | ------------- |
| prompt    | `"The capital of France is"` | `0 1 2 3 4`   |
| generated | `" Paris.\\n"`                | `7042 30 198` |

## Error by position

![rms error of each plan, position by position, beside the noise floor](compare.svg)

## Shown, not judged

Against the float64 truth, over all rows of each plan: what other tools look at. They pass most faults that the gates catch.

| plan | max abs delta |      rms | NMSE (dB) | 1 - cosine | KL (nats) | top-1 | top-5 |
| ---- | ------------: | -------: | --------: | ---------: | --------: | ----: | ----: |
| step |      8.10e-05 | 1.65e-05 |    -104.3 |   2.50e-12 |  1.31e-11 | 24/24 | 23/24 |

## Environment

|           | mlxkv                       | oracle                                |
| --------- | --------------------------- | ------------------------------------- |
| engine    | mlxkv 1.0                   | transformers and strict float64 truth |
| device    | cpu                         | cpu                                   |
| dtype     | float32                     | float32                               |
| blas      | OpenBLAS (libopenblas.so.0) | -                                     |
| mlx       | 0.32.4                      | -                                     |
| os        | Linux 6                     | Linux                                 |
| threads   | 2                           | 2                                     |
| precision | -                           | mkldnn=True, tf32=False               |
| torch     | -                           | 2.13.0                                |

## Inputs

|                     |                                                               |
| ------------------- | ------------------------------------------------------------- |
| model               | `default`                                                     |
| weights fingerprint | `f0f0f0f0`                                                    |
| config digest       | `c0c0c0c0`                                                    |
| truth               | step = full = chunked to 1.1e-13, transformers within 5.4e-16 |
| plan chunked        | `dddddddd`                                                    |
| plan full           | `aaaaaaaa`                                                    |
| plan prefixes       | `cccccccc`                                                    |
| plan step           | `bbbbbbbb`                                                    |

## Reproduce

```sh
mlxkv compare --steps 20
```

## Words

- **the page**: the article on KV caches in transformers and candle whose experiments this project repeats
- **full**: the whole sequence in one call
- **step**: the prompt, then single tokens through the cache (the page's *cached*)
- **prefixes**: no cache, the growing prefix at every step (the page's *nocache*)
- **chunked**: the prompt in several calls, then single tokens
- **mixed**: a small chunk, one longer than what is held, single tokens, several again, to the end
- **probe**: a sequence of up to 300 ids that span the vocabulary, judged beside the prompt's own in the plans full and chunked, at a sample of its positions
- **first wrong position**: the first that is beyond the limit of a single row; *about*: only several rows from there on are together, beyond that of their median; *between*: those before it were not compared
- **noise floor**: how far transformers itself, in up to six orders of evaluation, is from the float64 truth at a position
- **algebra**: the engine in float64 against the truth, where there is no noise
- **sigma**: rms error over all positions, in noise floors; correct engines read about 1
- **worst position, peak**: the worst position's rms, and the largest single logit's error, in their floors
- **shift**: a common offset of all logits of a position, which sigma leaves out, in its floor
- **decisive flips**: positions whose highest token changed although the truth's margin is far above the noise
- **repeat**: positions at which the same plan, followed a second time, gave other bits; of an engine that is not deterministic, the difference in the floors of cached against uncached
- **cached against uncached**: step against full within the engine, in units of the same difference within transformers
- **keys, values**: rows of the cache that a plan leaves, per layer and head, in floors: median, 95th percentile and worst over positions; prefixes leaves none
"""
