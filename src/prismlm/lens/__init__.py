"""One pass over a corpus makes a lens; a lens is opened and asked.

Making one, each module using those below it:

    build       build_index: parts, the lens in its place; IndexOptions says how text is read
    write       the files of a lens from what all parts have found
    scan        the forward passes of a part: contexts, uses, positions
    states      hidden states, read once and kept, for heads that are fitted to them
    sort_cells  positions in sorted runs, merged to cells; support, probe, suffixes, signatures

Asking one:

    lens        Lens.open: tables, names, categories, cells, support, suffixes, sentences
    cells       Cells: ranges of a cell and next token, records of positions, documents, rates
    neighbours  the positions of chosen cells with a chosen next token, and how near they are
    where       filters by source, domain and licence
    convergence what a lens says of itself
    layout      names of files, meta.json, find_lens

``opened_model`` is the model directory with its head and lens, which ``prismlm.load`` returns.
"""
