"""Right caches in formats of their own are not accused, and what is said of them helps."""

from __future__ import annotations

import own_formats as own
import planted
import pytest

from mlxkv.commands.pitfalls import cachepage, known, suite, unexercised
from mlxkv.commands.pitfalls.lives import Talks
from mlxkv.commands.pitfalls.trial import Trial
from mlxkv.engines import kinds
from mlxkv.engines.mlx_lm import MlxLmRunner
from mlxkv.report.text import shortened
from mlxkv.testing import assert_cache_behaves
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, New, Plan, Reset


def failed(make: planted.Make, lossy: str = "") -> tuple[set[str], str]:
    """The lives that do not behave, and all that is said."""
    with pytest.raises(AssertionError) as error:
        assert_cache_behaves(make, lossy=lossy)
    text = str(error.value)
    assert max(map(len, text.splitlines()[1:])) <= 100
    return set(text.splitlines()[0].partition(": ")[2].split(", ")), text


@pytest.mark.parametrize("lossy", ["", "quantised", "depends", "window"])
def test_a_cache_whose_first_call_raises_says_its_own_error(lossy: str) -> None:
    lives, text = failed(own.fails, lossy)
    assert {"singles", "alone"} <= lives
    said = " ".join(text.split())
    assert "RuntimeError: boom: the table" in said
    assert "(own_formats.py:" in said


@pytest.mark.parametrize(
    ("make", "lossy"),
    [
        (own.paged, ""),
        (own.block_keys, "depends"),
        (own.running, "depends"),
        (planted.of(own.Resets), ""),
        (planted.of(planted.QuantizedKVCache), "depends"),
    ],
)
def test_a_right_cache_of_its_own_format_passes(make: planted.Make, lossy: str) -> None:
    assert_cache_behaves(make, lossy=lossy)


@pytest.mark.parametrize("make", [own.block_keys, own.running])
def test_what_depends_on_its_calls_is_told_how_to_say_so(make: planted.Make) -> None:
    lives, text = failed(make, "quantised")
    assert "blocks-chunk" in lives
    assert "say so with --lossy depends" in " ".join(text.split())


@pytest.mark.parametrize(
    "name", ["stale scale after a trim", "a row lost where it grows", "batch row 1 reads row 0's"]
)
def test_nobody_is_told_so_whose_fault_is_another(name: str) -> None:
    """One after a trim, one that is wrong in the calls that it is measured by, one in a batch."""
    _, text = failed(planted.PLANTED[name][0], "" if "grows" in name else "quantised")
    assert "--lossy depends" not in " ".join(text.split())


def test_a_fault_of_one_that_depends_is_found() -> None:
    lives, _ = failed(planted.of(own.KeepsScale), "depends")
    assert "reset" in lives


@pytest.mark.parametrize(
    ("make", "lossy", "says"),
    [
        (own.shows_one_less, "quantised", "rows for"),
        (own.shows_one_less, "depends", "rows for"),
        (own.size_one_more, "", "size() is"),
        (planted.of(own.SizeOfBits), "quantised", "size() is"),
        (own.size_one_more, "window", "size() is"),
    ],
)
def test_rows_and_size_are_counted(make: planted.Make, lossy: str, says: str) -> None:
    lives, text = failed(make, lossy)
    assert lives == {"lengths"}
    assert says in text


def test_a_reset_of_ones_own_is_called() -> None:
    lives, _ = failed(planted.of(own.ResetKeepsARow))
    assert "reset" in lives


def says(kind: type, *steps: object) -> dict[str, object]:
    runner = _Made(suite.small(), Plan("a", (New("a"), *steps)), kind)  # type: ignore[arg-type]
    assert [one.error for one in runner.run().outcomes] == [None] * (1 + len(steps))
    shown = [name for name, *_ in runner.kept()]
    return {**runner.says()["caches"]["a"], "shown": len(shown)}


class _Made(MlxLmRunner):
    def __init__(self, model: object, plan: Plan, of: type) -> None:
        super().__init__(model, plan, kind=kinds.Kind("mine", "own", ""))
        self.of = of

    def _made(self, *_: object) -> list[object]:
        return [self.of() for _ in self.model.layers]


def test_rows_are_shown_where_they_are_as_many_as_are_held() -> None:
    long, short = Call("a", tuple(range(1, 18))), Call("a", (1, 2, 3))
    assert (says(own.Paged, long)["rows"], says(own.Paged, long)["shown"]) == (None, 0)
    assert (says(own.Resets, long)["rows"], says(own.Resets, long)["shown"]) == (17, 2)
    said = says(own.Resets, long, Reset("a"), short)
    assert (said["rows"], said["length"], said["reset"]) == (3, 3, "reset()")
    said = says(own.SizeOneMore, long, Reset("a"), short)
    assert (said["length"], said["reset"]) == (3, "a new one")


def of_window(size: int | None, lossy: kinds.Lossy = "window") -> Trial:
    talks = Talks(suite._setting(suite.small()), tuple(range(264)))
    return Trial(kinds.Kind("mine", "own", lossy), talks, size)


@pytest.mark.parametrize(
    ("size", "line"),
    [
        (10, ""),
        (None, "window not reached in 264 tokens: its ends were not tried"),
        (3, "window of 3 is shorter than 4 tokens: its ends were not tried"),
        (200, "window of 200 not gone through twice in 264 tokens: its ends were not tried"),
        (264, "window of 264 not reached in 264 tokens: its ends were not tried"),
        (300, "window of 300 not reached in 264 tokens: its ends were not tried"),
    ],
)
def test_a_window_that_no_life_reaches_is_said(size: int | None, line: str) -> None:
    trial = of_window(size)
    assert unexercised.ends_missed(trial) == line
    assert unexercised.ends_missed(of_window(None, "quantised")) == ""
    assert (line in unexercised.lines(trial)) == bool(line)


def test_a_window_that_was_not_found_is_said_with_the_table() -> None:
    lives, text = failed(planted.of(own.WideWindow), "window")
    assert lives == {"bytes"}
    assert text.endswith("window not reached in 264 tokens: its ends were not tried")


def test_what_was_not_exercised() -> None:
    plain, lossy = (unexercised.lines(of_window(None, name)) for name in ("", "quantised"))
    assert plain == (
        "batches of more than two rows",
        "positions from 264 on: no life is longer",
    )
    assert lossy == (*plain, unexercised.COST)
    assert "they depend on its calls" in " ".join(unexercised.lines(of_window(None, "depends")))


def test_an_error_is_shortened_in_its_middle() -> None:
    text = "AttributeError: 'A' object has no attribute 'b'" + "x" * 500 + "(mine.py:9 in c)"
    short = shortened(text, 300)
    assert len(short) == 300
    assert short.startswith("AttributeError: 'A' object has no attribute 'b'")
    assert short.endswith("(mine.py:9 in c)")
    assert shortened("few", 300) == "few"


@pytest.mark.parametrize("text", ["some/mine.py", "mine.py:"])
def test_a_file_without_its_function_is_asked_about(text: str) -> None:
    with pytest.raises(Refusal, match=f"did you mean {text.rstrip(':')}:make\\?"):
        kinds.parse(text)
    with pytest.raises(Refusal) as error:
        kinds.parse("KVCachee")
    assert "did you mean" not in str(error.value)


def test_a_function_is_named_by_its_last_part() -> None:
    def local(config: object) -> list[object]:
        return planted.RIGHT["KVCache"][0](config)

    trial, came = suite.tried(local, only=("singles",))
    assert trial.kind.name == "local"
    assert not any(known.odd(trial.kind, one) for one in came)
    assert cachepage.table(came)[0].startswith("life ")
