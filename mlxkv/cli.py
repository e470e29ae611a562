"""The command line. It reads options, makes a command's request, and prints what comes of it.

Results go to stdout, the rest to stderr. What a command needs is imported when it runs, so that
`--help` costs nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oracle.formats import exits
from oracle.formats.disk import read_text
from oracle.formats.errors import Refusal
from oracle.formats.options import Listed, Option, Whole, option, options, whole

if TYPE_CHECKING:
    from mlxkv.commands.compare.ask import Request
    from mlxkv.report.publish import Report


FOLDER = click.Path(path_type=Path)
PARTS = click.Choice(
    [
        "compare",
        "pitfalls",
        "caches",
        "prompts",
        "long",
        "cost",
        "selftest",
        "calibration",
        "bench",
        "scale",
    ]
)
CASES = click.Choice(["wide4", "wide8", "whole", "long", "one"])
ONE_OR_MORE = Whole(1)
_OF_ONE = ("prompt", "prompt_file", "tokens", "chunks", "oracle")  # options of one sequence


def _dtype(what: str, *, default: str | None = "float32") -> Option:
    dtypes = click.Choice(["float32", "float16", "bfloat16"])
    return option("--dtype", what, type=dtypes, default=default)


def _json(what: str) -> Option:
    return option("--json", f"Print {what} as JSON.", into="as_json", is_flag=True)


def _report(what: str) -> Option:
    """--out and --json, for a function that returns what makes its report.

    The report is written and printed, and its exit code is the command's.
    """

    def apply(function: Callable[..., Callable[..., Report]]) -> Callable[..., Any]:
        @wraps(function)
        def command(out: Path, as_json: bool, **options: Any) -> None:
            from mlxkv.engines import stays
            from mlxkv.report.publish import publish

            with stays.told():
                make = function(**options)
                report = publish(out, partial(make, out=out, command=_command_line()))
            _print(report.json if as_json else report.text)
            sys.exit(report.exit_code)

        return options(_out, _json(what))(command)

    return apply


_out = option("--out", "Where the report goes.", type=FOLDER, default=Path("mlxkv-report"))
_debug = option(
    "--debug",
    "Pass on what an engine prints, and show whole tracebacks, on stderr.",
    is_flag=True,
    expose_value=False,
    callback=lambda _, __, given: os.environ.update({exits.DEBUG: "1"} if given else {}),
)
_device = option(
    "--device", "Where MLX runs.", type=click.Choice(["auto", "gpu", "cpu"]), default="auto"
)
_model = options(
    click.argument("model", required=False),
    option("--revision", "The commit of a Hub model."),
    option(
        "--ignore-key",
        "An unknown key of config.json that changes nothing, to be taken out (may be given again).",
        into="ignore_keys",
        metavar="NAME",
        multiple=True,
    ),
    _debug,
)
_run = options(
    option("--prompt", "Text to start from  [default: The capital of France is]"),
    option("--prompt-file", "A UTF-8 text file to start from.", type=FOLDER),
    option("--tokens", "Token ids to start from.", type=Listed(whole)),
    option(
        "--steps", "Greedy tokens to choose; the last is not fed  [default: 20]", type=ONE_OR_MORE
    ),
    option("--chunks", "Sizes in which the chunked plan sends the prompt.", type=Listed(whole)),
    _dtype("What both engines compute in  [default: float32]", default=None),
    _device,
    option("--threads", "Threads of the oracle  [default: one per core]", type=ONE_OR_MORE),
    option(
        "--engine",
        "Whose Llama is judged  [default: port]",
        metavar="[port|mlx-lm|FILE.py:load]",
    ),
    option(
        "--cache",
        "The cache that mlx-lm's Llama is judged on; make(config) gives one for each layer.",
        metavar="[NAME[:KEY=VALUE,...]|FILE.py:make|module:function]",
    ),
    option(
        "--lossy",
        "What a --cache of your own loses by design.",
        type=click.Choice(["quantised", "depends", "window"]),
    ),
    option("--oracle", "A folder from `mlxkv-oracle run`, made here or elsewhere.", type=FOLDER),
    option("--fresh", "Ask the oracle again, whatever was kept.", is_flag=True),
    option("--quick", "Leave out the probe: up to 300 ids that span the vocabulary.", is_flag=True),
    option("--all-rows", "Of over 1,024 tokens compare all rows, not a sample.", is_flag=True),
    option(
        "--candidate",
        "A trace of a third engine, to be judged beside (may be given again).",
        into="candidates",
        type=FOLDER,
        multiple=True,
    ),
    option("--ranks", "Processes on this machine that share the engine's model.", type=Whole(2)),
    option(
        "--hostfile",
        "A file of mlx.launch's: a host for each rank, this machine first.",
        type=FOLDER,
    ),
)
_models = options(
    option("--tiny/--no-tiny", "Small random models too.", default=True),
    option("--real/--no-real", "MODEL, or the default model.", default=True),
    _dtype("What lane B computes in."),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlxkv", prog_name="mlxkv")
def cli() -> None:
    """Is my KV cache right, is my port right, and if not, where does it first go wrong?

    Exit codes: 0 agree, 1 differ, 2 could not tell, 130 interrupted, 143 terminated.
    """


@cli.command()
@_model
@_run
@option(
    "--prompts",
    "Many prompts: JSON lines, or a text a line; the worst decides.",
    metavar="FILE|builtin",
)
@option("--jsonl", "With --prompts: a line of JSON for each, as soon as it is judged.", type=FOLDER)
@option(
    "--dry-run",
    "Print the plans, time, memory and disk of all this, and run nothing.",
    is_flag=True,
)
@_report("the verdict")
def compare(
    prompts: str | None,
    jsonl: Path | None,
    dry_run: bool,
    candidates: tuple[Path, ...],
    **options: Any,
) -> Callable[..., Report]:
    """Judge the port on MODEL: a folder, a Hub id, a GGUF file, or nothing for the default model.

    Runs the oracle (or reuses what it wrote), then the port in the run's dtype and in float64, over
    your tokens and over the model's probe, and writes a report. With --engine mlx-lm the same plans
    are judged as mlx-lm's own Llama follows them, in the run's dtype alone; with --engine
    FILE.py:load those of your own MLX model, which load(path, dtype) returns: model(tokens,
    cache=cache) and make_cache(). With --cache it is mlx-lm's Llama on another cache: one that has
    a name, such as QuantizedKVCache:bits=8, or your own.
    """
    from mlxkv.commands.compare import dry, many, run

    if prompts is None:
        if jsonl is not None:
            what = "expected it beside --prompts, one line a prompt"
            raise Refusal(what, where=f"--jsonl {jsonl}", remedy="use --json, or give --prompts")
        request = _request(has_oracle=True, **options)
        if dry_run:
            return partial(dry.report, [request])
        return partial(run.report, request, candidates=candidates)
    of_one = {f"--{name.replace('_', '-')}": options[name] for name in _OF_ONE}
    beside = [name for name, value in of_one.items() if value is not None]
    beside += ["--candidate"] if candidates else []
    if beside:
        what = "expected --prompts alone, as each prompt has its own"
        where = f"--prompts and {' and '.join(beside)}"
        raise Refusal(what, where=where, remedy="leave one side out")
    if dry_run:
        return partial(dry.report, many.requests(_request(**options), prompts))
    return partial(many.report, _request(**options), prompts, lines=jsonl)


@cli.command()
@click.argument("folder", type=FOLDER)
@click.argument("traces", nargs=-1, required=True, type=FOLDER, metavar="TRACE...")
@_report("the verdict")
def judge(folder: Path, traces: tuple[Path, ...]) -> Callable[..., Report]:
    """Judge stored TRACEs of one engine by FOLDER, which `mlxkv-oracle run` made.

    Nothing runs, and neither MLX nor torch is needed.
    """
    from mlxkv.commands.judge import report

    return partial(report, folder, traces)


@cli.command()
@click.argument("traces", nargs=-1, type=FOLDER, metavar="A B [C ...]")
@_json("the numbers")
def delta(traces: tuple[Path, ...], as_json: bool) -> None:
    """Compare stored traces of any engines, every pair over the positions that both have.

    Exit code 0 when they were compared, whatever the numbers: nothing is judged. 2 when they cannot
    be: other weights, other tokens, another vocabulary.
    """
    from mlxkv.commands.compare.delta import delta as compared

    if len(traces) < 2:
        raise Refusal(f"delta: {len(traces)} traces, expected two or more; give their files")
    _print(compared(traces, as_json=as_json))


@cli.command()
@_model
@option("--prompt", "The first prompt  [default: The capital of France is]")
@option("--other-prompt", "Another that begins alike  [default: The capital of Germany is]")
@option("--tokens", "The first prompt as token ids.", type=Listed(whole))
@option("--other-tokens", "The other as token ids.", type=Listed(whole))
@option("--steps", "Greedy tokens after each prompt.", type=Whole(3), default=20)
@option(
    "--cache",
    "A cache to put through its lives instead; may be given again.",
    into="caches",
    metavar="NAME|FILE.py:make|module:function|all",
    multiple=True,
)
@option(
    "--lossy",
    "What a cache of your own keeps less than it is given for: fewer bits; fewer bits, and what is "
    "kept depends on the calls; or a window.",
    type=click.Choice(["quantised", "depends", "window"]),
)
@_device
@_report("the matrix")
def pitfalls(caches: tuple[str, ...], lossy: Any, **options: Any) -> Callable[..., Report]:
    """Run every right and wrong use of a cache on four systems, and say what came of it.

    The systems: transformers, the port in candle's mode, the guarded port, mlx-lm. Exit code 0 when
    every system behaved as documented, 1 when one did not, which is news.

    With --cache the caches that you name, or all that are built in, are trimmed, copied, saved,
    batched, broken off and more. FILE.py:make is executed: make(config) is given mlx-lm's ModelArgs
    and returns one cache per layer. Exit code 0 when what is built in behaved as known and your own
    is nowhere silently wrong, else 1.
    """
    if caches:
        from mlxkv.commands.pitfalls import conform

        return partial(
            conform.report, conform.CacheRequest(caches=caches, lossy=lossy or "", **options)
        )
    if lossy:
        raise Refusal(f"--lossy {lossy}: expected it beside --cache; name a cache, or leave it out")
    from mlxkv.commands.pitfalls.run import Request, report

    return partial(report, Request(**options))


@cli.command()
@_model
@option("--text", "A UTF-8 text file to measure on  [default: a built-in one]", type=FOLDER)
@option("--tokens", "The text as token ids.", type=Listed(whole))
@option(
    "--cache",
    "Beside the full cache only this one (may be given again): a name of `mlxkv pitfalls`, "
    "FILE.py:make or module:function.",
    into="caches",
    metavar="CACHE",
    multiple=True,
)
@option(
    "--lossy",
    "What a cache of your own keeps less of.",
    type=click.Choice(["quantised", "depends", "window"]),
)
@option(
    "--known",
    "What a cache of your own is meant to keep, as `mlxkv-oracle text --stored` takes it.",
    metavar="SPEC",
)
@option(
    "--variants",
    "Without --cache: which caches.",
    into="chosen",
    type=click.Choice(["default", "all"]),
    default="default",
)
@option("--length", "Tokens that go in chunks  [default: 1024]", type=ONE_OR_MORE)
@option("--chunk", "Tokens of a chunk.", type=ONE_OR_MORE, default=64)
@option("--decode", "Tokens after them, one by one  [default: 256]", type=Whole(0))
@option("--fresh", "Ask the oracle again, whatever was kept.", is_flag=True)
@_device
@_report("the figures")
def cost(**options: Any) -> Callable[..., Report]:
    """Measure what a smaller cache costs on a text, against the float64 truth.

    KL, perplexity, kept tokens, bytes and speed of mlx-lm's Llama on caches that keep fewer bits or
    fewer rows, beside float32's own noise. Nothing is judged as right. Exit code 0 when measured,
    1 where a cache is away from what the oracle computes for one that keeps just that.
    """
    from mlxkv.commands.cost.ask import Request
    from mlxkv.commands.cost.run import report

    return partial(report, Request(**options))


@cli.command()
@_model
@_run
@_report("what was found")
def locate(candidates: tuple[Path, ...], **options: Any) -> Callable[..., Report]:
    """Find where the port on MODEL first goes wrong: position, layer, place, head, and a hint.

    Of another engine, and of one on --ranks, only the logits and the cache can be seen: position,
    layer, keys or values, head. With --oracle, the --taps of `mlxkv-oracle run` say what the folder
    records.

    Exit codes: 0 nothing stands out, 1 something is located, 2 could not tell.
    """
    from mlxkv.commands.locate.run import report

    return partial(report, _request(has_oracle=True, **options), candidates=candidates)


@cli.command()
@_model
@_models
@option(
    "--fault", "Only this fault; may be given again  [default: all]", into="faults", multiple=True
)
@option(
    "--power",
    "Also put into this file what lane B lets pass; mlxkv/judge/power.json is the package's.",
    type=FOLDER,
)
@_report("the trials")
def selftest(**options: Any) -> Callable[..., Report]:
    """Put known faults into the port and see that each is found, in its place.

    No correct run may be accused. Exit code 0 when nothing was missed and nobody accused, else 1.
    """
    from mlxkv.commands.selftest.run import Request, report

    return partial(report, Request(**options))


@cli.command()
@_model
@_models
@option("--seeds", "Correct runs on each model.", type=ONE_OR_MORE, default=5)
@_report("the readings")
def calibrate(**options: Any) -> Callable[..., Report]:
    """Measure what correct runs read at every gate, beside its limit: several models, all plans.

    Exit code 0 when every correct run is within every limit, else 1.
    """
    from mlxkv.commands.selftest.calibrate import Request, report

    return partial(report, Request(**options))


@cli.command()
@option(
    "--check",
    "Make them again in a scratch folder and compare with the committed ones.",
    is_flag=True,
)
@option(
    "--only", "Some of the parts  [default: all but bench and scale]", type=PARTS, multiple=True
)
@option(
    "--case",
    "Of scale: only this case; may be given again.",
    into="cases",
    type=CASES,
    multiple=True,
)
@option("--room", "Of scale: where models are made  [default: the cache folder]", type=FOLDER)
@option("--keep", "Of scale: leave them in --room; a model that is there is used.", is_flag=True)
@option("--candidate", "As for compare.", into="candidates", type=FOLDER, multiple=True)
@option("--out", "Where the reports are.", type=FOLDER, default=Path("reports"))
@_device
def reports(
    check: bool,
    only: tuple[str, ...],
    candidates: tuple[Path, ...],
    out: Path,
    device: str,
    **scale: Any,
) -> None:
    """Make everything under reports/ again, or check that it still says the same.

    Two parts are made only when they are named. bench wants a quiet machine for an hour. scale
    makes models of up to 7 billion parameters, and up to 32,768 tokens; it takes hours and tens of
    gigabytes of disk, and each of its cases is kept when it is done.

    The check wants tokens, errors and verdicts exactly and deltas within a factor of 2; it exits
    with 1 and a diff otherwise. Of reports that another CPU made, or other instructions of it, it
    only says that the deltas are further apart.
    """
    from mlxkv.commands import reports as room

    at = room.Scale(**scale)
    if check:
        checked = room.check(out, only=only, device=device, at=at)
        _print("".join(f"{line}\n" for line in checked.lines) or f"{out}: as committed\n")
        sys.exit(checked.exit_code)
    for path in room.write(out, only=only, candidates=candidates, device=device, at=at):
        _print(f"{path}\n")


@cli.command()
@_model
@option("--full", "The whole grid: more lengths, all dtypes, batches of 8 too.", is_flag=True)
@option("--prefill", "Prompt lengths; only those and what --decode says.", type=Listed(whole))
@option("--decode", "Lengths to decode after; only those and --prefill's.", type=Listed(whole))
@option("--batch", "Sequences at once  [default: 1]", into="batches", type=Listed(whole))
@option(
    "--dtype",
    "What both compute in; may be given again  [default: float32]",
    into="dtypes",
    type=click.Choice(["float32", "float16", "bfloat16", "4bit"]),
    multiple=True,
)
@option("--overhead/--no-overhead", "A model bound by the number of its kernels.", default=None)
@option("--steps", "Tokens decoded in a turn.", type=ONE_OR_MORE, default=32)
@option("--rounds", "Turns of each engine  [default: as many as a cell needs]", type=ONE_OR_MORE)
@_device
@option("--export-json", "Also write the figures there.", type=FOLDER)
@option("--export-markdown", "Also write a page there.", type=FOLDER)
@option("--export-svg", "Also draw the ratios there.", type=FOLDER)
@_json("the figures")
def bench(
    export_json: Path | None,
    export_markdown: Path | None,
    export_svg: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the port's speed beside mlx-lm's, and count what a GPU would run of both.

    Turns of both engines follow each other; what counts is the ratio of a pair. Without options it
    takes less than 10 minutes on two quiet cores, with --full about an hour.
    """
    from mlxkv.commands.bench.ask import Request
    from mlxkv.commands.bench.run import report

    exports = {"json": export_json, "md": export_markdown, "svg": export_svg}
    given = {kind: path for kind, path in exports.items() if path is not None}
    _print(report(Request(**options), given, as_json=as_json, command=_command_line()))


