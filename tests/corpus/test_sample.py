import re
from collections import Counter

import pyarrow.parquet as pq

from prismlm.corpus import DocumentReader, sample_path

ALLOWED = {
    "CC-BY-4.0",
    "CC-BY-4.0 (code MIT)",
    "CC0 (arXiv metadata)",
    "CC0-1.0",
    "public-domain",
    "public-domain-US-gov",
    "public-domain-US-gov/CC0",
    "public-domain/CC0",
    "text public-domain (Gutenberg)",
}
# How the sources of each section of ATTRIBUTION.md begin, in its order.
SOURCES = (
    *("openstax/", "arxiv/", "classic-books/", "fairytaleqa/", "legal_au_fca", "medquad/", "fed/"),
    *("digital.gov", "18f-blog", "python-peps", "ethereum-eips", "cpp-docs", "powershell-docs"),
)


def test_the_sample_is_small_varied_openly_licensed_and_credited():
    sizes, taken = Counter[str](), Counter[str]()
    for document in DocumentReader(sample_path()):
        assert document.domain is not None
        assert document.license in ALLOWED
        sizes[document.domain] += len(document.text.encode())
        taken[next(one for one in SOURCES if str(document.source).startswith(one))] += 1
    assert len(sizes) >= 8
    assert 10e6 < sizes.total() < 20e6
    assert min(sizes.values()) > 0.8 * max(sizes.values())
    assert sample_path().stat().st_size <= 6_000_000
    assert pq.read_schema(sample_path()).names == [
        *("id", "text", "domain", "source", "license", "title", "url", "split")
    ]
    credits = (sample_path().parent / "ATTRIBUTION.md").read_text(encoding="utf-8")
    counts = re.findall(r"^- Taken: ([\d,]+) texts", credits, re.MULTILINE)
    assert counts == [f"{taken[source]:,}" for source in SOURCES]
    assert f"holds {taken.total():,} texts" in credits
