"""Figure of a training run on prefix trees: what examples/train_on_a_tree.py wrote down."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from figures.canvas import styled
from figures.measured import measured
from figures.style import BLUE, ORANGE, new_figure

WINDOW = 5  # steps whose mean a line shows


@styled
def learning_curve(results: Mapping | None = None) -> Figure:
    """The reward of a step's samples, and how many of them were right, along the run.

    results: what examples/train_on_a_tree.py wrote; a checkout's when None, ValueError if none.
    """
    if results is None:
        results = measured("train_on_a_tree", script="examples/train_on_a_tree.py")
    steps = results["steps"]
    number = np.arange(1, len(steps) + 1)
    width = min(WINDOW, len(steps))
    figure, ax = new_figure(6.4, 3.2)
    ends = {}
    for name, label, color, marker in (
        ("reward", "mean reward", ORANGE, "o"),
        ("right", "share of right answers", BLUE, "s"),
    ):
        values = np.array([step[name] for step in steps])
        mean = np.convolve(values, np.ones(width) / width, mode="valid")
        ax.plot(number, values, marker, color=color, ms=4, alpha=0.45)
        ax.plot(number[width - 1 :], mean, color=color, lw=2, label=label)
        ends[name] = mean[0], mean[-1]
    ax.set(xlabel="step", ylim=(0, 1.04), title="The packaged model learns sums, 32 answers a step")
    ax.legend(loc="lower right", fontsize=9)
    return figure.describe(
        f"Dots for each of {len(steps)} steps, and lines of the mean over {width} of them. "
        f"The mean reward goes from {ends['reward'][0]:.2f} to {ends['reward'][1]:.2f}, "
        f"the share of right answers from {ends['right'][0]:.2f} to {ends['right'][1]:.2f}."
    )


FIGURES = {"learning_curve": learning_curve}
