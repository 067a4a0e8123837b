"""Citations against support itself, asked of each sentence."""

from prismlm.lens.text import sentences


def naive(trace):
    """Of each sentence, the documents that carry s ≥ 0.8 of it: by loops over its tokens."""
    told, ids = trace.attribution("evidence").coverage, trace.answer_ids
    words = [len(trace.lm.words(ids[:count])) for count in range(len(ids) + 1)]
    shift = 0 if trace.first or trace.written else 1
    expected = set()
    for start, end in sentences(trace.answer):
        inside = {
            token - shift
            for token in range(len(ids))
            if words[token + 1] > start and words[token] < end and token >= shift
        }
        tokens = {int(told.tokens[one]): float(told.weights[one]) for one in inside}
        if sum(tokens.values()) < 1:
            continue
        for document in {int(d) for p, d in told.carried.tolist() if p in inside}:
            carried = {
                int(told.tokens[p])
                for p, d in told.carried.tolist()
                if p in inside and d == document
            }
            share = sum(tokens[token] for token in carried) / sum(tokens.values())
            if share >= 0.8:
                doc_id = trace.lens.cells.facts(document)["doc_id"]
                expected.add((start, end, doc_id, round(share, 6)))
    return expected


def test_a_sentence_cites_the_documents_that_carry_nearly_all_of_it(lm):
    corpus, cited = lm.lens.corpus, 0
    for number in (0, 3, 6, 30):
        text = corpus.text(number)[:300]
        whole = lm.explain(text)
        for trace in (whole, lm.explain(text[:40], generate=30), whole[5:]):
            found = trace.citations()
            marks = [
                (one.start, one.end, one.document["doc_id"], round(one.share, 6)) for one in found
            ]
            assert set(marks) == naive(trace)
            assert len(set(marks)) == len(marks)
            assert marks == sorted(marks, key=lambda mark: (mark[0], -mark[3]))
            cited += len(marks)
    assert cited > 10