@cli.command()
@_model
@option("--prompt", "Text to start from.", default="The capital of France is")
@option("-n", "Tokens to generate.", into="--steps", type=ONE_OR_MORE, default=50)
@_dtype("What the port computes in.")
@_device
def generate(prompt: str, steps: int, dtype: str, device: str, **named: Any) -> None:
    """Stream greedy text from the port."""
    from mlxkv.commands import show
    from oracle.model.checkpoint import Named

    for piece in show.generate(Named(**named), prompt, steps, dtype=dtype, device=device):
        _print(piece)
    _print("\n")


@cli.command()
@_model
@_json("the same")
def inspect(as_json: bool, **named: Any) -> None:
    """Show a checkpoint's config, RoPE, cache layout and bytes, and the ignored config keys."""
    from mlxkv.commands import show
    from oracle.model.checkpoint import Named

    _print(show.inspect(Named(**named), as_json=as_json))


@cli.command()
@_json("the same")
def doctor(as_json: bool) -> None:
    """Say what is installed, which device and BLAS MLX would use, and where the caches are."""
    from mlxkv.commands import show

    text, exit_code = show.doctor(as_json=as_json)
    _print(text)
    sys.exit(exit_code)


@cli.group()
def store() -> None:
    """Show what is kept in the cache folder, or clear it."""


