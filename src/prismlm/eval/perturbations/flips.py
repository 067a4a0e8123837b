"""Interventions: changes of a sentence after which it says something else."""

from __future__ import annotations

import random
import re
from functools import cache

from prismlm.eval.perturbations.lexical import ENDS, PREPOSITIONS
from prismlm.eval.perturbations.word_lists import Change, any_of, cased, words

SWAPPED = {
    one: other
    for pair in (
        "he she,himself herself,man woman,men women,boy girl,boys girls,father mother,son daughter,"
        "fathers mothers,sons daughters,brother sister,brothers sisters,husband wife,uncle aunt,"
        "husbands wives,nephew niece,actor actress,sir madam,gentleman lady,gentlemen ladies,dad mom,"
        "grandfather grandmother,boyfriend girlfriend,male female,males females,prince princess,"
        "king queen,waiter waitress,businessman businesswoman,spokesman spokeswoman,Mr. Ms."
    ).split(",")
    for one, other in (pair.split(), pair.split()[::-1])
} | {"Mrs.": "Mr.", "Miss": "Mr.", "his": "her", "him": "her", "hers": "his", "her": "his"}
GENDERED = re.compile(rf"(?<![\w'-])(?i:{any_of(list(SWAPPED))})(?![\w-])(?! (?!.)[A-Z])")
# After "her" these begin something else, so that it was an object.
AFTER_OBJECT = re.compile(
    rf"[.,;!?]|$| (?:{any_of(PREPOSITIONS)}|and|or|but|that|a|an|the|as|if|when|how|what|because|up"
    r"|out|off|down|again|so|more|not|is|was|will|all|there|here|some|any|every|very|too|back|away"
    r"|alone|yesterday|today|tomorrow|now|then|\w+ly|i|you|he|she|it|we|they|my|your|his|their)\b",
    re.IGNORECASE,
)
# Of these verbs either may follow: told her stories, told her to go.
GIVING = re.compile(r"\b(tell|told|give|gave|given|ask|asked|let|make|made|help|helped|see|saw|show"
                    r"|showed|offer|offered|send|sent|buy|bought|call|called|hear|heard|watch|got)\W*$")  # fmt: skip
HELPING = "is|are|was|were|will|would|can|could|should|must|does|do|did|has|have|had|am"
INSERTED = re.compile(
    r"(?:(?<=\b[a-z] )|(?<=[a-z]{2} )|(?<=\bI ))"
    r"(?:(?P<be>is|are|was|were|am|will|would|can|could|should)(?= [a-z])(?! (?:to|had|have)\b)"
    r"|(?P<have>has|have|had)(?= (?:been|\w+ed|become|taken|made|gone|seen|come|done|begun)\b))"
)
REMOVED = re.compile(rf"\b(?i:(?P<help>{HELPING}) not|(?P<short>{HELPING[:-3]})n't|(?P<can>can't|cannot)"
                     r"|(?P<will>won't))(?= [a-z])(?! (?:only|just|i|you|he|she|it|we|they)\b)")  # fmt: skip
NEGATIVE = re.compile(
    r"\b(no|not|never|nothing|nobody|none|neither|nor|hardly|cannot|without|any\w*|yet|either|ever"
    r"|at all|until|unless|much|only|also|too|still|already|some\w*|few|little|whether)\b|n't",
    re.IGNORECASE,
)
COUNTS = "two three four five six seven eight nine ten twelve".split()
NUMBER = re.compile(rf"(?<![\w.,$:'-])(?:{any_of(COUNTS)}|[2-9]\d?)(?= [a-z]+s\b)(?! (?:and|th)\b)")
AGREEMENT = {"is": "are", "was": "were", "has": "have", "does": "do"}
ONE_OF_MANY = {"this": "these", "these": "this", "a": "two", "an": "two", "several": "one", "many": "one"}
# What a noun is said to be, or is compared with, has the number of something else.
PREDICATE = re.compile(
    r"\b(is|are|was|were|be|been|being|am|become|becomes|became|such|what|quite|half|once|times|as|"
    r"like|not|of|per|remain\w*|how|too|so|[a-z]+'[a-z]+)$",
    re.IGNORECASE,
)


