"""The oracle's command line. It reads options, calls one function and prints: results on stdout, the rest on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oracle.formats import exits
from oracle.formats.errors import Refusal

if TYPE_CHECKING:
    from oracle.question import Progress


_FOLDER = click.Path(path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mlxkv", prog_name="mlxkv-oracle")
def cli() -> None:
    """Compute what is true of a Llama on a prompt, and how far transformers is from it, on a CPU without MLX.

    Of another architecture no truth is known: transformers' own runs and their mean.

    Exit codes: 0 done, 2 could not be done, 130 interrupted.
    """


@cli.command()
@click.argument("model", required=False)
@click.option("--prompt", help="Text to start from.")
@click.option("--prompt-file", type=_FOLDER, help="A UTF-8 text file to start from.")
@click.option("--tokens", metavar="N,N,...", help="Token ids to start from.")
@click.option(
    "--prompt-tokens",
    type=int,
    help="With --steps 0: how many of --tokens are the prompt  [default: all]",
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Greedy tokens after the prompt.",
)
@click.option(
    "--chunks",
    metavar="N,N,...",
    help="Sizes in which the chunked plan sends the prompt  [default: 3/5 and the rest]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
)
@click.option("--out", type=_FOLDER, required=True, help="The folder to make.")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch  [default: one per core]")
@click.option("--revision", help="The commit of a Hub model.")
@click.option(
    "--ignore-key",
    "ignore_keys",
    metavar="NAME",
    multiple=True,
    help="A key of config.json to take out, though unknown.",
)
@click.option(
    "--taps",
    metavar="NAME,...",
    default="hidden",
    show_default=True,
    help="Places inside a layer that the truth records.",
)
@click.option("--keep-pool", is_flag=True, help="Keep the eager runs too.")
@click.option("--force", is_flag=True, help="Replace a folder that an earlier run left.")
def run(
    prompt: str | None,
    prompt_file: Path | None,
    tokens: str | None,
    chunks: str | None,
    taps: str,
    **options: Any,
) -> None:
    """Make a run folder for MODEL: a folder, a Hub id, a GGUF file, or nothing for the default model."""
    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--tokens": tokens}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise Refusal(f"{' and '.join(given) or 'no prompt'}: expected one of {', '.join(sources)}")
    # OpenMP's threads would spin while they wait, and slow down whatever else runs; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from oracle import folder

    # Not earlier: raised within numpy's import an interrupt becomes a traceback and an ImportError.
    exits.answer_signals()
    with _progress() as progress:
        manifest = folder.run(
            prompt=_read(prompt_file) if prompt_file else prompt,
            tokens=_numbers("--tokens", tokens),
            chunks=_numbers("--chunks", chunks),
            taps=tuple(taps.split(",")),
            progress=progress,
            note=lambda line: print(line, file=sys.stderr, flush=True),
            **options,
        )
    for line in folder.proofs(manifest):
        print(line, file=sys.stderr)
    click.echo(options["out"])


@cli.command()
@click.argument("model", required=False)
@click.option(
    "--plan",
    "plans",
    type=_FOLDER,
    multiple=True,
    required=True,
    help="A plan to follow; may be given again.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
)
@click.option(
    "--ignore-key",
    "ignore_keys",
    metavar="NAME",
    multiple=True,
    help="A key of config.json to take out, though unknown.",
)
@click.option(
    "--out", type=_FOLDER, required=True, help="Where each plan's trace goes, as NAME.safetensors."
)
@click.option("--threads", type=click.IntRange(1), help="Threads of torch  [default: one per core]")
@click.option("--revision", help="The commit of a Hub model.")
def follow(model: str | None, plans: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Follow any plans with transformers' Llama and its DynamicCache, right or not; errors of a step stand in its trace."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from oracle import folder

    # Not earlier: raised within numpy's import an interrupt becomes a traceback and an ImportError.
    exits.answer_signals()
    with _progress() as progress:
        written = folder.follow(model, plans=plans, out=out, progress=progress, **options)
    click.echo("\n".join(map(str, written)))


@cli.command()
@click.argument("folder", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def check(folder: Path, as_json: bool) -> None:
    """Verify a run folder: every file whole and unchanged, every number finite, both proofs within limits."""
    from oracle import folder as folders

    manifest = folders.check(folder)
    whole = [f"{folder}: {len(manifest.files)} files, whole and finite", *folders.proofs(manifest)]
    click.echo(
        json.dumps(asdict(manifest), sort_keys=True, indent=1) if as_json else "\n".join(whole)
    )


@cli.command()
@click.argument("folder", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def show(folder: Path, as_json: bool) -> None:
    """Say what a run folder holds, and what to copy to the machine with MLX."""
    from oracle import folder as folders
    from oracle.formats.run_folder import read_manifest

    click.echo(
        json.dumps(asdict(read_manifest(folder)), sort_keys=True, indent=1) + "\n"
        if as_json
        else folders.show(folder),
        nl=False,
    )


@cli.command()
@click.argument("folder", type=_FOLDER)
@click.argument("model", required=False)
@click.option("--out", type=_FOLDER, required=True, help="The folder to write into.")
@click.option("--revision", help="The commit of a Hub model.")
def suspects(folder: Path, model: str | None, out: Path, revision: str | None) -> None:
    """Compute the truth of a run folder once more with each usual mistake, such as another rope_theta.

    An engine whose logits are those of one of them has probably made that mistake. MODEL is the one that the folder was made with.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from oracle.folder import require

    require("torch")
    from oracle.truth.suspects import write

    with _progress() as progress:
        write(folder, out, model=model, revision=revision, progress=progress)
    click.echo(out)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise Refusal(f"{option}: {text!r}, expected whole numbers separated by commas") from None


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"{path}: cannot be read as UTF-8 text ({' '.join(str(error).split())}); check the path"
        ) from error


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr that shows what is being done, where a person is looking."""
    if not sys.stderr.isatty():
        yield None
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