@store.command("list")
@_json("the same")
def list_store(as_json: bool) -> None:
    """List what is kept, with sizes and ages, the newest last.

    Converted models and weights, the oracle's answers, suspects and texts, hashes of weights, what
    runs that broke off have finished, and what runs work in or have left where they were killed.
    Ages are those of the last use, or of the making.
    """
    from mlxkv.commands import store as room

    _print(room.listing(as_json=as_json))


@store.command("clear")
@option(
    "--kind",
    "Only this kind; may be given again  [default: all]",
    into="kinds",
    type=click.Choice(
        ["models", "converted", "oracle", "suspects", "texts", "fingerprints", "lanes", "runs"]
    ),
    multiple=True,
)
@option("--older-than", "Only what is older, such as 90m, 12h, 30d or 2w.", metavar="AGE")
@option("--yes", "Remove without asking.", is_flag=True)
def clear_store(kinds: tuple[str, ...], older_than: str | None, yes: bool) -> None:
    """Remove what is kept, and say what that freed; it is made again where it is needed.

    What a running process uses is left alone, and so is everything that mlxkv did not name.
    """
    from mlxkv.commands import store as room

    entries = room.clearing(kinds, older_than)
    if not room.confirmed(entries, yes=yes):
        _print("nothing removed\n")
        return
    text, exit_code = room.clear(entries)
    _print(text)
    sys.exit(exit_code)


