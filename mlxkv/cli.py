"""The command line. It reads options, makes a command's request, and prints what comes of it.

Results go to stdout, the rest to stderr. What a command needs is imported when it runs, so that
`--help` costs nothing.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oracle.formats import exits
from oracle.formats.errors import Refusal

if TYPE_CHECKING:
    from mlxkv.commands.compare.ask import Request
    from mlxkv.report.publish import Report


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers separated by commas."""

    name = "n,n,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """A tuple, or click's usage error."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: expected whole numbers separated by commas", param, ctx)


_Option = Callable[[Callable[..., Any]], Callable[..., Any]]
FOLDER = click.Path(path_type=Path)
PARTS = click.Choice(["compare", "pitfalls", "prompts", "long", "selftest", "calibration"])
ONE_OR_MORE = click.IntRange(1)


def _option(*names: str, **settings: Any) -> _Option:
    """An option whose default, if it has one, is shown."""
    return click.option(*names, show_default=settings.get("default") is not None, **settings)


def _options(*options: _Option) -> _Option:
    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def _choice(*names: str) -> click.Choice[str]:
    return click.Choice(names)


def _dtype(what: str, *, default: str | None = "float32") -> _Option:
    return _option(
        "--dtype", type=_choice("float32", "float16", "bfloat16"), default=default, help=what
    )


def _json(what: str) -> _Option:
    return _option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


_device = _option(
    "--device", type=_choice("auto", "gpu", "cpu"), default="auto", help="Where MLX runs."
)
_model = _options(
    click.argument("model", required=False),
    _option("--revision", help="The commit of a Hub model."),
    _option(
        "--ignore-key",
        "ignore_keys",
        metavar="NAME",
        multiple=True,
        help="An unknown key of config.json that changes nothing, to be taken out "
        "(may be given again).",
    ),
)
_run = _options(
    _option("--prompt", help="Text to start from  [default: The capital of France is]"),
    _option("--prompt-file", type=FOLDER, help="A UTF-8 text file to start from."),
    _option("--tokens", type=Numbers(), help="Token ids to start from."),
    _option(
        "--steps",
        type=ONE_OR_MORE,
        help="Greedy tokens to choose; the last is not fed  [default: 20]",
    ),
    _option("--chunks", type=Numbers(), help="Sizes in which the chunked plan sends the prompt."),
    _dtype("What both engines compute in  [default: float32]", default=None),
    _device,
    _option("--threads", type=ONE_OR_MORE, help="Threads of the oracle  [default: one per core]"),
    _option(
        "--engine",
        metavar="[port|mlx-lm|FILE.py:load]",
        default="port",
        help="Whose Llama is judged.",
    ),
    _option(
        "--oracle",
        type=FOLDER,
        help="A folder from `mlxkv-oracle run`, made here or elsewhere.",
    ),
    _option("--fresh", is_flag=True, help="Ask the oracle again, whatever was kept."),
    _option(
        "--candidate",
        "candidates",
        type=FOLDER,
        multiple=True,
        help="A trace of a third engine, to be treated in the same way and shown beside.",
    ),
)
_models = _options(
    _option("--tiny/--no-tiny", default=True, help="Small random models too."),
    _option("--real/--no-real", default=True, help="MODEL, or the default model."),
    _dtype("What lane B computes in."),
)
_out = _option("--out", type=FOLDER, default=Path("mlxkv-report"), help="Where the report goes.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlxkv", prog_name="mlxkv")
def cli() -> None:
    """Is my KV cache right, is my port right, and if not, where does it first go wrong?

    Exit codes: 0 agree, 1 differ, 2 could not tell, 130 interrupted.
    """


@cli.command()
@_model
@_run
@_option(
    "--prompts",
    metavar="FILE|builtin",
    help="Many prompts: JSON lines, or a text a line; the worst decides.",
)
@_out
@_json("the verdict")
def compare(
    prompts: str | None, candidates: tuple[Path, ...], out: Path, as_json: bool, **options: Any
) -> None:
    """Judge the port on MODEL: a folder, a Hub id, a GGUF file, or nothing for the default model.

    Runs the oracle (or reuses what it wrote), then the port in the run's dtype and in float64, and
    writes a report. With --engine mlx-lm the same plans are judged as mlx-lm's own Llama follows
    them, in the run's dtype alone; with --engine FILE.py:load those of your own MLX model, which
    load(path, dtype) returns: model(tokens, cache=cache) and make_cache().
    """
    from mlxkv.commands.compare import many, run

    if prompts is not None:
        _alone("--prompts", "prompt", "prompt_file", "tokens", "chunks", "oracle", "candidates")
    request, make = _request(**options), partial(run.report, candidates=candidates)
    if prompts is not None:
        make = partial(many.report, source=prompts)
    _publish(partial(make, request), out=out, as_json=as_json)


