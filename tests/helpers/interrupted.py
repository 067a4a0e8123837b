"""Work that is stopped: at so much progress, once something is written, or by a full disk."""

import os
import resource
import signal
import sys
import time
from contextlib import contextmanager

from prismlm.progress import Reporter


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class InterruptAfter(Reporter):
    """A reporter that presses Ctrl-C, or does something else, at so many advances.

    They are of any work, or of that of one description.
    """

    def __init__(self, advances, act=press_ctrl_c, work=None):
        self.left, self.act, self.work, self.counts = advances, act, work, True

    def task(self, description, total=None, unit="tokens"):
        self.counts = self.work in (None, description)
        return super().task(description, total, unit)

    def advance(self, amount=1):
        self.left -= self.counts
        if self.counts and self.left == 0:
            self.act()


def limit_files(size: int) -> None:
    """Let no file grow beyond ``size`` bytes; modules first imported then leave no cut bytecode."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def limit_lifted_after():
    """Undo on leaving what ``limit_files`` set inside."""
    limits, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = bytecode
