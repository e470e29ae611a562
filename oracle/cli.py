"""The oracle's command line.

It reads options, calls one function and prints: results on stdout, the rest on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oracle.formats import exits
from oracle.formats.disk import read_text
from oracle.formats.errors import Refusal
from oracle.formats.options import Listed, Whole, option, options, whole
from oracle.formats.progress import Progress, silent

if TYPE_CHECKING:
    from typing import Unpack

    from oracle.formats.run_folder import Manifest
    from oracle.question import Computed, Making
    from oracle.text import Texting

_PATH = click.Path(path_type=Path)
_DTYPES = ["float32", "float16", "bfloat16"]


_folder = click.argument("folder", type=_PATH)
_model = options(
    click.argument("model", required=False),
    option("--revision", "The commit of a Hub model."),
)
_key = "A key of config.json to take out, though unknown."
_however = options(
    option("--threads", "Threads of torch  [default: one per core]", type=Whole(1)),
    option("--ignore-key", _key, into="ignore_keys", metavar="NAME", multiple=True),
)
_computed = options(
    option("--dtype", "What is computed in.", type=click.Choice(_DTYPES), default="float32"),
    _however,
)
_json = option("--json", "Print the manifest as JSON.", into="as_json", is_flag=True)
_out = partial(option, "--out", type=_PATH, required=True)
_force = option("--force", "Replace a folder that an earlier run left.", is_flag=True)


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
@option("--prompt", "Text to start from.")
@option("--prompt-file", "A UTF-8 text file to start from.", type=_PATH)
@option("--tokens", "Token ids to start from.", type=Listed(whole))
@option(
    "--prompt-tokens",
    "With --steps 0: how many of --tokens are the prompt  [default: all]",
    type=Whole(1),
)
@option("--steps", "Greedy tokens after the prompt.", type=Whole(0), default=20)
@option("--chunks", "Sizes of the prompt's chunks  [default: 3/5 and the rest]", type=Listed(whole))
@_computed
@option("--taps", "Places in a layer that the truth records.", type=Listed(str), default="hidden")
@option("--all-rows", "Of over 1,024 tokens keep all rows of logits, not a sample.", is_flag=True)
@option("--no-probe", "Leave the probe out.", is_flag=True)
@option("--probe-out", "The probe's folder  [default: probe, in the other]", type=_PATH)
@option("--keep-pool", "Keep the eager runs too.", is_flag=True)
@_force
@_out("The folder to make.")
def run(
    model: str | None,
    prompt_file: Path | None,
    out: Path,
    no_probe: bool,
    **making: Unpack[Making],
) -> None:
    """Make a run folder for MODEL: a folder, a Hub id, a GGUF file, or nothing for the default.

    The probe, up to 300 ids that span the vocabulary, is made beside it, the same for every prompt.
    """
    sources: dict[str, object] = {"--prompt": making["prompt"], "--prompt-file": prompt_file}
    sources["--tokens"] = making["tokens"]
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise Refusal(f"{' and '.join(given) or 'no prompt'}: expected one of {', '.join(sources)}")
    if prompt_file:
        making["prompt"] = read_text(prompt_file)
    making["probe"] = not no_probe
    with _computing() as progress:
        from oracle import folder

        manifest = folder.run(model, out=out, progress=progress, note=_note, **making)
    for line in folder.proofs(manifest):
        _note(line)
    click.echo(out)


@cli.command()
@_model
@_computed
@_force
@_out("The folder to make.")
def probe(model: str | None, out: Path, force: bool, **computed: Unpack[Computed]) -> None:
    """Make the run folder of MODEL's probe alone."""
    with _computing() as progress:
        from oracle import folder

        manifest = folder.probe(
            model, out=out, force=force, progress=progress, note=_note, **computed
        )
    for line in folder.proofs(manifest):
        _note(line)
    click.echo(out)


