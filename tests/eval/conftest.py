import logging

import pytest


@pytest.fixture(autouse=True, scope="module")
def quiet_lm_eval():
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    yield
    logging.getLogger("lm_eval").setLevel(logging.NOTSET)
