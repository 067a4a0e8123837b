"""One pass over a corpus makes a lens; a lens is opened and queried.

``build`` reads a corpus with ``scan`` and ``states``, and writes a lens with ``write_cells``,
``suffixes``, ``signatures``, ``probe`` and ``support``. ``lens`` opens one: ``cells`` has the
positions and nearest neighbours, ``text`` the sentences, ``layout`` the files. ``labels`` names
prototypes, and ``inspection`` measures a lens.
"""
