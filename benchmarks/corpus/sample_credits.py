"""Who made the texts of the bundled sample, and under which licence they are passed on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

CC_BY = "[CC BY 4.0](https://creativecommons.org/licenses/by/4.0/)"
CC0 = "[CC0 1.0](https://creativecommons.org/publicdomain/zero/1.0/)"
US_GOVERNMENT = "public domain (a work of the United States government, 17 U.S.C. § 105)"
PUBLIC_DOMAIN = "public domain"


@dataclass(frozen=True)
class Credit:
    """One source set: every row whose source starts with ``prefix``."""

    prefix: str
    name: str
    creator: str
    licence: str
    url: str
    note: str = ""


CREDITS = [
    Credit(
        "openstax/",
        "OpenStax textbooks",
        "OpenStax, Rice University, and the authors named in each book",
        CC_BY,
        "https://openstax.org",
        "Access for free at openstax.org. `source` names the book.",
    ),
    Credit(
        "arxiv/",
        "arXiv metadata: titles and abstracts",
        "arXiv, Cornell University, and the authors of the papers",
        CC0 + ", as arXiv puts its metadata",
        "https://info.arxiv.org/help/license/index.html",
        "`source` holds the arXiv category, `id` and `url` the paper's number. The set that they "
        "were taken from has had numbers read as floats (1503.0099699999998 for 1503.00997): they "
        "are mended here. Ids decide which texts a corpus holds out; `split` keeps those in their "
        "part, train or heldout, that the mended id would have moved.",
    ),
    Credit(
        "classic-books/",
        "Classic books",
        "the authors named in `source`",
        PUBLIC_DOMAIN,
        "https://www.gutenberg.org",
        "Works published before 1928. `title` names the book.",
    ),
    Credit(
        "fairytaleqa/",
        "Fairy tales",
        "collections of fairy tales at Project Gutenberg, gathered by the FairytaleQA project "
        "(Xu et al. 2022); only the tales, not its questions",
        PUBLIC_DOMAIN,
        "https://github.com/uci-soe/FairytaleQAData",
    ),
    Credit(
        "legal_au_fca",
        "Legal Case Reports",
        "judgments of the Federal Court of Australia, collected from AustLII by Filippo Galgani",
        CC_BY,
        "https://archive.ics.uci.edu/dataset/239/legal+case+reports",
        "`url` leads to each judgment.",
    ),
    Credit(
        "medquad/",
        "MedQuAD, the Medical Question Answering Dataset",
        "Asma Ben Abacha and Dina Demner-Fushman (2019), A question-entailment approach to "
        "question answering, BMC Bioinformatics 20:511; from pages of the US National Institutes "
        "of Health and the CDC",
        CC_BY,
        "https://github.com/abachaa/MedQuAD",
        "`url` leads to each page, `source` names the institute.",
    ),
    Credit(
        "fed/",
        "Speeches, minutes and press conferences of the Federal Reserve",
        "Board of Governors of the Federal Reserve System",
        US_GOVERNMENT,
        "https://www.federalreserve.gov",
    ),
    Credit(
        "digital.gov",
        "Digital.gov",
        "US General Services Administration",
        US_GOVERNMENT + ", elsewhere " + CC0,
        "https://digital.gov",
    ),
    Credit(
        "18f-blog",
        "18F site and blog",
        "18F, US General Services Administration",
        US_GOVERNMENT + ", elsewhere " + CC0,
        "https://18f.gsa.gov",
    ),
    Credit(
        "python-peps",
        "Python Enhancement Proposals",
        "the authors named in each proposal",
        f"public domain or {CC0}; only proposals that say so themselves",
        "https://peps.python.org",
    ),
    Credit(
        "ethereum-eips",
        "Ethereum Improvement Proposals",
        "the authors named in each proposal",
        CC0 + "; only proposals that say so themselves",
        "https://eips.ethereum.org",
    ),
    Credit(
        "cpp-docs",
        "Microsoft C++, C and Assembler documentation",
        "Microsoft Corporation and contributors",
        CC_BY + " (code in it: MIT, below)",
        "https://github.com/MicrosoftDocs/cpp-docs",
    ),
    Credit(
        "powershell-docs",
        "PowerShell documentation",
        "Microsoft Corporation and contributors",
        CC_BY + " (code in it: MIT, below)",
        "https://github.com/MicrosoftDocs/PowerShell-Docs",
    ),
]

HEADER = """\
# Where the sample comes from

`sample.parquet` holds {documents:,} texts, {megabytes:.1f} million characters, by the people and
institutions below. The texts are whole and unchanged: what was done is to choose them, to name
their domains, to fill in titles and arXiv addresses, and to mend arXiv numbers. Each row's
`license` column is the one of the set it was taken from. Nobody below endorses this project.
Written by `benchmarks/corpus/build_sample.py`.
"""

MIT = """
## The MIT licence, for the code in Microsoft's documentation

Copyright (c) Microsoft Corporation

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def attribution(taken: dict[str, Counter[str]]) -> str:
    """Return ATTRIBUTION.md for the documents and characters taken from each source.

    Raises:
        ValueError: a source has no credit.
    """
    total: Counter[str] = Counter()
    sections: list[str] = []
    credited: set[str] = set()
    for credit in CREDITS:
        found = {source: n for source, n in taken.items() if source.startswith(credit.prefix)}
        if not found:
            continue
        credited |= found.keys()
        counts: Counter[str] = Counter()
        for n in found.values():
            counts.update(n)
        total.update(counts)
        lines = [
            f"\n## {credit.name}\n",
            f"- By: {credit.creator}",
            f"- Licence: {credit.licence}",
            f"- From: <{credit.url}>",
            f"- Taken: {counts['documents']:,} texts, {counts['characters'] / 1e6:.2f} million "
            "characters; chosen, not changed",
        ]
        sections.append("\n".join([*lines, *([f"- {credit.note}"] if credit.note else [])]) + "\n")
    if missing := sorted(taken.keys() - credited):
        raise ValueError(f"no credit for {', '.join(missing)}: add one to sample_credits.py")
    header = HEADER.format(documents=total["documents"], megabytes=total["characters"] / 1e6)
    return header + "".join(sections) + MIT
