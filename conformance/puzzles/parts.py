"""Squares, trees and bars that the puzzles' pictures are made of."""

import numpy as np
from matplotlib.patches import Rectangle

from figures.style import BLUE, GREY, INK, RED


def square(x, y, color, filled=True):
    face = color if filled else "white"
    return Rectangle((x - 0.42, y - 0.42), 0.84, 0.84, facecolor=face, edgecolor=color, lw=1.5)


def grid(ax, columns, rows, xlabel, ylabel, right=0.0):
    ax.set(xlim=(-0.7, columns - 0.3 + right), ylim=(rows - 0.3, -0.7 - bool(right)))
    ax.set(xlabel=xlabel, ylabel=ylabel, aspect="equal")
    ax.set_xticks(range(columns))
    ax.set_yticks(range(rows))
    ax.tick_params(labelsize=8, length=0)
    for side in ax.spines.values():
        side.set_visible(False)


def depth_first(parent) -> list[int]:
    children = {}
    for node, above in enumerate(parent):
        children.setdefault(int(above), []).append(node)
    order = []
    waiting = children.get(-1, [])[::-1]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += children.get(node, [])[::-1]
    return order


def ends(parent) -> np.ndarray:
    """end[j]: one more than the last node below j, or j itself; of nodes in depth-first order."""
    end = np.arange(1, len(parent) + 1)
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            end[parent[node]] = max(end[parent[node]], end[node])
    return end


def draw_tree(ax, labels, parents, wrong=()):
    """Nodes by depth, leaves one below the other; red the nodes in `wrong`."""
    parents = [int(x) for x in parents]
    depth = {-1: -1}
    place = {}
    row = 0
    for node in depth_first(parents):
        depth[node] = depth[parents[node]] + 1
        if node not in parents:
            place[node] = row
            row += 1
    for node in depth_first(parents)[::-1]:
        if node not in place:
            below = [place[i] for i, above in enumerate(parents) if above == node]
            place[node] = sum(below) / len(below)
    for node in place:
        if parents[node] >= 0:
            above = parents[node]
            ax.plot([depth[above], depth[node]], [place[above], place[node]], color=GREY, zorder=1)
        color = RED if node in wrong else BLUE
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": color}
        ax.text(depth[node], place[node], str(labels[node]), ha="center", va="center", bbox=box)
    ax.set(xlim=(-0.5, max(depth.values()) + 0.5), ylim=(row - 0.4, -0.6))
    ax.axis("off")


def bars(ax, found, expected):
    wrong = np.abs(found - expected) > 1e-9
    ax.bar(range(len(found)), found, color=[RED if x else BLUE for x in wrong], width=0.6)
    for i, x in enumerate(expected):
        ax.plot([i - 0.4, i + 0.4], [x, x], color=INK, lw=2)
    ax.set(ylim=(0, 0.8), xlabel="token", ylabel="probability")
    ax.set_xticks(range(len(found)))
