"""Tests, laid out as the source; what several share is in helpers."""
