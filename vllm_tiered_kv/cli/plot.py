# SPDX-License-Identifier: Apache-2.0
"""The picture of hit rates by capacity. matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.trace_report import CurvePoint
from vllm_tiered_kv.sizing.units import show_bytes

_FUTURE = "knows the future"


def check_plot(path: Path) -> None:
    """Before any work is done for it.

    Raises:
        SizingError: matplotlib is missing, or the file's kind is not one it writes.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SizingError('a plot needs matplotlib: pip install "vllm-tiered-kv[plot]"') from None
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise SizingError(f"{path}: a plot is a .png, .svg or .pdf file")


def draw_curve(points: Sequence[CurvePoint], endless: float, path: Path) -> None:
    """Hit rate over capacity, a line a policy, below what an endless tier serves.

    Args:
        endless: hit rate, 0 to 1.

    Raises:
        SizingError: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    for policy in dict.fromkeys(point.policy for point in points):
        line = [point for point in points if point.policy == policy]
        known = policy == _FUTURE
        axes.plot(
            [point.capacity for point in line],
            [100 * point.hit_rate for point in line],
            label=policy,
            marker=None if known else "o",
            color="0.6" if known else None,
            linestyle="--" if known else "-",
        )
    axes.axhline(100 * endless, color="0.6", linestyle=":", label="endless")
    axes.set(xscale="log", xlabel="capacity", ylabel="blocks served, %")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(sorted({point.capacity for point in points})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    axes.grid(visible=True, color="0.9")
    axes.legend(fontsize="small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SizingError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
