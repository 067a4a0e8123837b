"""Cases of interventions: their files, and their tokens."""

import json

import pytest

from prismlm.errors import InputError
from prismlm.probes.channels.case_files import Case, case_sets, load_cases, probe_of


def test_the_bundled_sets():
    assert case_sets() == ("covid", "men", "mental_health", "new_zealand", "women")
    contexts = []
    for name in case_sets():
        cases = load_cases(name)
        assert 12 <= len(cases) <= 20
        assert len({case.concept for case in cases}) == 1
        for case in cases:
            # The loader joins by one space, and Table 6's contexts end before the target.
            assert case.context == case.context.strip()
            assert case.target.isalpha()
        contexts += [case.context for case in cases]
    assert len(set(contexts)) == len(contexts)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.jsonl"
    row = {"concept": "river", "context": "The river carries", "target": "stones"}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"context": "Old"}) + "\n")
    assert load_cases(path) == (
        Case("river", "The river carries", "stones"),
        Case("river", "Old", "stones"),
    )
    # JSON may have it inside a text as it is.
    apart = row | {"context": "The river\u2028carries"}
    path.write_text(json.dumps(apart, ensure_ascii=False), encoding="utf-8")
    assert load_cases(path) == (Case(**apart),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"concept": "a", "context": "b"}', "line 2: expected a JSON object with concept"),
        ('{"concept": "a", "context": " ", "target": "c"}', "line 2: 'context' is ' '"),
        ('{"concept": "a", "context": "\\ud800", "target": "c"}', "'context' holds half of a"),
        ("[1]", "found a list"),
        ("concept", "line 2: not a JSON object"),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text('{"concept": "a", "context": "b", "target": "c"}\n' + f"{line}\n")
    with pytest.raises(InputError, match=message):
        load_cases(path)
    with pytest.raises(InputError, match=r"bundled sets covid, men.*Did you mean 'women'"):
        load_cases("woman")


def test_targets_in_tokens(tokenizer):
    whole = tokenizer("The river carries stones", add_special_tokens=False)["input_ids"]
    pieces = tokenizer.tokenize(" stones")
    context = "The river carries "
    if len(pieces) == 1:
        found = probe_of(tokenizer, Case("c", context, " stones"))
        assert (*found.ids, found.target_id) == tuple(whole)
        assert found.context == "The river carries"
    case = Case("c", context, "zebras")
    pieces = [tokenizer.decode([i]) for i in tokenizer(" zebras")["input_ids"]]
    assert len(pieces) > 1
    with pytest.raises(InputError, match=f"is {len(pieces)} tokens, ' '?") as error:
        probe_of(tokenizer, case)
    assert ", ".join(map(repr, pieces)) in str(error.value)
    assert "'The river carries'" in str(error.value)
    first = probe_of(tokenizer, case, first_token=True)
    assert first.target_id == tokenizer(" zebras")["input_ids"][0]
    shown = pieces[0].strip() or "␣"
    assert (first.target, first.measured) == ("zebras", shown)
    assert first.label == f"{shown}… of zebras"
