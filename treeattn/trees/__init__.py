"""Candidates of tokens: beams and trees, where they come from, packed for one pass."""
