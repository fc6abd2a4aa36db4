"""One device: queries and keys in, a state out."""
