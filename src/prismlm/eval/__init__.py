"""Measurements beside their controls."""
