"""The oracle's command line.

It reads options, calls one function and prints: results on stdout, the rest on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oracle.formats import exits
from oracle.formats.errors import Refusal, one_line
from oracle.formats.progress import Progress, silent

if TYPE_CHECKING:
    from typing import Unpack

    from oracle.formats.run_folder import Manifest
    from oracle.question import Asked

_Option = Callable[[Callable[..., None]], Callable[..., None]]
_PATH = click.Path(path_type=Path)


class _List(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas: whole numbers, or names."""

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self.name, self._kind = "list", kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        try:
            return tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            option = param.opts[0] if param else ""
            what = f"{value!r}, expected whole numbers separated by commas"
            raise Refusal(what, where=option) from None


def _option(*names: str, **settings: Any) -> _Option:
    """An option whose default, if it has one, is shown."""
    return click.option(*names, show_default=settings.get("default") is not None, **settings)


def _options(*options: _Option) -> _Option:
    def apply(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


_folder = click.argument("folder", type=_PATH)
_model = _options(
    click.argument("model", required=False),
    _option("--revision", help="The commit of a Hub model."),
)
_computed = _options(
    _option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32"),
    _option("--threads", type=click.IntRange(1), help="Threads of torch  [default: one per core]"),
    _option(
        "--ignore-key",
        "ignore_keys",
        metavar="NAME",
        multiple=True,
        help="A key of config.json to take out, though unknown.",
    ),
)
_json = _option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")


def _out(help: str) -> _Option:
    return _option("--out", type=_PATH, required=True, help=help)


def _numbers(name: str, help: str) -> _Option:
    return _option(name, type=_List(int), metavar="N,N,...", help=help)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlxkv", prog_name="mlxkv-oracle")
def cli() -> None:
    """Compute what is true of a Llama on a prompt, and how far transformers is from it, on a CPU.

    MLX is not needed. Of another architecture no truth is known: transformers' own runs and their
    mean.

    Exit codes: 0 done, 2 could not be done, 130 interrupted.
    """


@cli.command()
@_model
@_option("--prompt", help="Text to start from.")
@_option("--prompt-file", type=_PATH, help="A UTF-8 text file to start from.")
@_numbers("--tokens", "Token ids to start from.")
@_option(
    "--prompt-tokens",
    type=int,
    help="With --steps 0: how many of --tokens are the prompt  [default: all]",
)
@_option("--steps", type=click.IntRange(0), default=20, help="Greedy tokens after the prompt.")
@_numbers(
    "--chunks", "Sizes in which the chunked plan sends the prompt  [default: 3/5 and the rest]"
)
@_computed
@_option(
    "--taps",
    type=_List(str),
    metavar="NAME,...",
    default="hidden",
    help="Places inside a layer that the truth records.",
)
@_option("--keep-pool", is_flag=True, help="Keep the eager runs too.")
@_option("--force", is_flag=True, help="Replace a folder that an earlier run left.")
@_out("The folder to make.")
def run(
    model: str | None,
    prompt_file: Path | None,
    keep_pool: bool,
    force: bool,
    out: Path,
    **asked: Unpack[Asked],
) -> None:
    """Make a run folder for MODEL: a folder, a Hub id, a GGUF file, or nothing for the default."""
    sources: dict[str, object] = {"--prompt": asked["prompt"], "--prompt-file": prompt_file}
    sources["--tokens"] = asked["tokens"]
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise Refusal(f"{' and '.join(given) or 'no prompt'}: expected one of {', '.join(sources)}")
    if prompt_file:
        asked["prompt"] = _read(prompt_file)
    with _computing() as progress:
        from oracle import folder

        manifest = folder.run(
            model,
            out=out,
            keep_pool=keep_pool,
            force=force,
            progress=progress,
            note=_note,
            **asked,
        )
    for line in folder.proofs(manifest):
        _note(line)
    click.echo(out)


@cli.command()
@_model
@_option(
    "--plan",
    "plan_files",
    type=_PATH,
    multiple=True,
    required=True,
    help="A plan to follow; may be given again.",
)
@_computed
@_out("Where each plan's trace goes, as NAME.safetensors.")
def follow(model: str | None, plan_files: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Follow any plans with transformers' Llama and its DynamicCache, right or not.

    Errors of a step stand in its trace.
    """
    with _computing() as progress:
        from oracle import folder

        written = folder.follow(model, plan_files=plan_files, out=out, progress=progress, **options)
    click.echo("\n".join(map(str, written)))


@cli.command()
@_folder
@_json
def check(folder: Path, as_json: bool) -> None:
    """Verify a run folder: files whole and unchanged, numbers finite, proofs within limits."""
    from oracle import folder as folders

    manifest = folders.check(folder)
    whole = [f"{folder}: {len(manifest.files)} files, whole and finite", *folders.proofs(manifest)]
    click.echo(_manifest(manifest) if as_json else "\n".join(whole))


@cli.command()
@_folder
@_json
def show(folder: Path, as_json: bool) -> None:
    """Say what a run folder holds, and what to copy to the machine with MLX."""
    from oracle import folder as folders
    from oracle.formats.run_folder import read_manifest

    text = _manifest(read_manifest(folder)) + "\n" if as_json else folders.show(folder)
    click.echo(text, nl=False)


@cli.command()
@_folder
@_model
@_out("The folder to write into.")
def suspects(folder: Path, model: str | None, out: Path, revision: str | None) -> None:
    """Compute the truth of a run folder once more with each usual mistake.

    Such a mistake is another rope_theta. An engine whose logits are those of one of them has
    probably made it. MODEL is the one that the folder was made with.
    """
    with _computing() as progress:
        from oracle.folder import require

        require("torch")
        from oracle.truth.suspects import write

        write(folder, out, model=model, revision=revision, progress=progress)
    click.echo(out)


def _manifest(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), sort_keys=True, indent=1)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read as UTF-8 text ({one_line(error)})"
        raise Refusal(what, where=path, remedy="check the path") from error


@contextmanager
def _computing() -> Iterator[Progress]:
    """Around whatever needs torch: its threads, the signals, and the progress that is shown."""
    # OpenMP's threads would spin while they wait, and slow down whatever else runs. Read when
    # torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import oracle.folder  # noqa: F401  it imports numpy, in which an interrupt would be a traceback

    exits.answer_signals()
    with _progress() as progress:
        yield progress


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on stderr that shows what is being done, where a person is looking."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TimeElapsedColumn(), BarColumn(), TextColumn("{task.description}")
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the model", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total if total > 1 else None
        )


def invoke(arguments: Sequence[str]) -> int:
    """The exit code of one command line, run in this process."""
    return exits.invoke(cli, arguments)


def main() -> None:
    """The console script."""
    exits.console(cli)
