"""One pass over a corpus: what each prototype stands for, as a lens directory."""
