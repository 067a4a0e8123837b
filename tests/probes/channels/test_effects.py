"""Cases as tokens; effects against one forward pass for each cell; exact tests over cases."""

import itertools
import json
import statistics

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from prismlm.errors import InputError
from prismlm.interventions.channels import MaskRead, MaskWrite, Reinitialise, intervene
from prismlm.probes.channels import effects
from prismlm.probes.channels.activations import Activations
from tests.helpers.mixer_models import PLACE as PLANTED
from tests.helpers.mixer_models import make_model, planted_model, tokens, words_by_tokens
from tests.helpers.small_tokenizers import metaspace
from tests.probes.conftest import LENGTH, read_alone


def test_the_bundled_sets_and_a_file_of_ones_own(tmp_path):
    for name in ("covid", "men", "mental_health", "new_zealand", "women"):
        assert len({case.context for case in effects.load_cases(name)}) >= 12
    path = tmp_path / "own.jsonl"
    row = {"concept": "river", "context": "The river carries", "target": "stones"}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row | {"context": "Old"}) + "\n")
    assert effects.load_cases(path) == (effects.Case(**row), effects.Case("river", "Old", "stones"))


@pytest.mark.parametrize(
    "line", ['{"concept": "a", "context": "b"}', '{"concept": "a", "context": " ", "target": "c"}']
)
def test_a_line_that_is_no_case_is_named(tmp_path, line):
    path = tmp_path / "own.jsonl"
    path.write_text('{"concept": "a", "context": "b", "target": "c"}\n' + f"{line}\n")
    with pytest.raises(InputError, match=r"row 2 of .*own.jsonl.*expected lines of JSON"):
        effects.load_cases(path)
    with pytest.raises(InputError, match=r"bundled sets covid, men.*Did you mean 'women'"):
        effects.load_cases("woman")
    for content, message in ((b"\n", "holds no cases"), (b'{"concept": "caf\xe9"}', "utf-8")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            effects.load_cases(path)


def test_targets_in_tokens(tokenizer):
    case = effects.Case("c", "The river carries ", "zebras")
    ids = tokenizer(" zebras")["input_ids"]
    pieces = [tokenizer.decode([token]) for token in ids]
    with pytest.raises(InputError, match=f"is {len(pieces)} tokens, ' '?") as error:
        effects.probe_of(tokenizer, case)
    assert ", ".join(map(repr, pieces)) in str(error.value)
    first = effects.probe_of(tokenizer, case, first_token=True)
    context = tokenizer("The river carries", add_special_tokens=False)["input_ids"]
    assert (*first.ids, first.target_id) == (*context, ids[0])
    assert first.target == f"{pieces[0].strip() or '␣'}… of zebras"


LENGTHS = (7, 3, 12, 7, 12, 1, 12, 3)
PLACE = (1, 2)


def probes():
    result = []
    for i, length in enumerate(LENGTHS):
        ids = tokens(length + 1, seed=i).tolist()
        result.append(effects.Probe("c", f"context {i}", f"w{i}", tuple(ids[:-1]), ids[-1]))
    return result


@pytest.fixture(scope="module")
def sharp_model():
    # Sharp gates: one channel is not like the other.
    # In float64: float32 sums differ from processor to processor, and deviations with them.
    model = make_model(num_hidden_layers=2).double()
    for block in model.model.layers:
        block.mixer.prototypes.mul_(4)
    return model


def alone(model, probe):
    logits = model(torch.tensor([probe.ids]), use_cache=False).logits[0, -1]
    return logits.double().softmax(-1)[probe.target_id].item()


def test_probabilities_are_those_of_each_context_alone(sharp_model, monkeypatch):
    expected = [alone(sharp_model, probe) for probe in probes()]
    for tokens_per_batch in (1, 24, 4096):
        monkeypatch.setattr("prismlm.models.seam.BATCH_TOKENS", tokens_per_batch)
        result = effects.target_probabilities(sharp_model, probes())
        assert result.tolist() == pytest.approx(expected, rel=1e-4)


def test_every_cell_is_one_forward_pass(sharp_model):
    # Two of the cases are left out.
    least = effects.target_probabilities(sharp_model, probes()).sort().values[2].item()
    settings = {"controls": 3, "minimum_probability": least, "seed": 7}
    report = effects.effects_on(sharp_model, probes(), [PLACE], **settings)
    assert report.facts == {"cases": len(LENGTHS) - 2, "left_out_cases": 2}
    table = report["L1 P2"]
    assert len(table.rows) == len(LENGTHS) - 2
    controls = effects.draw_controls(sharp_model, PLACE, 3, 7)
    assert table["controls"] == [f"L1 P{k}" for _, k in controls]
    made = {
        "random": [Reinitialise(*PLACE, seed) for seed in (7, 8, 9)],
        "mask": [MaskWrite(*PLACE)],
        "write −∞": [MaskWrite(*PLACE, renormalise=True)],
        "read −∞": [MaskRead(*PLACE, renormalise=True)],
    }
    contexts = [row["context"] for row in table.rows]
    chosen = [probe for probe in probes() if probe.context in contexts]
    for row, probe in zip(table.rows, chosen, strict=True):
        assert row["context"] == probe.context
        base = alone(sharp_model, probe)
        assert row["base"] == pytest.approx(base, rel=1e-4)
        for name, interventions in made.items():
            after = []
            for intervention in interventions:
                with intervene(sharp_model, intervention):
                    after.append(alone(sharp_model, probe))
            expected = 100 * (statistics.mean(after) / base - 1)
            assert row[name] == pytest.approx(expected, rel=1e-2, abs=1e-2)
    # A summary is of the cells and of the controls.
    (mask,) = (row for row in report["summary"].rows if row["intervention"] == "mask_write")
    cells = [row["mask"] for row in table.rows]
    assert mask["median_relative"] == pytest.approx(statistics.median(cells))
    before = effects.target_probabilities(sharp_model, chosen)
    sizes = []
    for control in controls:
        with intervene(sharp_model, MaskWrite(*control)):
            changes = 100 * (effects.target_probabilities(sharp_model, chosen) / before - 1)
        sizes.append(statistics.median(changes.abs().tolist()))
    assert mask["control_sizes"] == pytest.approx(sizes)


def test_summaries_by_hand():
    # Two cases, one channel, two controls.
    row = effects.effect_of(np.array([-50.0, 50.0]), np.array([[-5.0, 0.0], [10.0, -37.5]]))
    expected = {"cases": 2, "median_relative": 0, "low": None, "high": None, "median_size": 50}
    expected |= {"control_sizes": [2.5, 23.75], "largest_control": 23.75, "rank": 1}
    # The largest of three in both cases: one of the nine ways to rank them.
    assert row == expected | {"p_size": pytest.approx(1 / 9), "beats_controls": False}


def test_controls_are_drawn_by_seed_and_place(sharp_model):
    drawn = effects.draw_controls(sharp_model, PLACE, 4, 3)
    assert drawn == effects.draw_controls(sharp_model, PLACE, 4, 3)
    drawn = [effects.draw_controls(sharp_model, PLACE, 3, seed, [(1, 0)]) for seed in range(20)]
    assert {c for controls in drawn for c in controls} == {(1, k) for k in (1, 3, 4, 5)}
    with pytest.raises(InputError, match=r"6 control channels.*1 to 5"):
        effects.draw_controls(sharp_model, PLACE, 6, 0)
    with pytest.raises(InputError, match=r"none of 8 cases.*the highest is"):
        effects.effects_on(sharp_model, probes(), [PLACE], minimum_probability=0.9)


@pytest.mark.parametrize(("ranks", "others"), [([2, 1, 2], 2), ([0.5, 3, 1], 3), ([0, 0], 4)])
def test_the_rank_sum_is_that_of_every_way_to_rank(ranks, others):
    ways = [sum(way) for way in itertools.product(range(others + 1), repeat=len(ranks))]
    expected = sum(way >= sum(ranks) for way in ways) / len(ways)
    assert effects.rank_sum_p(ranks, others) == pytest.approx(expected)


# -- channels of concepts


def read_of(*rows):
    """A text of these rows of tokens, of which nothing was read."""
    lengths = torch.tensor([len(row) for row in rows])
    return Activations(
        torch.tensor([token for row in rows for token in row]), lengths, lengths, lengths, {}
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_words_are_found_where_a_decoder_drops_the_space_before_them(legacy):
    text = "the girl and the girls saw a girl"
    tokenizer = metaspace([text], legacy=legacy)
    ids = tokenizer(text)["input_ids"]
    forms, continues = effects.word_forms(tokenizer, ["girl"]), effects.continues_word(tokenizer)
    ends = effects.word_ends(tokenizer, forms, read_of(ids))["girl"].tolist()
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert ends == [
        i for i, token in enumerate(tokens) if token == "▁girl" and tokens[i + 1 : i + 2] != ["s"]
    ]
    assert len(ends) == 2
    whole = effects.whole_words(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        assert whole[number] == (token[:1] == "▁" and token[1:].isalpha() and len(token) > 3)
        assert continues[number] == token[:1].isalnum()


def test_a_word_ends_where_no_letter_follows():
    pieces = (" girl", "s", " Girl", "a b", ".", " x")
    known = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(known, [], ignore_merges=True))
    backend.decoder = decoders.Fuse()
    letters = PreTrainedTokenizerFast(tokenizer_object=backend)
    forms = effects.word_forms(letters, ["girl"])
    assert forms == {"girl": ((0,), (2,))}
    # What two words have in common is the first one's.
    assert effects.word_forms(letters, ["girl", "Girl"]) == forms
    assert effects.word_forms(letters, ["Girl", "girl"]) == {"Girl": ((2,),), "girl": ((0,),)}
    continues = effects.continues_word(letters)
    assert continues.tolist() == [False, True, False, True, False, False]
    assert effects.whole_words(letters).tolist() == [True, False, True, False, False, False]
    # After the end of a sequence another begins, whatever token that is.
    read = read_of([0, 1, 0, 4, 2], [0, 5, 2], [1, 0])
    assert effects.word_ends(letters, forms, read)["girl"].tolist() == [2, 4, 5, 7, 9]
    # A word of several tokens ends at the last, within one sequence.
    read = read_of([0, 1, 0, 4], [0], [1, 0, 1])
    assert effects.word_ends(letters, {"girls": ((0, 1),)}, read)["girls"].tolist() == [1, 7]


def test_the_channel_of_a_word_is_found(corpus, sequences):
    word, other = words_by_tokens(corpus)[0][:2]
    planted = planted_model(corpus, word)

    def found(word, **settings):
        how = {"shuffles": 99, "min_occurrences": 5, "count": 99} | settings
        return effects.find_channels(planted, corpus.tokenizer, [word], sequences, **how)

    result = found(word)
    best = result.rows[0]
    assert (best["layer"], best["channel"]) == PLANTED
    token = corpus.tokenizer(f" {word}")["input_ids"][0]
    *_, rows, gates = zip(*read_alone(corpus, planted, LENGTH), strict=True)
    ids = torch.cat(rows)
    write = torch.cat([layers[0].write[0] for layers in gates])[:, PLANTED[1]].double()
    # All of these words stand after a space and before another word.
    expected = (write[ids == token].mean() - write.mean()) / write.std(correction=0)
    assert best["difference"] == pytest.approx(expected.item(), rel=1e-4)
    assert best["at_words"] == pytest.approx(write[ids == token].mean().item(), rel=1e-4)
    assert best["mean"] == pytest.approx(write.mean().item(), rel=1e-4)
    assert result["words"] == {word: int((ids == token).sum())}
    ranked = [row["difference"] for row in result.rows]
    assert ranked == sorted(ranked, reverse=True)
    # A gate that never varies does not stand out at any word.
    assert {row["difference"] for row in result.rows if row["layer"] == 1} == {0}
    assert result["p"] == 0.01
    assert result["shuffled_mean"] < best["difference"]
    # A word that no channel was made for does not stand out among words.
    assert found(other)["p"] > 0.01
    with pytest.raises(InputError, match=r"occur \d+ times in .* expected at least 100000"):
        found(word, min_occurrences=100000)