def gender(sentence: str, draw: random.Random) -> Change | None:
    """Swap the gender of every pronoun, noun and form of address; names stay as they are."""
    found = [
        word
        for word in GENDERED.finditer(sentence)
        # "King" before a name is part of it.
        if word[0] in SWAPPED or (word[0].lower() in SWAPPED and not word.start())
    ]
    text = sentence
    for word in reversed(found):
        key = word[0] if word[0] in SWAPPED else word[0].lower()
        rest, other = sentence[word.end() :], SWAPPED[key]
        if key == "her" and AFTER_OBJECT.match(rest):
            other = "him"
        elif key == "her" and GIVING.search(sentence[: word.start()]):
            return None
        elif key == "his" and re.match(r"[.,;!?]| (?:and|or|but)\b", rest):
            other = "hers"
        text = text[: word.start()] + cased(other, word[0]) + text[word.end() :]
    return Change(text, found[0][0].lower()) if found else None


def negation(sentence: str, draw: random.Random) -> Change | None:
    """Say that it is not so, after the first auxiliary, or leave its "not" out."""
    rest = sentence
    removed = REMOVED.search(sentence)
    if removed:
        rest = sentence[: removed.start()] + sentence[removed.end() :]
    if sentence.endswith("?") or NEGATIVE.search(rest):
        return None
    if removed:
        form = removed["help"] or removed["short"] or ("can" if removed["can"] else "will")
        text = sentence[: removed.start()] + cased(form, removed[0]) + sentence[removed.end() :]
        return Change(text, f"without {removed[0].lower()}")
    inserted = INSERTED.search(sentence)
    if not inserted:
        return None
    form = "cannot" if inserted[0] == "can" else f"{inserted[0]} not"
    text = sentence[: inserted.start()] + form + sentence[inserted.end() :]
    return Change(text, form)


def number(sentence: str, draw: random.Random) -> Change | None:
    """Make one of several or several of one, with the verb that follows; or change a number."""
    changes = [change for word in NUMBER.finditer(sentence) if (change := _other(sentence, word, draw))]
    changes += [change for word in _counted().finditer(sentence) if (change := _many(sentence, word))]
    return draw.choice(changes) if changes else None


def _other(sentence: str, word: re.Match[str], draw: random.Random) -> Change:
    if word[0].isdecimal():
        same = range(2, 10) if len(word[0]) == 1 else range(10, 100)
        other = str(draw.choice([count for count in same if str(count) != word[0]]))
    else:
        other = draw.choice([count for count in COUNTS if count != word[0]])
    return Change(sentence[: word.start()] + other + sentence[word.end() :], "digits" if word[0].isdecimal() else word[0])


@cache
def _counted() -> re.Pattern[str]:
    one, many = (any_of(list(part)) for part in (words().plurals, words().plurals.values()))
    verbs = any_of([*AGREEMENT, *AGREEMENT.values()])
    return re.compile(
        rf"(?P<before>[\w']+,? )?\b(?:(?P<one>[Tt]his|[Aa]n?) (?P<noun>{one})"
        rf"|(?P<many>[Tt]hese|[Ss]everal|[Mm]any) (?P<nouns>{many}))"
        rf"(?:(?= (?P<verb>{verbs}) )|{ENDS})"
    )


def _many(sentence: str, word: re.Match[str]) -> Change | None:
    plurals = words().plurals
    before = (word["before"] or "").strip()
    if PREDICATE.search(before) or (word["verb"] and before.lower() in PREPOSITIONS):
        return None
    count, noun = word["one"] or word["many"], word["noun"] or word["nouns"]
    other = plurals.get(noun) if word["one"] else {v: k for k, v in plurals.items()}[noun]
    start, end = word.start("one" if word["one"] else "many"), word.end("noun" if word["one"] else "nouns")
    text = f"{sentence[:start]}{cased(ONE_OF_MANY[count.lower()], count)} {other}"
    verb = word["verb"] or ""
    agreed = AGREEMENT if word["one"] else {v: k for k, v in AGREEMENT.items()}
    if verb and verb not in agreed:
        return None
    return Change(text + (f" {agreed[verb]}" if verb else "") + sentence[end + len(verb) + bool(verb) :], count.lower())
