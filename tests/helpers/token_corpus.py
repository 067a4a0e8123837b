"""A corpus of token ids that were made up, without text, tokenizer or files."""

import numpy as np


class TokenCorpus:
    """What a suffix array needs of a corpus, over lists of token ids; ``held_out`` numbers some."""

    def __init__(self, documents, end=0, dtype="uint16", held_out=()):
        self.name = "made-up"
        self.meta = {"dtype": dtype}
        ended = [[*document, end] for document in documents]
        self._tokens = np.array([token for document in ended for token in document], dtype=dtype)
        self.lengths = np.array([len(document) for document in ended], dtype=np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self._held_out = np.isin(np.arange(len(documents)), list(held_out))

    def split(self, name):
        if name == "all":
            return np.arange(len(self.lengths))
        return np.flatnonzero(self._held_out == (name == "heldout"))

    def tokens(self, start, length):
        return self._tokens[start : start + length]

    def places(self, wanted, split="all"):
        """Every position that ``wanted`` begins at, by trying all of them; without an end in it."""
        found = []
        for document in self.split(split).tolist():
            start, length = int(self.starts[document]), int(self.lengths[document]) - 1
            text = self.tokens(start, length).tolist()
            found += [
                start + at
                for at in range(length - len(wanted) + 1)
                if text[at : at + len(wanted)] == list(wanted)
            ]
        return found


def excerpt(corpus, start, length):
    """Return the characters that tokens of a document touch, from a global position on."""
    index = corpus.document_at(start)
    spans, first = corpus.spans(index), start - int(corpus.starts[index])
    return corpus.text(index)[spans[first, 0] : spans[first + length - 1, 1]]
