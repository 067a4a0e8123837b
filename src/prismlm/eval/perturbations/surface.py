"""Slices that leave the words as they are: slips of the finger, signs, short and long forms."""

from __future__ import annotations

import random
import re
from functools import cache

from prismlm.eval.perturbations.word_lists import Change, any_of, cased, replaced, words

KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
SHIFTS = (0.0, 0.25, 0.75)
SHORTEST_TYPO = 4
PARTICIPLE = r"(?: \w+ly| never| already| just| always)? (?:been|got|had|done|seen|gone|\w+ed)\b"
ASKING = "[Ww]hat|than|[Hh]ow|[Ww]ho|whom|[Ww]hen|[Ww]here|which|whatever|as"
NEXT_WORD = r"(?= [a-z])"
PRONOUNS = "i|you|he|she|it|we|they|that|this|there|the|anyone|anybody|everyone"
# A general is not meant.
NO_NAME = (
    "Motors|Electric|Mills|Assembly|Secretary|Manager|League|Counsel|Council|Hospital|Dynamics"
)
NO_TITLE = "Attorney|Brigadier|Major|Lieutenant|Secretary|Vice"


@cache
def neighbours() -> dict[str, str]:
    """Return the letters whose keys touch each letter's, on a QWERTY keyboard."""
    places = {
        letter: (row, x + SHIFTS[row])
        for row, keys in enumerate(KEYS)
        for x, letter in enumerate(keys)
    }
    return {
        letter: "".join(
            other
            for other, (row, x) in places.items()
            if other != letter and abs(row - at[0]) <= 1 and abs(x - at[1]) <= 1
            and (row == at[0] or abs(x - at[1]) < 1)
        )
        for letter, at in places.items()
    }  # fmt: skip


def typo(sentence: str, draw: random.Random) -> Change | None:
    """Put a neighbour on the keyboard in the place of a letter inside one word.

    Neither the first nor the last letter; and what comes out is no word.
    """
    found = [
        word
        for word in re.finditer(r"(?<![\w'-])[a-z]+(?![\w'-])", sentence)
        if len(word[0]) >= SHORTEST_TYPO
    ]
    if not found:
        return None
    word = draw.choice(found)
    place = draw.randrange(1, len(word[0]) - 1)
    letter = draw.choice(neighbours()[word[0][place]])
    slipped = word[0][:place] + letter + word[0][place + 1 :]
    if slipped in words().common:
        return None
    return Change(sentence[: word.start()] + slipped + sentence[word.end() :], "")


def contraction(sentence: str, draw: random.Random) -> Change | None:
    """Contract one pair of words, such as "do not", or write one contraction out."""
    found = [
        (word, forms)
        for pattern, forms in _contractions()
        for word in pattern.finditer(sentence)
        # "Don't you know?" cannot be written out where it stands.
        if not (sentence.endswith("?") and "'" in word[0])
    ]
    if not found:
        return None
    word, forms = draw.choice(found)
    form = word[0] if word[0] in forms else word[0][:1].lower() + word[0][1:]
    if form not in forms:
        return None
    text = sentence[: word.start()] + cased(forms[form], word[0]) + sentence[word.end() :]
    return Change(text, min(form, forms[form]))


@cache
def _contractions() -> list[tuple[re.Pattern[str], dict[str, str]]]:
    """Return patterns of contractions that mean one thing, and of what can be contracted."""
    forms = words().contractions
    longer = {long: short for short, long in forms.items()}
    # 'd is "had" or "would", and what stands before a participle is no "it is" but "it has".
    written = [short for short in forms if not short.endswith(("n't", "'d"))]
    negated = [short for short in forms if short.endswith("n't")]
    have = [long for long in longer if long.endswith(" have")]
    first = ("let us", "there is", "that is", "what is")
    plain = [long for long in longer if not long.endswith((" have", " not")) and long not in first]
    alone = _not_after(ASKING)
    patterns = (
        (rf"\b(?i:{any_of(negated)})\b(?! (?:{PRONOUNS})\b)", forms),
        (rf"\b(?i:{any_of(written)})\b(?!{PARTICIPLE}){NEXT_WORD}", forms),
        (rf"\b(?i:{any_of([forms[short] for short in negated])})\b(?! (?:{PRONOUNS})\b)", longer),
        (rf"{alone}\b(?i:{any_of(have)})\b(?={PARTICIPLE})", longer),
        (rf"{alone}\b(?i:{any_of(plain)})\b{NEXT_WORD}", longer),
        (rf"(?:^|(?<=, ))\b(?i:{any_of(first)})\b{NEXT_WORD}", longer),
    )
    return [(re.compile(pattern), kind) for pattern, kind in patterns]


