"""Commands that compare devices: capture and diff."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .cli_common import EXIT_CODES, EXIT_FAILED, EXIT_INTERRUPTED, case_names, console, device_option, errors, friendly


@click.command(epilog=EXIT_CODES)
@device_option
@click.option(
    "--cases",
    "pattern",
    default=None,
    shell_complete=case_names,
    help='Which cases: "all" (the default), names, '
    "shell patterns or tag:NAME separated by commas, or the path of a YAML file.",
)
@click.option(
    "--inputs",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Instead of cases: q, k, v (and sink, "
    "slopes, ...) from a safetensors file, or NAME.q, NAME.k, NAME.v for several calls.",
)
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="With --inputs: an option of fa_multi.attention, such as causal=true. May be repeated.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="A file that ends in .safetensors, or a folder to make.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the cases' inputs.")
@click.option(
    "--mass/--no-mass",
    default=True,
    show_default=True,
    help="Also launch with a v of ones, which gives the sum of the weights of every row.",
)
@click.option("--resume", is_flag=True, help="Go on with an interrupted capture; cases that failed are run again.")
@click.option("--overwrite", is_flag=True, help="Replace what is at the output, once the new capture is complete.")
@friendly
def capture(
    device: str,
    pattern: str | None,
    inputs: Path | None,
    options: tuple[str, ...],
    output: Path,
    seed: int,
    mass: bool,
    resume: bool,
    overwrite: bool,
) -> None:
    """Run cases on one device and keep the results, to compare them with another device's by `fa-multi diff`.

    Example: fa-multi capture --device cuda --cases all -o h200.safetensors
    """
    from .accuracy import capture as capturing
    from .accuracy.dumps import load_inputs
    from .cases import select

    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if inputs is not None and pattern is not None:
        raise ValueError("--inputs and --cases exclude each other")
    if options and inputs is None:
        raise ValueError("--set needs --inputs; the options of a case are its own")
    common: dict[str, Any] = {"mass": mass, "resume": resume, "overwrite": overwrite}
    records: list[dict[str, Any]] = []
    with _Bar("capture") as bar:

        def progress(step: Any) -> None:
            records.append(step.record)
            bar.step(step.number, step.total, step.record["name"])

        try:
            if inputs is not None:
                problems = load_inputs(inputs, dict(_option(o) for o in options))
                capturing.capture_inputs(problems, device, output, progress=progress, **common)
            else:
                chosen = select(pattern or "all")
                capturing.capture_cases(chosen, device, output, seed=seed, progress=progress, **common)
        except KeyboardInterrupt:
            kept = f"{len(records)} cases are kept; go on with --resume"
            errors.print(f"interrupted: {kept}", markup=False)
            sys.exit(EXIT_INTERRUPTED)
    _summary(records, output)


def _option(text: str) -> tuple[str, Any]:
    from .accuracy.dumps import parse_option

    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set must be NAME=VALUE, got {text!r}")
    return name, parse_option(value)


def _summary(records: list[dict[str, Any]], output: Path) -> None:
    by_status: dict[str, list[dict[str, Any]]] = {"ok": [], "unsupported": [], "failed": []}
    for record in records:
        by_status[record["status"]].append(record)
    for status in ("unsupported", "failed"):
        for record in by_status[status]:
            errors.print(
                f"{status}: {record['name']}: {record['error']}", markup=False, highlight=False, soft_wrap=True
            )
    counts = ", ".join(f"{len(found)} {status}" for status, found in by_status.items() if found)
    click.echo(f"{output}: {counts or 'no cases'}")
    if by_status["failed"]:
        sys.exit(EXIT_FAILED)


class _Bar:
    """A progress bar on a terminal; elsewhere a line on stderr every ten seconds."""

    def __init__(self, title: str) -> None:
        columns = (
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self.title, self.last = title, time.monotonic()

    def __enter__(self) -> _Bar:
        self.bar.start()
        self.task = self.bar.add_task("", total=None)
        return self

    def step(self, number: int, total: int, name: str) -> None:
        self.bar.update(self.task, completed=number, total=total, description=name)
        if not errors.is_terminal and time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            click.echo(f"{self.title}: {number} of {total}, {name}", err=True)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


@click.command(epilog=EXIT_CODES)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--golden/--no-golden",
    default=True,
    show_default=True,
    help="Compute the fp64 golden results and hold A and B to them. Without, A is only compared with B.",
)
@click.option("--cases", "pattern", help="Only these cases: names or shell patterns, separated by commas.")
@click.option("--level", type=click.Choice(["L0", "L1", "L2"]), help="Guard level of the dual standard. Default: L1.")
@click.option(
    "--thresholds",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file with limits of your own (docs/accuracy.md has the names).",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything as JSON.")
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a report with plots, one file that needs no other.",
)
@friendly
def diff(
    a: Path,
    b: Path,
    golden: bool,
    pattern: str | None,
    level: str | None,
    thresholds: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Compare capture A (the device under test) with capture B (the one it is measured against), case by case.

    Example: fa-multi diff npu.safetensors h200.safetensors --html report.html
    """
    from .accuracy import report as reporting
    from .accuracy.compare import compare_captures
    from .accuracy.standards import Thresholds
    from .accuracy.store import Capture
    from .cache import write_atomic

    limits = Thresholds.load(thresholds, {} if level is None else {"level": level})
    for option, file in (("--json", json_file), ("--html", html_file)):
        if file is not None and not file.parent.is_dir():
            raise ValueError(f"{option} must be in a folder that exists, got {str(file)!r}")
    captures = Capture(a), Capture(b)
    names = reporting.choose(captures, pattern)
    reports = []
    with _Bar("diff") as bar:
        for report in compare_captures(*captures, limits, golden, names):
            reports.append(report)
            bar.step(len(reports), len(names), report.name)
            click.echo(report.line())
            for detail in report.details():
                click.echo(f"      {detail}")
    comparison = reporting.Comparison(captures[0], captures[1], limits, golden, reports)
    reporting.print_tables(comparison, console)
    if json_file is not None:
        write_atomic(json_file, json.dumps(comparison.to_dict(), allow_nan=False))
        click.echo(f"JSON: {json_file}")
    if html_file is not None:
        write_atomic(html_file, reporting.html(comparison))
        click.echo(f"HTML: {html_file}")
    if not all(r.ok for r in reports):
        sys.exit(EXIT_FAILED)
