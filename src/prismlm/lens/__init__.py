"""One pass over a corpus makes a lens; a lens is opened and asked.

Making one, each module using those below it:

    build        index, build_index: the parts of a pass, and the lens that is written of all
    scan         what a pass finds: contexts, uses, positions
    support, probe, signatures, suffixes   what else is written
    write_cells  positions in sorted runs, merged to cells
    states       hidden states, read once and kept, for heads that are fitted to them
    options      IndexOptions: how a corpus is read

Asking one:

    lens         Lens.open: tables, names, categories, cells, support, suffixes, sentences
    cells        Cells: ranges of a cell and next token, records of positions, documents, rates
    neighbours   the positions of chosen cells with a chosen next token, and how near they are
    text         sentences, and documents decoded from the lens's own tokens
    where        filters by source, domain and licence
    convergence  what a lens says of itself
    layout       names of files, meta.json, find_lens

``opened_model`` is the model directory with its head and lens, which ``prismlm.load`` returns.
"""
