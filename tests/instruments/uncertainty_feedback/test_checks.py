"""Which checks some texts allow, and what they take."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback import (
    InspectOptions,
    Sample,
)
from prismlm.instruments.uncertainty_feedback.checks import checks_for
from tests.helpers.feedback_models import make_fed_gpt2, random_texts


def test_texts_that_do_not_do_are_named():
    model, _ = make_fed_gpt2()
    few = Sample("few", tuple(random_texts(20, 20, 20)))
    with pytest.raises(InputError, match=r"ablation needs at least 4 texts .* few has 3"):
        checks_for(model, few, ["ablation"])
    with pytest.raises(InputError, match="no check can be done"):
        checks_for(model, few)
    some = Sample("some", tuple(random_texts(20, 20, 20, 20, 6)))
    planned, left_out = checks_for(model, some)
    assert planned == ("ablation", "prefill", "hedging", "mistakes")
    assert "needs at least 8 texts of at least 10 tokens" in left_out["attention"]
    # 16 tokens and 48 more of 64 fit; the model has just as many.
    assert checks_for(model, some, ["hedging"])[0] == ("hedging",)
    with pytest.raises(InputError, match="expected 1 to 7"):
        checks_for(model, some, ["hedging"], InspectOptions(tokens=8, window=8))
    with pytest.raises(InputError, match=r"a check is 'ablatoin'"):
        checks_for(model, some, ["ablatoin"])
    with pytest.raises(InputError, match="hold token 99 and the model has 37"):
        checks_for(model, Sample("other", (torch.tensor([1, 99, 3]),)))
    with pytest.raises(InputError, match="learned an embedding of 64"):
        checks_for(model, Sample("long", tuple(random_texts(70))))
