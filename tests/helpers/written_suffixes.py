"""The text of a lens, written by one process."""

from prismlm.lens.suffixes import count_parts, finish, write_part


def write_suffixes(directory, corpus, split):
    """Write the tokens of a split, and their order if a sorter is installed."""
    for number in range(count_parts(corpus, split)):
        write_part(directory, corpus, split, number)
    finish(directory, corpus, split)
