import pytest
import torch

from prismlm.eval.glue.fine_tune import Classifier, GlueModel, encode
from prismlm.eval.glue.tasks import tasks_of
from tests.helpers.glue_rows import CONFIGS, WORDS, save_glue_model, words_tokenizer

(SST2,) = tasks_of(["sst2"])
ROWS = [[5, 6, 0], [7, 8, 9, 10, 11, 12, 13, 0], [2, 0], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0]]


def read(rows):
    return [[WORDS[token] for token in row] for row in rows]


def test_one_sentence_or_two_and_what_is_cut():
    tokenizer = words_tokenizer()
    rows, cut = encode(tokenizer, [("a b",), ("c",)], 512)
    assert read(rows) == [["a", "b", "<eos>"], ["c", "<eos>"]]
    assert cut == 0
    pairs = [("a b c d e f", "g h"), ("a", "g h i j k l"), ("a b c d", "e f g h"), ("a", "b")]
    rows, cut = encode(tokenizer, pairs, 7)
    assert read(rows) == [
        ["a", "b", "c", "<eos>", "g", "h", "<eos>"],
        ["a", "<eos>", "g", "h", "i", "j", "<eos>"],
        ["a", "b", "c", "<eos>", "e", "f", "<eos>"],
        ["a", "<eos>", "b", "<eos>"],
    ]
    assert cut == 3


def test_a_bos_that_a_tokenizer_sets_is_set_once():
    from tokenizers.processors import TemplateProcessing

    tokenizer = words_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", number)]
    )
    rows, _ = encode(tokenizer, [("a", "b")], 512)
    assert rows == [[number, WORDS.index("a"), 0, WORDS.index("b"), 0]]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_batch_gives_what_single_rows_give(tmp_path, family):
    lm = GlueModel(save_glue_model(tmp_path / family, family))
    classifier = lm.classifier(SST2, 0).eval()
    classifier.bf16 = False
    torch.nn.init.normal_(classifier.out.weight)
    with torch.no_grad():
        together = classifier(ROWS)
        alone = torch.cat([classifier([row]) for row in ROWS])
        assert torch.allclose(together, alone, atol=1e-5)
        # The last layer reads the state that the next token is predicted from.
        logits = lm.model(input_ids=torch.tensor([ROWS[0]])).logits[0, -1]
        weight = lm.model.get_output_embeddings().weight
        classifier.out.weight.copy_(weight[:2])
        assert torch.allclose(classifier(ROWS[:1])[0], logits[:2], atol=1e-4)
    assert torch.allclose(torch.tensor(classifier.predict(ROWS)), classifier(ROWS), atol=1e-5)
    # Every weight but the output embedding's is trained.
    classifier(ROWS).sum().backward()
    idle = [name for name, p in lm.model.named_parameters() if p.grad is None]
    assert set(idle) <= {"lm_head.weight"}


def test_every_run_begins_with_the_same_weights(tmp_path):
    lm = GlueModel(save_glue_model(tmp_path))
    before = lm.classifier(SST2, 0).state_dict()
    before = {name: value.clone() for name, value in before.items()}
    for parameter in lm.model.parameters():
        parameter.data += 1
    again = lm.classifier(SST2, 0)
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())
    assert not torch.equal(lm.classifier(SST2, 1).out.weight, before["out.weight"])
    fresh = lm.classifier(SST2, 0, from_scratch=True).state_dict()
    assert fresh.keys() == before.keys()
    assert not torch.equal(fresh["model.model.embed_tokens.weight"], before["model.lm_head.weight"])
    assert isinstance(again, Classifier)


def test_no_more_is_read_than_positions_are_learned(tmp_path):
    assert GlueModel(save_glue_model(tmp_path / "a", "gpt2")).length == 64
    assert GlueModel(save_glue_model(tmp_path / "b", "protot")).length == 512
