"""Printing results on a terminal."""
