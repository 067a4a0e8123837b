"""Language models that can be read by construction."""

__version__ = "0.1.0"
