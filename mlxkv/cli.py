"""The command line. It reads options, calls one function and prints: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from oracle.formats import exits
from oracle.formats.errors import Refusal


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


DTYPES = click.Choice(["float32", "float16", "bfloat16"])
DEVICES = click.Choice(["auto", "gpu", "cpu"])
REPORTS = click.Choice(["compare", "pitfalls", "prompts", "long", "selftest", "calibration"])
FOLDER = click.Path(path_type=Path)


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


_model = _options(
    click.argument("model", required=False),
    click.option("--revision", help="The commit of a Hub model."),
    click.option(
        "--ignore-key",
        "ignore_keys",
        metavar="NAME",
        multiple=True,
        help="An unknown key of config.json that changes nothing, to be taken out (may be given again).",
    ),
)
_run = _options(
    click.option("--prompt", help="Text to start from  [default: The capital of France is]"),
    click.option("--prompt-file", type=FOLDER, help="A UTF-8 text file to start from."),
    click.option("--tokens", type=Numbers(), help="Token ids to start from."),
    click.option(
        "--steps",
        type=click.IntRange(1),
        help="Greedy tokens to choose; the last is not fed  [default: 20]",
    ),
    click.option(
        "--chunks", type=Numbers(), help="Sizes in which the chunked plan sends the prompt."
    ),
    click.option("--dtype", type=DTYPES, help="What both engines compute in  [default: float32]"),
    click.option(
        "--device", type=DEVICES, default="auto", show_default=True, help="Where MLX runs."
    ),
    click.option(
        "--threads", type=click.IntRange(1), help="Threads of the oracle  [default: one per core]"
    ),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlxkv", prog_name="mlxkv")
def cli() -> None:
    """Is my KV cache right, is my port right, and if not, where does it first go wrong?

    Exit codes: 0 agree, 1 differ, 2 could not tell, 130 interrupted.
    """


@cli.command()
@_model
@_run
@click.option(
    "--prompts",
    metavar="FILE|builtin",
    help="Many prompts: JSON lines, or a text a line; the worst decides.",
)
@click.option(
    "--engine",
    metavar="[port|mlx-lm|FILE.py:load]",
    default="port",
    show_default=True,
    help="Whose Llama is judged.",
)
@click.option(
    "--oracle",
    "oracle_folder",
    type=FOLDER,
    help="A folder from `mlxkv-oracle run`, made here or elsewhere.",
)
@click.option("--fresh", is_flag=True, help="Ask the oracle again, whatever was kept.")
@click.option(
    "--candidate",
    "candidates",
    type=FOLDER,
    multiple=True,
    help="A trace of a third engine, judged too and shown beside.",
)
@click.option(
    "--no-run",
    is_flag=True,
    help="Judge the --candidate traces by the --oracle folder alone; MLX is not needed.",
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("mlxkv-report"),
    show_default=True,
    help="Where the report goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def compare(
    prompts: str | None,
    oracle_folder: Path | None,
    candidates: tuple[Path, ...],
    no_run: bool,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Judge the port on MODEL: a folder, a Hub id, a GGUF file, or nothing for the default model.

    Runs the oracle (or reuses what it wrote), then the port in the run's dtype and in float64, and writes a report. With
    --engine mlx-lm the same plans are judged as mlx-lm's own Llama follows them, in the run's dtype alone; with --engine
    FILE.py:load those of your own MLX model, which load(path, dtype) returns: model(tokens, cache=cache) and make_cache().
    """
    if no_run:
        _judge_stored(oracle_folder, candidates, out, as_json=as_json)
    from mlxkv.commands.compare import many as prompting
    from mlxkv.commands.compare import run as reporting

    if prompts is not None:
        _alone(
            "--prompts",
            ("prompt", "prompt_file", "tokens", "chunks", "oracle_folder", "candidates"),
        )
    request, command = _request(oracle=oracle_folder, **options), _command_line()
    result: reporting.Compared | prompting.Overview
    if prompts is None:
        result = reporting.compare(request, out, candidates=candidates, command=command)
    else:
        result = prompting.compare(request, prompts, out, command=command)
    _print(result.as_json() if as_json else result.text(out))
    sys.exit(result.exit_code)


@cli.command()
@click.argument("traces", nargs=-1, type=FOLDER, metavar="A B [C ...]")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON.")
def delta(traces: tuple[Path, ...], as_json: bool) -> None:
    """Compare stored traces of any engines, every pair over the positions that both have.

    Exit code 0 when they were compared, whatever the numbers: nothing is judged. 2 when they cannot be: other weights,
    other tokens, another vocabulary.
    """
    from mlxkv.commands.compare import delta as room

    if len(traces) < 2:
        raise Refusal(f"delta: {len(traces)} traces, expected two or more; give their files")
    _print(room.delta(traces, as_json=as_json))


