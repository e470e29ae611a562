"""What `locate` writes: the expected text stands whole.

The strip is the same file for the same numbers, and holds no picture.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
from synthetic import make_case, texts

from mlxkv.commands.locate import page as report
from mlxkv.commands.locate.found import Located, TapRow
from mlxkv.judge.result import Strip
from mlxkv.report.plots import heat_strip

MANIFEST = make_case().manifest
NOTHING = Located("nothing", rows=(TapRow(1, "q", 2e-16, 3e-15), TapRow(0, "hidden", 5e-16, 9e-15)))
FOUND = Located(
    "located",
    plan="step",
    position=8,
    token=" t8",
    kind="a stale or lost cache row",
    layer=1,
    layers=(1,),
    tap="keys",
    head=0,
    heads=(0,),
    hint="the cache: row 8 of its keys in layer 1, head 0, is the truth's row 7: stale",
    cause="none of the usual suspects",
    rows=(
        TapRow(1, "k_rope", 2e-16, 3e-15),
        TapRow(1, "keys", 0.5, 0.5, 8, (0,)),
        TapRow(1, "attention", float("nan"), 0.1, 8, (0, 1)),
        TapRow(2, "logits", 3e-16, 0.25),
    ),
    strip=Strip("hidden state", 1e-12, ((1e-16, 1e-16), (1e-16, 0.5))),
    notes=("a note",),
)

CONSOLE = """\
tiny (random)  float32  mlxkv

plan      step
position  8 " t8", the first wrong of 24
layer     1 (this layer alone)
tap       keys
heads     0
hint      the cache: row 8 of its keys in layer 1, head 0, is the truth's row 7: stale
cause     none of the usual suspects

layer  tap        isolated  propagated  first wrong  wrong heads
    1  k_rope     2.00e-16    3.00e-15            -  -
    1  keys       5.00e-01    5.00e-01            8  0
    1  attention       nan    1.00e-01            8  0, 1
    -  logits     3.00e-16    2.50e-01            -  -

note: a note
located: position 8, layer 1, keys, head 0
report: out/locate.md
"""

MARKDOWN = """\
# Where mlxkv goes wrong: tiny (random), float32

**located: position 8, layer 1, keys, head 0**

- a note

## Place

|          |                                                                                |
| -------- | ------------------------------------------------------------------------------ |
| plan     | `step`                                                                         |
| position | `8 " t8", the first wrong of 24`                                               |
| layer    | `1 (this layer alone)`                                                         |
| tap      | `keys`                                                                         |
| heads    | `0`                                                                            |
| hint     | `the cache: row 8 of its keys in layer 1, head 0, is the truth's row 7: stale` |
| cause    | `none of the usual suspects`                                                   |

## Taps

Of the first wrong layer. Limit of the isolated error: 1e-12.

| layer | tap       | isolated | propagated | first wrong | wrong heads |
| ----: | --------- | -------: | ---------: | ----------: | ----------- |
|     1 | k_rope    | 2.00e-16 |   3.00e-15 |           - | -           |
|     1 | keys      | 5.00e-01 |   5.00e-01 |           8 | 0           |
|     1 | attention |      nan |   1.00e-01 |           8 | 0, 1        |
|     - | logits    | 3.00e-16 |   2.50e-01 |           - | -           |

## By layer and position

hidden state; limit 1e-12.

![hidden state](locate.svg)

## Reproduce

```sh
mlxkv locate
```