@cli.command()
@click.argument("asked", type=_PATH, metavar="FILE.json...", nargs=-1, required=True)
@option("--dry-run", "Print what they would take, as JSON, and compute nothing.", is_flag=True)
def many(asked: tuple[Path, ...], dry_run: bool) -> None:
    """Make a run folder for each question in files, of which each is about one model.

    A file is JSON, `mlxkv-questions/1`, as mlxkv itself writes it. A folder is there as soon as
    it is finished, and replaces one that an earlier run left.
    """
    from oracle import many as questions

    if dry_run:
        for file in asked:
            click.echo(questions.estimate(file))
        return
    with _computing() as progress:
        for file in asked:
            for out in questions.answer(file, progress=progress, note=_note):
                click.echo(out)


@cli.command()
@_model
@option(
    "--plan",
    "A plan to follow (may be given again).",
    into="plan_files",
    type=_PATH,
    multiple=True,
    required=True,
)
@_computed
@option(
    "--cache",
    "A cache of transformers', such as StaticCache:size=64: one for all plans, or one for each.",
    into="caches",
    metavar="NAME[:KEY=VALUE,...]",
    multiple=True,
    default=("DynamicCache",),
)
@option("--dither", "Seed of factors of about 2**-23 on the embedding.", type=Whole(0), default=0)
@_out("Where each plan's trace goes, as NAME.safetensors.")
def follow(
    model: str | None,
    plan_files: tuple[Path, ...],
    out: Path,
    caches: tuple[str, ...],
    dither: int,
    **computed: Unpack[Computed],
) -> None:
    """Follow any plans with transformers' Llama and one of its caches, right or not.

    Errors of a step stand in its trace.
    """
    with _computing() as progress:
        from oracle import folder

        made = folder.follow(
            model,
            plan_files=plan_files,
            out=out,
            caches=caches,
            dither=dither,
            progress=progress,
            **computed,
        )
    click.echo("\n".join(map(str, made)))


_SPECS = "float16, bfloat16, affine:bits=8,group_size=64, affine:keys=8,values=4, window:size=64"


@cli.command()
@_model
@option("--ids", "A JSON file with the list of token ids.", type=_PATH, required=True)
@option(
    "--stored",
    f"What a cache keeps: {_SPECS},keep=4 (may be given again).",
    into="specs",
    metavar="SPEC",
    multiple=True,
)
@_however
@option("--force", "Make the folder anew.", is_flag=True)
@_out("The folder to make, or to add to.")
def text(model: str | None, out: Path, **asked: Unpack[Texting]) -> None:
    """Compute the truth of a text, and what a cache that stores less makes of it.

    Nothing is judged: of each SPEC the folder has KL, the right token's probability and whether the
    most probable token is the truth's, at every position. A folder that is there keeps what it
    holds, and gets the SPECs that it lacks.
    """
    with _computing() as progress:
        from oracle.text import make

        made = make(model, out=out, progress=progress, note=_note, **asked)
    value, limit = (made.proofs[f"truth_agreement{end}"] for end in ("", "_limit"))
    _note(f"whole and in chunks agree to {value:.1e} of max |T| (limit {limit:.0e}): holds")
    click.echo(out)


@cli.command()
@_folder
@_json
def check(folder: Path, as_json: bool) -> None:
    """Verify a run folder: files whole and unchanged, numbers finite, proofs within limits."""
    from oracle import folder as folders

    manifest = folders.check(folder)
    click.echo(_manifest(manifest) if as_json else "\n".join(folders.whole(folder, manifest)))


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
@click.option("--plan", default="full", help="Also mistakes at the borders of this plan's calls.")
def suspects(folder: Path, model: str | None, out: Path, plan: str, revision: str | None) -> None:
    """Compute the truth of a run folder once more with each usual mistake.

    Such a mistake is another rope_theta. An engine whose logits are those of one of them has
    probably made it. MODEL is the one that the folder was made with.
    """
    with _computing() as progress:
        from oracle.folder import require

        require("torch")
        from oracle.truth.suspects import write

        write(folder, out, plan=plan, model=model, revision=revision, progress=progress)
    click.echo(out)


def _manifest(manifest: Manifest) -> str:
    return json.dumps(asdict(manifest), sort_keys=True, indent=1)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
    exits.console(cli)
