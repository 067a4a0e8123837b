"""Figures of each layer while a model trains, as files."""
