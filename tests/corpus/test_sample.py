from collections import Counter

import pyarrow.parquet as pq
import pytest

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


@pytest.fixture(scope="module")
def documents():
    return list(DocumentReader(sample_path()))


def test_the_sample_is_small_varied_and_openly_licensed(documents):
    sizes: Counter[str] = Counter()
    for document in documents:
        assert document.domain is not None
        assert document.source is not None
        assert document.license in ALLOWED
        sizes[document.domain] += len(document.text.encode())
    assert len(sizes) >= 8
    assert 10e6 < sizes.total() < 20e6
    assert min(sizes.values()) > 0.8 * max(sizes.values())
    assert sample_path().stat().st_size <= 6_000_000
    assert pq.read_schema(sample_path()).names == [
        *("id", "text", "domain", "source", "license", "title", "url", "split")
    ]


def test_every_source_of_the_sample_is_credited_with_what_was_taken(documents):
    credits = (sample_path().parent / "ATTRIBUTION.md").read_text(encoding="utf-8")
    named = {
        "openstax/": "OpenStax, Rice University",
        "arxiv/": "arXiv metadata",
        "classic-books/": "Classic books",
        "fairytaleqa/": "Fairy tales",
        "legal_au_fca": "Federal Court of Australia",
        "medquad/": "Ben Abacha",
        "fed/": "Board of Governors of the Federal Reserve System",
        "digital.gov": "Digital.gov",
        "18f-blog": "18F site and blog",
        "python-peps": "Python Enhancement Proposals",
        "ethereum-eips": "Ethereum Improvement Proposals",
        "cpp-docs": "Microsoft C++",
        "powershell-docs": "PowerShell documentation",
    }
    sections = credits.split("\n## ")
    taken: Counter[str] = Counter()
    for document in documents:
        taken[next(one for one in named if str(document.source).startswith(one))] += 1
    assert taken.keys() == named.keys()
    for prefix, count in taken.items():
        (section,) = (one for one in sections if named[prefix] in one)
        assert f"- Taken: {count:,} texts" in section
    assert f"holds {taken.total():,} texts" in sections[0]
