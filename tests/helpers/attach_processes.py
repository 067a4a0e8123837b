"""Two processes that attach heads: python attach_processes.py DIR does the jobs of jobs.pickle."""

import pickle
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from prismlm.training import attach, parallel
from tests.helpers.two_processes import fork


def main(directory):
    torch.set_num_threads(1)
    parallel.join()
    for arguments in pickle.loads((directory / "jobs.pickle").read_bytes()):
        attach(*arguments)


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), main))