## Words
"""


def words(svg: str) -> list[str]:
    return [
        "".join(e.itertext()).strip()
        for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_the_terminal_shows_the_place_then_the_taps_then_one_line() -> None:
    assert (
        report.console(FOUND, MANIFEST, engine="mlxkv", layers=2, report="out/locate.md") == CONSOLE
    )


def test_the_markdown_stands_whole() -> None:
    made = report.markdown(
        FOUND, MANIFEST, engine="mlxkv", layers=2, commands=["mlxkv locate"], svg="locate.svg"
    )
    assert made.split("\n- **isolated**")[0].rstrip() + "\n" == MARKDOWN


def test_on_a_right_run_it_says_that_nothing_stands_out() -> None:
    line = "nothing stands out: every tap within 5.00e-16 of the truth (limit 1e-12)"
    assert report.sentence(NOTHING) == line
    assert report.console(NOTHING, MANIFEST, engine="mlxkv", layers=2).splitlines()[-1] == line
    assert "## Place" not in report.markdown(NOTHING, MANIFEST, engine="mlxkv", layers=2)
    assert report.sentence(replace(NOTHING, rows=())) == "nothing stands out"


def test_what_cannot_be_told_gives_every_reason_once() -> None:
    text = report.console(
        Located("cannot tell", reasons=("one", "two")), MANIFEST, engine="x", layers=2
    )
    assert text == "tiny (random)  float32  x\n\ncannot tell: two\ncannot tell: one\n"


def test_taps_that_an_engine_hands_out_stand_beside_the_noise_of_the_ports() -> None:
    rows = (
        TapRow(1, "k_rope", None, 2e-7, floors=0.9),
        TapRow(1, "keys", None, 0.5, 8, (0,), floors=1.2e6),
    )
    found = replace(FOUND, layers=(), rows=rows)
    lines = report.console(found, MANIFEST, engine="mine", layers=2).splitlines()
    assert lines[10:13] == [
        "layer  tap        error  noise floors  first wrong  wrong heads",
        "    1  k_rope  2.00e-07      9.00e-01            -  -",
        "    1  keys    5.00e-01      1.20e+06            8  0",
    ]
    limit = "Limits in noise floors: 4 for a tap's median, 30 for one row."
    assert limit in report.markdown(found, MANIFEST, engine="mine", layers=2)
    assert report.sentence(replace(NOTHING, rows=rows[:1])) == "nothing stands out"


def test_how_many_layers_are_wrong_and_whether_every_head_is() -> None:
    told = dict(
        report.facts(replace(FOUND, layers=(1, 2), head=None, heads=(0, 1)), MANIFEST, layers=3)
    )
    assert (told["layer"], told["heads"]) == (
        "1 (2 of 3 layers are wrong by themselves)",
        "0, 1 (every one)",
    )
    told = dict(report.facts(replace(FOUND, layers=(1, 2)), MANIFEST, layers=2))
    assert told["layer"] == "1 (every layer is wrong by itself)"
    # Where no layer was fed the truth's input, nothing is said of the layers behind the first.
    told = dict(report.facts(replace(FOUND, layers=()), MANIFEST, layers=2))
    assert told["layer"] == "1, the first that shows"
    told = dict(report.facts(replace(FOUND, layer=None, tap=None, heads=()), MANIFEST, layers=2))
    assert (told["layer"], told["position"]) == (
        "-",
        '8 " t8", the first wrong of 24: a stale or lost cache row',
    )


def test_the_strip_is_the_same_file_for_the_same_numbers_without_a_date_or_a_picture() -> None:
    values = tuple(tuple(10.0 ** -(layer + p % 7) for p in range(24)) for layer in range(3))
    first, second = (
        heat_strip(Strip("hidden state", 1e-12, values), texts=texts(), at=(1, 8), title="SmolLM2")
        for _ in range(2)
    )
    assert first == second
    assert "<dc:date>" not in first
    assert "<image" not in first
    assert [
        e
        for e in ("SmolLM2", "layer", "limit 1e-12", "1e-17", '" is" 4', "token and position")
        if e not in words(first)
    ] == []


def test_the_strip_takes_zeros_huge_numbers_and_none() -> None:
    svg = heat_strip(Strip("x", 1e-12, ((0.0, None, 1e300), (1e-20, 1.0, None))))
    assert "position" in words(svg)
    assert "#000000" not in [
        cell.get("fill")
        for cell in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    ]


def test_a_long_sequence_shares_columns_and_shows_the_largest_of_each() -> None:
    values = np.full((2, 1000), 1e-16)
    values[1, 777] = 1.0
    long = heat_strip(Strip("x", 1e-12, tuple(map(tuple, values.tolist()))), at=(1, 777))
    values[1, 777] = 1e-16
    assert long.count("<path") < 400
    assert long != heat_strip(Strip("x", 1e-12, tuple(map(tuple, values.tolist()))), at=(1, 777))
