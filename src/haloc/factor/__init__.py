"""Decompositions of a layer's weight, and the surgery that puts them into a network."""