def _request(
    prompt: str | None,
    prompt_file: Path | None,
    tokens: tuple[int, ...] | None,
    engine: str | None,
    cache: str | None,
    lossy: Any,
    **rest: Any,
) -> Request:
    from mlxkv.commands.compare.ask import Request
    from mlxkv.engines import kinds

    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--tokens": tokens}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise Refusal(f"{' and '.join(given)}: expected one of them; leave the others out")
    prompt = read_text(prompt_file) if prompt_file is not None else prompt
    kind = kinds.inside(cache, engine=engine, lossy=lossy)
    engine = engine or ("port" if kind is None else "mlx-lm")
    return Request(prompt=prompt, tokens=tokens, engine=engine, cache=kind, **rest)


def _command_line() -> str:
    """What was typed, for the report; without the folder that the command lies in."""
    return shlex.join(["mlxkv", *sys.argv[1:]])


def _print(text: str) -> None:
    """Results to stdout; if they cannot go there, the exit code must not be that of a verdict."""
    try:
        click.echo(text, nl=False)
    except OSError as error:
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        what, remedy = f"cannot be written ({error.strerror})", "give it somewhere to go"
        raise Refusal(what, where="standard output", remedy=remedy) from error


def invoke(arguments: Sequence[str]) -> int:
    """The exit code of one command line, run in this process."""
    before = {name: os.environ[name] for name in (exits.DEBUG,) if name in os.environ}
    try:
        return exits.invoke(cli, arguments)
    finally:
        os.environ.pop(exits.DEBUG, None)  # that of --debug was this command's alone
        os.environ.update(before)


def main() -> None:
    exits.answer_signals()
    exits.console(cli)
