"""Commands about this machine: doctor, sim, cache, completion."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click
from rich.table import Table

from .cli_common import EXIT_CODES, LANES, console, friendly


@click.command(epilog=EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@friendly
def doctor(as_json: bool) -> None:
    """What this machine can run, and the one command that would enable the rest.

    Example: fa-multi doctor
    """
    import json

    from .doctor import examine

    found = examine()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("lane", "runs here", "kernel text", "compiles", "device and versions"):
        table.add_column(name, overflow="fold")
    for name in LANES:
        lane = found["lanes"][name]
        table.add_row(name, _mark(lane["runs"]), _mark(lane["source"]), _mark(lane["compiles"]), lane["about"])
    console.print(table)
    missing = {n: x["remedy"] for n, x in found["lanes"].items() if x["remedy"]}
    if missing:
        console.print("\nto enable the rest", style="bold")
        for name, remedy in missing.items():
            console.print(f"  {name}: {remedy}", highlight=False)
    console.print("\nthis machine", style="bold")
    for name, value in {**found["versions"], **found["tools"]}.items():
        console.print(f"  {name}: {value or '-'}", highlight=False)
    console.print(f"  cache: {found['cache']['path']}, {_size(found['cache']['bytes'])}", highlight=False)


def _mark(value: bool) -> str:
    return "[green]yes[/]" if value else "[red]no[/]"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


@click.group(epilog=EXIT_CODES)
def sim() -> None:
    """The Ascend compiler and the CPU simulator, which run NPU kernels where there is no NPU.

    Example: fa-multi sim setup
    """


@sim.command("setup", epilog=EXIT_CODES)
@friendly
def sim_setup() -> None:
    """Download and install what the simulator needs; what is there is left alone.

    Example: fa-multi sim setup
    """
    from .backends.ascend import toolchain

    found = toolchain.setup(progress=click.echo)
    if not found.ready:
        raise RuntimeError(found.reason or "the simulator is not ready")


@sim.command("status", epilog=EXIT_CODES)
@friendly
def sim_status() -> None:
    """What the simulator has and what it lacks; exit code 3 if it is not ready.

    Example: fa-multi sim status
    """
    from .backends.ascend import toolchain

    found = toolchain.status()
    for name, path in found.paths.items():
        click.echo(f"{name}: {path}")
    for name, version in found.versions.items():
        click.echo(f"{name} version: {version}")
    if not found.ready:
        raise RuntimeError(found.reason or "the simulator is not ready")
    click.echo("ready: kernels can be lowered and simulated")


@click.group(epilog=EXIT_CODES)
def cache() -> None:
    """What fa_multi keeps on disk and can make again: kernel texts, compiled kernels, toolchains.

    Example: fa-multi cache ls
    """


@cache.command("ls", epilog=EXIT_CODES)
@friendly
def cache_ls() -> None:
    """List the parts of the cache with their sizes.

    Example: fa-multi cache ls
    """
    from .cache import cache_dir
    from .doctor import folder_size

    root = cache_dir()
    click.echo(str(root))
    for part in sorted(root.iterdir()):
        files, size = folder_size(part)
        click.echo(f"  {part.name:24} {files:6} files {_size(size):>12}")


@cache.command("clear", epilog=EXIT_CODES)
@click.argument("parts", nargs=-1)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@friendly
def cache_clear(parts: tuple[str, ...], yes: bool) -> None:
    """Delete the cache, or the named PARTS of it (see `fa-multi cache ls`).

    Example: fa-multi cache clear cuda
    """
    from .cache import cache_dir

    root = cache_dir()
    there = {p.name: p for p in root.iterdir()}
    unknown = [p for p in parts if p not in there]
    if unknown:
        raise ValueError(f"the cache has no part {unknown[0]!r}; it has {', '.join(sorted(there)) or 'nothing'}")
    chosen = [there[p] for p in parts or sorted(there)]
    if not chosen:
        click.echo("nothing to delete")
        return
    if not yes:
        click.confirm(f"Delete {', '.join(p.name for p in chosen)} below {root}?", abort=True)
    for path in chosen:
        _delete(path)
        click.echo(f"deleted {path.name}")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@click.command(epilog=EXIT_CODES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), required=False)
@click.pass_context
@friendly
def completion(context: click.Context, shell: str | None) -> None:
    """Print the completion script of a shell (default: the one in use).

    Example: eval "$(fa-multi completion bash)"
    """
    from click.shell_completion import get_completion_class

    name = shell or Path(os.environ.get("SHELL", "bash")).name
    found = get_completion_class(name)
    if found is None:
        raise ValueError(f"SHELL must be bash, zsh or fish, got {name!r}")
    click.echo(found(context.find_root().command, {}, "fa-multi", "_FA_MULTI_COMPLETE").source())
