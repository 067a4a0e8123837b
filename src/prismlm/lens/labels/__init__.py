"""Names for prototypes, made of the places where they are nearest, and scored.

``write.label_lens`` names a lens: ``places`` of its cells, ``vocabulary`` and ``categories`` of
their tokens, names by what sets them apart (``embedded``) or by a language model (``by_endpoint``,
through ``endpoint`` and ``answers``), ``scores`` on documents that named nothing. ``map`` lays the
prototypes out, ``catalogue`` searches them.
"""