@cli.command()
@click.argument("folder", type=FOLDER)
@click.argument("traces", nargs=-1, required=True, type=FOLDER, metavar="TRACE...")
@_out
@_json("the verdict")
def judge(folder: Path, traces: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Judge stored TRACEs of one engine by FOLDER, which `mlxkv-oracle run` made.

    Nothing runs, and neither MLX nor torch is needed.
    """
    from mlxkv.commands.judge import report

    _publish(partial(report, folder, traces), out=out, as_json=as_json)


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
@_option("--prompt", help="The first prompt  [default: The capital of France is]")
@_option("--other-prompt", help="Another that begins alike  [default: The capital of Germany is]")
@_option("--tokens", type=Numbers(), help="The first prompt as token ids.")
@_option("--other-tokens", type=Numbers(), help="The other as token ids.")
@_option("--steps", type=click.IntRange(3), default=20, help="Greedy tokens after each prompt.")
@_device
@_out
@_json("the matrix")
def pitfalls(out: Path, as_json: bool, **options: Any) -> None:
    """Run every right and wrong use of a cache on four systems, and say what came of it.

    The systems: transformers, the port in candle's mode, the guarded port, mlx-lm. Exit code 0 when
    every system behaved as documented, 1 when one did not, which is news.
    """
    from mlxkv.commands.pitfalls.run import Request, report

    _publish(partial(report, Request(**options)), out=out, as_json=as_json)


@cli.command()
@_model
@_run
@_out
@_json("what was found")
def locate(candidates: tuple[Path, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Find where the port on MODEL first goes wrong: position, layer, place, head, and a hint.

    Of another engine only the logits and the cache can be seen: position, layer, keys or values,
    head. With --oracle, the --taps of `mlxkv-oracle run` say what the folder records.

    Exit codes: 0 nothing stands out, 1 something is located, 2 could not tell.
    """
    from mlxkv.commands.locate.run import report

    make = partial(report, _request(**options), candidates=candidates)
    _publish(make, out=out, as_json=as_json)


@cli.command()
@_model
@_models
@_option(
    "--fault", "faults", multiple=True, help="Only this fault; may be given again  [default: all]"
)
@_option(
    "--power",
    type=FOLDER,
    help="Also put into this file what lane B lets pass; mlxkv/judge/power.json is the package's.",
)
@_out
@_json("the trials")
def selftest(out: Path, as_json: bool, **options: Any) -> None:
    """Put known faults into the port and see that each is found, in its place.

    No correct run may be accused. Exit code 0 when nothing was missed and nobody accused, else 1.
    """
    from mlxkv.commands.selftest.run import Request, report

    _publish(partial(report, Request(**options)), out=out, as_json=as_json)


@cli.command()
@_model
@_models
@_option("--seeds", type=ONE_OR_MORE, default=5, help="Correct runs on each model.")
@_out
@_json("the readings")
def calibrate(out: Path, as_json: bool, **options: Any) -> None:
    """Measure what correct runs read at every gate, beside its limit: several models, all plans.

    Exit code 0 when every correct run is within every limit, else 1.
    """
    from mlxkv.commands.selftest.calibrate import Request, report

    _publish(partial(report, Request(**options)), out=out, as_json=as_json)


@cli.command()
@_option(
    "--check",
    is_flag=True,
    help="Make them again in a scratch folder and compare with the committed ones.",
)
@_option("--only", type=PARTS, multiple=True, help="Some of the parts  [default: all]")
@_option("--candidate", "candidates", type=FOLDER, multiple=True, help="As for compare.")
@_option("--out", type=FOLDER, default=Path("reports"), help="Where the reports are.")
@_device
def reports(
    check: bool, only: tuple[str, ...], candidates: tuple[Path, ...], out: Path, device: str
) -> None:
    """Make everything under reports/ again, or check that it still says the same.

    The check wants tokens, errors and verdicts exactly and deltas within a factor of 2; it exits
    with 1 and a diff otherwise. Of reports that another CPU made, or other instructions of it, it
    only says that the deltas are further apart.
    """
    from mlxkv.commands import reports as room

    if check:
        checked = room.check(out, only=only, device=device)
        _print("".join(f"{line}\n" for line in checked.lines) or f"{out}: as committed\n")
        sys.exit(checked.exit_code)
    for path in room.write(out, only=only, candidates=candidates, device=device):
        _print(f"{path}\n")


@cli.command()
@_model
@_dtype("What both compute in.")
@_device
@_option("--prefill", type=Numbers(), default="128,1024", help="Prompt lengths.")
@_option("--decode", type=ONE_OR_MORE, default=32, help="Tokens decoded after each.")
@_option("--rounds", type=ONE_OR_MORE, default=3, help="Turns of each engine per length.")
@_json("the figures")
def bench(as_json: bool, **options: Any) -> None:
    """Measure the port's speed beside mlx-lm's."""
    from mlxkv.commands.bench import Request, run

    _print(run(Request(**options), as_json=as_json))


@cli.command()
@_model
@_option("--prompt", default="The capital of France is", help="Text to start from.")
@_option("-n", "--steps", type=ONE_OR_MORE, default=50, help="Tokens to generate.")
@_dtype("What the port computes in.")
@_device
def generate(model: str | None, prompt: str, steps: int, **options: Any) -> None:
    """Stream greedy text from the port."""
    from mlxkv.commands import show

    for piece in show.generate(model, prompt, steps, **options):
        _print(piece)
    _print("\n")


@cli.command()
@_model
@_json("the same")
def inspect(model: str | None, as_json: bool, **source: Any) -> None:
    """Show a checkpoint's config, RoPE, cache layout and bytes, and the ignored config keys."""
    from mlxkv.commands import show

    _print(show.inspect(model, as_json=as_json, **source))


@cli.command()
def doctor() -> None:
    """Say what is installed, which device and BLAS MLX would use, and where the caches are."""
    from mlxkv.commands import show

    text, exit_code = show.doctor()
    _print(text)
    sys.exit(exit_code)


def _publish(make: Callable[..., Report], *, out: Path, as_json: bool) -> None:
    """Writes a command's report, prints it, and ends with its exit code."""
    from mlxkv.report.publish import publish

    report = publish(out, partial(make, out=out, command=_command_line()))
    _print(report.json if as_json else report.text)
    sys.exit(report.exit_code)


def _request(
    prompt: str | None, prompt_file: Path | None, tokens: tuple[int, ...] | None, **rest: Any
) -> Request:
    from mlxkv.commands.compare.ask import Request

    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--tokens": tokens}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise Refusal(f"{' and '.join(given)}: expected one of them; leave the others out")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            why = " ".join(str(error).split())
            raise Refusal(
                f"{prompt_file}: cannot be read as UTF-8 text ({why}); check the path"
            ) from error
    return Request(prompt=prompt, tokens=tokens, **rest)


def _alone(option: str, *others: str) -> None:
    """Refuses options that say of one sequence what `option` says of several."""
    typed = _typed()
    beside = [typed[name] for name in others if name in typed]
    if beside:
        raise Refusal(
            f"{option} and {' and '.join(beside)}: expected {option} alone, "
            "as each prompt has its own; leave one side out"
        )


def _typed() -> dict[str, str]:
    """What was given on the command line: each parameter's name, and how its option is spelled."""
    from click.core import ParameterSource

    context = click.get_current_context()
    return {
        str(p.name): p.opts[0]
        for p in context.command.params
        if context.get_parameter_source(str(p.name)) == ParameterSource.COMMANDLINE
    }


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
        raise Refusal(
            f"standard output: cannot be written ({error.strerror}); give it somewhere to go"
        ) from error


def invoke(arguments: Sequence[str]) -> int:
    """The exit code of one command line, run in this process."""
    return exits.invoke(cli, arguments)


def main() -> None:
    """The console script."""
    exits.answer_signals()
    exits.console(cli)
