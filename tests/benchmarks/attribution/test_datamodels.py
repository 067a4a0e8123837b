from benchmarks.attribution.datamodels import named, tried_choices
from benchmarks.attribution.methods.evidence import Choices


def test_every_choice_has_a_name_of_its_own():
    tried = tried_choices()
    assert len({named(choices) for choices in tried}) == len(set(tried)) == len(tried)
    assert named(Choices(0.1, 0.5, cells=None)) == "evidence T=0.1 cells=all doubt=0.5"
    assert named(Choices(0.2, whitening=0.5, signed=True, spread="weighed")) == (
        "evidence T=0.2 cells=16 whitened=0.5 weighed signed"
    )
