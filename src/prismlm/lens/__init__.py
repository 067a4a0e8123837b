"""One pass over a corpus makes a lens; a lens is opened and queried.

``build`` reads a corpus with ``scan``, and writes ``cells``, ``suffixes``, ``signatures``,
``probe`` and ``support``. ``lens`` opens and measures them, ``layout`` has the files, ``labels``
names prototypes.
"""