def _not_after(alternatives: str) -> str:
    """Return a pattern of a place that none of some words stands before, whatever their length."""
    return "".join(rf"(?<!\b{word} )" for word in alternatives.split("|"))


def punctuation(sentence: str, draw: random.Random) -> Change | None:
    """Add or leave out one sign, or the capital of one word; the words stay as they are."""
    texts: list[str] = []
    if sentence.endswith("."):
        texts.append(sentence[:-1])
    for joint in re.finditer(r"(?<=[a-z]),? (?=(and|but|or|because|when|while|which) )", sentence):
        instead = " " if joint[0].startswith(",") else ", "
        texts.append(sentence[: joint.start()] + instead + sentence[joint.end() :])
    opening = re.match(r"(\w+)( \w+)?( \w+)?,", sentence)
    if opening:
        texts.append(sentence[: opening.end() - 1] + sentence[opening.end() :])
    first = re.match(r"[A-Z][a-z]+\b", sentence)
    if first and first[0].lower() in words().common:
        texts.append(sentence[0].lower() + sentence[1:])
    inner = list(re.finditer(r"(?<= )[a-z]{4,}\b", sentence))
    if inner:
        at = draw.choice(inner).start()
        texts.append(sentence[:at] + sentence[at].upper() + sentence[at + 1 :])
    return Change(draw.choice(texts), "") if texts else None


def abbreviation(sentence: str, draw: random.Random) -> Change | None:
    """Shorten one word or name, or write a short form out."""
    found = [
        (word, instead, short)
        for pattern, instead, short in _abbreviations()
        for word in pattern.finditer(sentence)
    ]
    if not found:
        return None
    word, instead, short = draw.choice(found)
    if not word.start():
        instead = instead[0].upper() + instead[1:]
    text = replaced(sentence, word, instead)
    if text is None:
        return None
    # One full stop ends both the short form and the sentence.
    text = re.sub(r"\.\.$", ".", text)
    return Change(text if text[-1] in ".?!" else f"{text}.", short.strip())


@cache
def _abbreviations() -> list[tuple[re.Pattern[str], str, str]]:
    """Return patterns, what takes the place of what they find, and the short form of the two."""
    rows: list[tuple[re.Pattern[str], str, str]] = []
    written_out: set[tuple[str, str]] = set()
    for long, short, beside in words().abbreviations:
        rows.append(
            (_beside(re.escape(long) + r"\b", "" if beside == "the" else beside), short, short)
        )
        if beside not in ("one way", "day") and (short, beside) not in written_out:
            written_out.add((short, beside))
            end = "" if short[-1] in ".%" else r"\b"
            rows.append((_beside(re.escape(short) + end, beside), long, short))
    return rows


def _beside(form: str, beside: str) -> re.Pattern[str]:
    start = "" if form.startswith("%") or form.startswith("\\ ") else r"(?<![\w-])"
    return re.compile(
        {
            "the": rf"(?<=\b[Tt]he ){form}(?![\w'-]| [a-z]+[^a-z .,]| [A-Z\d])",
            "Name": rf"{_not_after(NO_TITLE)}{start}{form}(?= (?!{NO_NAME})[A-Z][a-z])",
            "after": rf"(?<=[a-z] )(?<! the ){start}{form}(?! [A-Z]|')",
            "number": rf"{start}{form}(?= \d)",
            "count": rf"(?<=\d){form}(?!\w| [A-Z])",
            "date": rf"{start}{form}(?= \d)",
            "day": rf"(?<![A-Z]\w\w )(?<![a-z]-){start}{form}(?! [A-Z]|'|-)",
        }.get(beside, rf"{start}{form}(?![\w'-]| [A-Z\d])")
    )