@cli.command()
@_model
@click.option("--prompt", help="The first prompt  [default: The capital of France is]")
@click.option(
    "--other-prompt", help="Another that begins alike  [default: The capital of Germany is]"
)
@click.option("--tokens", type=Numbers(), help="The first prompt as token ids.")
@click.option("--other-tokens", type=Numbers(), help="The other as token ids.")
@click.option(
    "--steps",
    type=click.IntRange(3),
    default=20,
    show_default=True,
    help="Greedy tokens after each prompt.",
)
@click.option("--device", type=DEVICES, default="auto", show_default=True, help="Where MLX runs.")
@click.option(
    "--out",
    type=FOLDER,
    default=Path("mlxkv-report"),
    show_default=True,
    help="Where the report goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the matrix as JSON.")
def pitfalls(out: Path, as_json: bool, **options: Any) -> None:
    """Run every right and wrong use of a cache on transformers, the port in candle's mode, the guarded port and mlx-lm.

    Exit code 0 when every system behaved as documented, 1 when one did not, which is news.
    """

    from mlxkv.commands.pitfalls import run as room

    text, exit_code = room.publish(out, as_json=as_json, command=_command_line(), **options)
    _print(text)
    sys.exit(exit_code)


@cli.command()
@_model
@_run
@click.option(
    "--engine",
    metavar="[port|mlx-lm|FILE.py:load]",
    default="port",
    show_default=True,
    help="Whose Llama is looked into.",
)
@click.option(
    "--oracle",
    "oracle_folder",
    type=FOLDER,
    help="As for compare; --taps of `mlxkv-oracle run` say what it records.",
)
@click.option("--fresh", is_flag=True, help="Ask the oracle again, whatever was kept.")
@click.option(
    "--candidate",
    "candidates",
    type=FOLDER,
    multiple=True,
    help="A trace of a third engine, looked into too.",
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("mlxkv-report"),
    show_default=True,
    help="Where the report goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def locate(
    oracle_folder: Path | None,
    fresh: bool,
    candidates: tuple[Path, ...],
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Find where the port on MODEL first goes wrong: position, layer, place in the layer, head, and a hint.

    Of another engine only the logits and the cache can be seen: position, layer, keys or values, head.

    Exit codes: 0 nothing stands out, 1 something is located, 2 could not tell.
    """
    from mlxkv.commands.locate import run as locating

    search = locating.locate(
        _request(oracle=oracle_folder, fresh=fresh, **options),
        out,
        candidates=candidates,
        command=_command_line(),
    )
    _print(search.files["locate.json"] if as_json else search.text)
    sys.exit(search.exit_code)


@cli.command()
@_model
@click.option(
    "--fault", "faults", multiple=True, help="Only this fault; may be given again  [default: all]"
)
@click.option("--tiny/--no-tiny", default=True, show_default=True, help="Small random models too.")
@click.option(
    "--real/--no-real", default=True, show_default=True, help="MODEL, or the default model."
)
@click.option(
    "--dtype", type=DTYPES, default="float32", show_default=True, help="What lane B computes in."
)
@click.option(
    "--power",
    type=FOLDER,
    help="Also put into this file what lane B lets pass; mlxkv/judge/power.json is the package's.",
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("mlxkv-report"),
    show_default=True,
    help="Where the report goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the trials as JSON.")
def selftest(
    model: str | None, revision: str | None, out: Path, as_json: bool, **options: Any
) -> None:
    """Put known faults into the port and see that each is found, in its place, and that no correct run is accused.

    Exit code 0 when nothing was missed and nobody accused, else 1.
    """

    from mlxkv.commands.selftest import run as room

    text, exit_code = room.publish(
        model, revision, out, as_json=as_json, command=_command_line(), **options
    )
    _print(text)
    sys.exit(exit_code)


@cli.command()
@_model
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Correct runs on each model.",
)
@click.option(
    "--dtype", type=DTYPES, default="float32", show_default=True, help="What lane B computes in."
)
@click.option("--tiny/--no-tiny", default=True, show_default=True, help="Small random models too.")
@click.option(
    "--real/--no-real", default=True, show_default=True, help="MODEL, or the default model."
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("mlxkv-report"),
    show_default=True,
    help="Where the report goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the readings as JSON.")
def calibrate(
    model: str | None, revision: str | None, out: Path, as_json: bool, **options: Any
) -> None:
    """Measure what correct runs read at every gate, beside its limit: on several models, prompts and all plans.

    Exit code 0 when every correct run is within every limit, else 1.
    """

    from mlxkv.commands.selftest import calibrate as room

    text, exit_code = room.publish(
        model, revision, out, as_json=as_json, command=_command_line(), **options
    )
    _print(text)
    sys.exit(exit_code)


@cli.command()
@click.option(
    "--check",
    is_flag=True,
    help="Make them again in a scratch folder and compare with the committed ones.",
)
@click.option("--only", type=REPORTS, multiple=True, help="Some of the parts  [default: all]")
@click.option("--candidate", "candidates", type=FOLDER, multiple=True, help="As for compare.")
@click.option(
    "--out", type=FOLDER, default=Path("reports"), show_default=True, help="Where the reports are."
)
@click.option("--device", type=DEVICES, default="auto", show_default=True, help="Where MLX runs.")
def reports(
    check: bool, only: tuple[str, ...], candidates: tuple[Path, ...], out: Path, device: str
) -> None:
    """Make everything under reports/ again, or check that it still says the same.

    The check wants tokens, errors and verdicts exactly and deltas within a factor of 2; it exits with 1 and a diff otherwise.
    """
    from mlxkv.commands import reports as parts

    if check:
        differences = parts.check(out, only=only, device=device)
        _print("".join(f"{line}\n" for line in differences) or f"{out}: as committed\n")
        sys.exit(1 if differences else 0)
    for path in parts.write(out, only=only, candidates=candidates, device=device):
        _print(f"{path}\n")


@cli.command()
@_model
@click.option("--dtype", type=DTYPES, default="float32", show_default=True)
@click.option("--device", type=DEVICES, default="auto", show_default=True)
@click.option(
    "--prefill", type=Numbers(), default="128,1024", show_default=True, help="Prompt lengths."
)
@click.option(
    "--decode",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens decoded after each.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Turns of each engine per length.",
)
@click.option(
    "--compare/--no-compare",
    "with_compare",
    default=True,
    help="Also time a first and a second compare.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(model: str | None, as_json: bool, **options: Any) -> None:
    """Measure the port beside mlx-lm, and what a compare takes in time and memory."""

    from mlxkv.commands import bench as room

    _print(room.run(model, as_json=as_json, **options))


@cli.command()
@_model
@click.option("--prompt", default="The capital of France is", show_default=True)
@click.option(
    "-n",
    "--steps",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    help="Tokens to generate.",
)
@click.option("--dtype", type=DTYPES, default="float32", show_default=True)
@click.option("--device", type=DEVICES, default="auto", show_default=True)
def generate(
    model: str | None, prompt: str, steps: int, dtype: str, device: str, **source: Any
) -> None:
    """Stream greedy text from the port."""
    from mlxkv.commands import show

    for piece in show.generate(model, prompt, steps, dtype=dtype, device=device, **source):
        _print(piece)
    _print("\n")


@cli.command()
@_model
@click.option("--json", "as_json", is_flag=True)
def inspect(model: str | None, as_json: bool, **source: Any) -> None:
    """Show a checkpoint's config, RoPE, cache layout and bytes, and which config keys were ignored and why."""
    from mlxkv.commands import show

    _print(show.inspect(model, as_json=as_json, **source))


@cli.command()
def doctor() -> None:
    """Say what is installed, which device and BLAS MLX would use, and where the caches are."""
    from mlxkv.commands import show

    text, exit_code = show.doctor()
    _print(text)
    sys.exit(exit_code)


def _request(
    prompt: str | None, prompt_file: Path | None, tokens: tuple[int, ...] | None, **rest: Any
) -> Any:
    from mlxkv.commands.compare.session import Request

    given = [
        name
        for name, value in (
            ("--prompt", prompt),
            ("--prompt-file", prompt_file),
            ("--tokens", tokens),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise Refusal(f"{' and '.join(given)}: expected one of them; leave the others out")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(
                f"{prompt_file}: cannot be read as UTF-8 text ({' '.join(str(error).split())}); check the path"
            ) from error
    return Request(prompt=prompt, tokens=tokens, **rest)


def _judge_stored(
    folder: Path | None, candidates: tuple[Path, ...], out: Path, *, as_json: bool
) -> None:
    """`compare --no-run`, to its exit code. What would shape a run has no meaning, so giving it is a mistake."""
    from mlxkv.commands import judge as stored

    odd = sorted(set(_typed()) - {"oracle_folder", "candidates", "no_run", "out", "as_json"})
    if odd or folder is None:
        what = f"{', '.join(odd)} given" if odd else "no --oracle"
        raise Refusal(
            f"--no-run: {what}, expected --oracle and --candidate, --out and --json alone, as nothing runs"
        )
    judged = stored.compare(folder, candidates, out, command=_command_line())
    _print(judged.files["compare.json"] if as_json else judged.text)
    sys.exit(judged.verdict.exit_code)


def _alone(option: str, others: tuple[str, ...]) -> None:
    """Refuses options that say of one sequence what `option` says of several."""
    typed = _typed()
    beside = [typed[name] for name in others if name in typed]
    if beside:
        raise Refusal(
            f"{option} and {' and '.join(beside)}: expected {option} alone, as each prompt has its own; leave one side out"
        )


def _typed() -> dict[str, str]:
    """What was given on the command line: each parameter's name, and how its option is spelled."""
    from click.core import ParameterSource

    context = click.get_current_context()
    given = [
        p
        for p in context.command.params
        if context.get_parameter_source(str(p.name)) == ParameterSource.COMMANDLINE
    ]
    return {str(p.name): p.opts[0] for p in given}


def _command_line() -> str:
    """What was typed, for the report; without the folder that the command lies in."""
    import shlex

    return shlex.join(["mlxkv", *sys.argv[1:]])


def _print(text: str) -> None:
    """Results to stdout; where they cannot go the exit code must not be one that means a verdict."""
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
