"""Work that is stopped on the way: when it has reported so much progress, or written something."""

import os
import signal
import time

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
