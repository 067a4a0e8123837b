"""Themes of prototypes, channels and attention heads: ProtoT's rubric."""
