"""The idea: attention is the gradient of an energy, and a small state that merges."""
