"""What the plots of an audit have in common. Needs matplotlib, which only those who draw have to install."""

from typing import Any

__all__ = ["blank_figure"]


def blank_figure(whose: str) -> tuple[Any, Any]:
    """A figure and its axes, whose x counts whole things (turns, layers). It belongs to no window.

    Raises:
        ImportError: there is no matplotlib; names ``whose`` plot it is and how to install it.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(f"{whose} draws with matplotlib: pip install 'lragent_hf[plot]'.") from error

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes
