"""Modules: explicit keyword arguments in, output and evidence out."""
