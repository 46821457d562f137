"""What every command of `fa-multi` shares: exit codes, one-line errors, the device option."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

EXIT_FAILED, EXIT_USAGE, EXIT_MISSING, EXIT_INTERRUPTED = 1, 2, 3, 130
EXIT_CODES = (
    "Exit codes: 0 all is well; 1 a case failed or two results differ; 2 an argument is not acceptable; "
    "3 a device, compiler or simulator is not there; 130 interrupted."
)
LANES = ("cpu", "cuda", "npu", "npu-sim")
STAGES = ("program", "roles", "source", "lowered", "pto", "cubin")

# rich takes 80 columns where there is no terminal, too few for the tables
console = Console() if sys.stdout.isatty() else Console(width=140)
errors = Console(stderr=True)


class _Failure(click.ClickException):
    """An error of one line with an exit code of its own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = code  # type: ignore[misc]


def friendly(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turns the library's errors into one line and an exit code; `fa-multi --traceback` shows where they come from."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort):  # the last two are RuntimeErrors
            raise
        except (ValueError, TypeError) as error:
            _reraise_if_asked()
            raise _Failure(str(error), EXIT_USAGE) from None
        except (RuntimeError, OSError, ImportError) as error:
            _reraise_if_asked()
            raise _Failure(str(error) or type(error).__name__, EXIT_MISSING) from None
        except KeyboardInterrupt:
            raise _Failure("interrupted", EXIT_INTERRUPTED) from None

    return run


def _reraise_if_asked() -> None:
    context = click.get_current_context(silent=True)
    if context is not None and context.find_root().params.get("traceback"):
        raise


def device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--device, one of the lanes, with a number where there are several."""
    text = 'Where to run: "cpu", "cuda[:N]", "npu[:N]" or "npu-sim".'
    return click.option("--device", "-d", required=True, shell_complete=_lanes, metavar="DEVICE", help=text)(command)


def _lanes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    return [lane for lane in LANES if lane.startswith(incomplete)]


def case_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Completion of case names."""
    from .cases import CASES

    return [c.name for c in CASES if c.name.startswith(incomplete)]
