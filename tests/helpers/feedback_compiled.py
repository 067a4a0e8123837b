"""The column of compiled models of the matrix of uncertainty feedback, in a process of its own.

The run-time type checks of the test run cannot be traced. python feedback_compiled.py FILE BACKEND
NAME… writes JSON: of each of these families how many breaks its graphs have, or the error that
ended it.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.feedback_calls import Fed, gradients, same


def compiled(model):
    """Return the model compiled; nothing of what was compiled before is left."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend=sys.argv[2])


def breaks():
    return sum(counters["graph_break"].values())


def training(fed, run):
    """Return logits, codes and gradients of a step of two passes."""
    fed.run = run
    fed.model.train()
    fed.model.zero_grad()
    ids = fed.rows(2)
    output = fed.call(ids, labels=ids)
    output.loss.backward()
    return output.logits.detach(), output.uncertainty_codes, gradients(fed.model)


@torch.no_grad()
def decoding(fed, run):
    """Return logits and codes of a prompt and of the token after it."""
    fed.run = run
    fed.model.eval()
    ids = fed.rows(2)
    prompt = fed.call(ids[:, :-1], use_cache=True)
    last = fed.call(ids[:, -1:], cache=prompt[fed.cache])
    outputs = (prompt, last)
    return [one.logits for one in outputs], [one.uncertainty_codes for one in outputs]


def compare(name):
    """Compare a family's compiled model with the eager one; return the breaks of each call."""
    found = {}
    for what, passes in ((training, 2), (decoding, 1)):
        # One layer: tracing time grows with them, and they are alike.
        fed = Fed(name, layers=1, passes=passes)
        expected = what(fed, fed.model)
        same(what(fed, compiled(fed.model)), expected)
        found[what.__name__] = breaks()
    if found["training"]:
        found["training without feedback"] = plain_breaks(name)
    return found


def plain_breaks(name):
    """Return how often a step of the family's own model breaks its graph."""
    fed = Fed(name, layers=1)
    fed.feedback.detach()
    fed.model.train()
    fed.run = compiled(fed.model)
    ids = fed.rows(2)
    fed.call(ids, labels=ids).loss.backward()
    return breaks()


def refuses_what_is_no_number():
    """In a graph nobody looks at values, so that the assertion in it has to stop the call."""
    fed = Fed("llama", layers=1)
    with torch.no_grad():
        fed.model.lm_head.weight[3] = torch.nan
    try:
        decoding(fed, compiled(fed.model))
    except RuntimeError as error:
        return str(error)
    return "no error"


def main(path, names):
    """Do these families; what is done is in the file although a later one takes too long."""
    torch.set_num_threads(1)
    results = {"not a number": refuses_what_is_no_number()}
    for name in names:
        try:
            results[name] = compare(name)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3:])
