"""Layers without keys: a state that maps instead of sums, over devices and over trees.

In the order of reading: rule, maps, tree, devices, hybrid.
"""
