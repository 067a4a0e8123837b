"""One pass over a corpus makes a lens; a lens is opened and queried.

``build`` reads a corpus with ``scan`` and ``states``, and writes ``cells``, ``suffixes``,
``signatures``, ``probe`` and ``support``. ``lens`` opens them; ``text`` has the sentences,
``layout`` the files. ``labels`` names prototypes.
"""
