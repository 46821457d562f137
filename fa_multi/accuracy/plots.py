"""Plots of a comparison, as data URIs of SVG images."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from .attribution import INSIDE, OUTSIDE, Attribution
from .compare import CaseReport, TensorReport
from .metrics import ULP_BINS

COLORS = {"a": "#d1495b", "b": "#2e6f95", "naive": "#9a9a9a", "ab": "#6b4e71"}
NAMES = {"a": "A", "b": "B", "naive": "naive", "ab": "A against B"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fa_multi",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.02,  # a given place spares matplotlib a search for one, most of the time of a plot
}


def _uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def overview(cases: list[CaseReport]) -> str:
    """Relative L2 error of `out`, case by case: A, B, and the naive computation that sets the limit."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12, 3.6))
        axes = figure.subplots(gridspec_kw={"left": 0.06, "right": 0.995, "bottom": 0.32, "top": 0.91})
        outs = [c.tensors["out"] for c in cases]
        for side, marker in (("naive", "_"), ("b", "o"), ("a", "o"), ("ab", "D")):
            found = [(i, getattr(o, side).rel_l2) for i, o in enumerate(outs) if getattr(o, side) is not None]
            if not found or (side == "ab" and outs[0].a is not None):
                continue
            x, y = zip(*found)
            size = {"naive": 60, "b": 34, "a": 13, "ab": 16}[side]
            axes.scatter(x, np.maximum(y, 1e-9), s=size, marker=marker, color=COLORS[side], label=NAMES[side], zorder=3)
        for i, case in enumerate(cases):
            if case.verdict == "fail":
                axes.axvspan(i - 0.5, i + 0.5, color="#d1495b", alpha=0.13, lw=0)
        _log_ticks(axes)
        axes.set_xlim(-0.7, len(cases) - 0.3)
        axes.set_xticks(range(len(cases)), [c.name for c in cases], rotation=90, fontsize=7)
        axes.set_ylabel("relative L2 error of out")
        values = [getattr(o, s).rel_l2 for o in outs for s in ("a", "b", "naive", "ab") if getattr(o, s) is not None]
        powers = [math.log10(min(max(v, 1e-9), 1e9)) for v in values]
        axes.set_ylim(10 ** (math.floor(min(powers)) - 0.2), 10 ** (math.ceil(max(powers)) + 0.2))
        axes.grid(axis="y", color="#e5e5e5", lw=0.6)
        axes.legend(ncols=4, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
        return _uri(figure)


def case_figure(case: CaseReport) -> str:
    """Error of `out` over heads and query blocks, ULP histogram, and error by distance to the mask edge."""
    out = case.tensors["out"]
    sides: list[str] = [s for s in ("a", "b", "ab") if s in out.heat and (s != "ab" or out.a is None)]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12.6, 2.8))
        columns = [1.0] * len(sides) + [1.15] + ([1.4] if case.edges else [])
        margins = {"left": 0.04, "right": 0.995, "bottom": 0.19, "top": 0.9, "wspace": 0.3}
        axes = figure.subplots(1, len(columns), width_ratios=columns, gridspec_kw=margins)
        _heat(figure, list(axes[: len(sides)]), out, sides)
        _ulp(axes[len(sides)], out)
        if case.edges:
            _edges(axes[-1], case.edges)
        return _uri(figure)


def _heat(figure: Figure, panels: list[Axes], out: TensorReport, sides: list[str]) -> None:
    grids = [np.array(out.heat[side]) for side in sides]
    positive = np.concatenate([g[g > 0].ravel() for g in grids])
    top = float(positive.max()) if positive.size else 1.0
    low = float(positive.min()) if positive.size else top
    norm = LogNorm(min(max(low, top * 1e-4), top / 20), top)  # at least a decade: no drama from small differences
    image: Any = None
    for axes, side, grid in zip(panels, sides, grids):
        extent = (0.0, grid.shape[1] * out.block, grid.shape[0] - 0.5, -0.5)
        image = axes.imshow(np.ma.masked_equal(grid, 0), aspect="auto", norm=norm, cmap="magma_r", extent=extent,
                            interpolation="nearest")  # fmt: skip
        axes.set_title(f"RMS error of {NAMES[side]}")
        axes.set_xlabel(f"query (blocks of {out.block})")
        axes.set_ylabel("head" if axes is panels[0] else "")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(image, ax=panels[-1], pad=0.02, fraction=0.06)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _plain(value: float, place: object = None) -> str:
    """A tick's label without mathtext, which is slow to lay out."""
    return f"{value:.0e}".replace("e-0", "e-").replace("e+00", "")


def _log_ticks(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))


def _ulp(axes: Axes, out: TensorReport) -> None:
    sides = [s for s in (("a", "b", "naive") if out.a is not None else ("ab",)) if getattr(out, s) is not None]
    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        m = getattr(out, side)
        share = np.array(list(m.ulp["histogram"].values())) / max(1, m.finite)
        place = np.arange(len(ULP_BINS)) + (i - (len(sides) - 1) / 2) * width
        axes.bar(place, share, width, color=COLORS[side], label=NAMES[side])
    _log_ticks(axes)
    axes.set_ylim(max(1e-7, 0.3 / max(1, out.main().finite)), 6)
    axes.set_xticks(range(len(ULP_BINS)), ULP_BINS, fontsize=7.5)
    axes.set_title("share of elements by steps (ULP)")
    axes.set_xlabel(f"steps of {out.dtype} from golden" if out.a else f"steps of {out.dtype} between A and B")
    axes.legend(frameon=False, fontsize=7, ncols=len(sides), loc="upper right", columnspacing=0.8, handlelength=1)


def _edges(axes: Axes, edges: dict[str, Any]) -> None:
    """Change of the weights of keys by their distance to the edge: 0 is right, -1 left out, +1 let in or doubled."""
    lower = next((side for side, e in edges.items() if e.lower is not None), None)
    sides = list(edges)
    for i, side in enumerate(sides):
        _profile(axes, edges[side].upper, side, (i - (len(sides) - 1) / 2) * 0.24, "o", f"{NAMES[side]}, upper edge")
        if lower is not None and edges[side].lower is not None:
            _profile(
                axes, edges[side].lower, side, (i - (len(sides) - 1) / 2) * 0.24, "x", f"{NAMES[side]}, lower edge"
            )
    axes.axhline(0, color="#888888", lw=0.7)
    axes.axvspan(0.5, OUTSIDE + 0.5, color="#f0f0f0", zorder=0)
    axes.set_xlim(-INSIDE - 0.5, OUTSIDE + 0.5)
    axes.set_ylim(-1.35, 1.35)
    axes.set_xticks(range(-INSIDE, OUTSIDE + 1))
    axes.set_title("error by distance to the mask edge")
    axes.set_xlabel("key's distance to the edge (grey: hidden keys)")
    axes.set_ylabel("change of its weight")
    axes.legend(frameon=False, fontsize=7.5, loc="upper left")


def _profile(axes: Axes, fit: Attribution, side: str, shift: float, marker: str, label: str) -> None:
    there = [i for i, w in enumerate(fit.weight) if w > 0]
    x = [fit.labels[i] + shift for i in there]
    y = [min(1.3, max(-1.3, fit.change[i])) for i in there]
    error = [min(2.0, fit.error[i]) for i in there]
    axes.errorbar(x, y, error, fmt=marker, ms=4, lw=0.9, color=COLORS[side], label=label)
