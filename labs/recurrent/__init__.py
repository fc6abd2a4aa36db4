"""Layers without keys, whose states merge as maps and not as sums, over devices and trees.

In the order of reading: rule, maps, tree, devices, hybrid.
"""
