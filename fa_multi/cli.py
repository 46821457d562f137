"""The command line, `fa-multi`. Commands only read arguments and print; the work is in the library.

Exit codes: 0 all is well, 1 a case failed or two results differ, 2 an argument is not acceptable, 3 a device, compiler
or simulator is not there, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.table import Table

from . import cli_accuracy, cli_machine
from .cli_common import EXIT_CODES, EXIT_FAILED, STAGES, case_names, console, device_option, friendly


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
    help="Attention kernels for NVIDIA GPUs and Huawei Ascend NPUs: run them, read them, compare devices.\n\n"
    "Example: fa-multi doctor",
)
@click.version_option(package_name="fa_multi", prog_name="fa-multi")
@click.option("--traceback", is_flag=True, help="Show where an error comes from, not only what it is.")
def main(traceback: bool) -> None:
    pass


@main.command(epilog=EXIT_CODES)
@click.argument("pattern", default="all", shell_complete=case_names)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of cases with every field and the tags.")
@friendly
def cases(pattern: str, as_json: bool) -> None:
    """List the cases that every device is tested with, with tags to choose them by.

    PATTERN: names, shell patterns or tag:NAME, separated by commas, or the path of a YAML file.

    Example: fa-multi cases 'tag:causal,d1*'
    """
    from .cases import select

    chosen = select(pattern)
    if as_json:
        click.echo(json.dumps([{**vars(c), "tags": c.tags()} for c in chosen], indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("case", "batch", "queries", "keys", "heads", "dims", "tags"):
        table.add_column(name, justify="left" if name in ("case", "tags") else "right", no_wrap=name == "case")
    for c in chosen:
        dims = f"{c.head_dim}" + (f"/{c.head_dim_v}" if c.head_dim_v not in (None, c.head_dim) else "")
        heads = f"{c.heads_q}" + (f"/{c.heads_k}" if c.heads_k != c.heads_q else "")
        table.add_row(c.name, *map(str, c.sizes()), heads, dims, " ".join(c.tags()))
    console.print(table)
    console.print(f"{len(chosen)} cases", style="dim")


@main.command(epilog=EXIT_CODES)
@click.argument("pattern", metavar="CASE", shell_complete=case_names)
@device_option
@click.option(
    "--repeat",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Run each case N times; the results must be the same bit by bit.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@friendly
def run(pattern: str, device: str, repeat: int, seed: int) -> None:
    """Run a case (or a pattern, as in `fa-multi cases`) and hold it to the fp64 golden result.

    Example: fa-multi run causal --device cpu --repeat 3
    """
    from . import unavailable
    from .accuracy.compare import run_case
    from .cases import select

    chosen = select(pattern)
    reason = unavailable(device)
    if reason:
        raise RuntimeError(reason)
    failed = 0
    for case in chosen:
        report, differing = run_case(case, device, seed=seed, repeat=repeat)
        failed += not report.ok or differing > 0
        click.echo(report.line())
        for detail in report.details():
            click.echo(f"      {detail.removeprefix('A: ')}")
        if repeat > 1 and report.tensors:
            click.echo(f"      {repeat} runs: " + (f"{differing} differ from the first" if differing else "identical"))
    if failed:
        click.echo(f"{failed} of {len(chosen)} cases failed", err=True)
        sys.exit(EXIT_FAILED)


@main.command(epilog=EXIT_CODES)
@click.argument("case", shell_complete=case_names)
@device_option
@click.option(
    "--stage",
    type=click.Choice(STAGES),
    default="source",
    show_default=True,
    help="program: the tile "
    "program. roles: who does what, and the channels between. source: the kernel text that runs. lowered: what "
    "the DSL's compiler makes of it (CUDA C++, Ascend C). pto: the Ascend compiler's pto text. cubin: the "
    "compiled CUDA kernel, with -o.",
)
@click.option("--arch", metavar="ARCH", help="Target of the lane, such as sm_90a. Default: the lane's own.")
@click.option("--lse", is_flag=True, help="The kernel that returns the log-sum-exp too.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write to a file instead of the terminal.")
@friendly
def lower(case: str, device: str, stage: str, arch: str | None, lse: bool, output: str | None) -> None:
    """Print what a case becomes on the way to a device. Up to --stage source it needs no device and no compiler.

    Example: fa-multi lower causal --device cuda --arch sm_90a --stage roles
    """
    from .cases import select
    from .stages import lowered_stage

    chosen = select(case)
    if len(chosen) != 1:
        raise ValueError(f"CASE must choose one case, {case!r} chooses {len(chosen)}")
    result = lowered_stage(chosen[0], device, stage, arch, lse)
    if output is None:
        if isinstance(result, bytes):
            raise ValueError(f"--stage {stage} is not text; give a file with -o")
        click.echo(result)
        return
    from .cache import write_atomic

    write_atomic(Path(output), result)
    click.echo(f"{len(result)} {'bytes' if isinstance(result, bytes) else 'characters'} in {output}")


main.add_command(cli_accuracy.capture)
main.add_command(cli_accuracy.diff)
main.add_command(cli_machine.doctor)
main.add_command(cli_machine.sim)
main.add_command(cli_machine.cache)
main.add_command(cli_machine.completion)

if __name__ == "__main__":
    main()
