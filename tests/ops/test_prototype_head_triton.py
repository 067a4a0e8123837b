"""The Triton kernel against naive, in Triton's interpreter on CPU tensors; no GPU is needed.

Triton does not come with the CPU build of torch; the dev extra brings it on Linux x86_64, or
``pip install triton``. Triton 3.6's interpreter needs numpy < 2.4, that of 3.9 does not. Then

    pytest tests/ops/test_prototype_head_triton.py

The interpreter's bf16 products are wrong, so only float32 is compared. Run as a script, this file
is the interpreted process itself: the variable must be set before Triton is imported.
"""

import os
import subprocess
import sys

import pytest
import torch

from prismlm.ops.prototype_head import naive
from prismlm.ops.prototype_head.exact import SPARE, settle


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton", reason="see the head of this file for how to run it")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "9 cases equal\n"


def cases():
    """Yield z, prototypes, k and mask: shapes beside the block sizes, ties, zeros and masks."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    yield normal(5, 3), normal(7, 3), 2, None
    yield normal(64, 32), normal(128, 32), 4, None
    yield normal(130, 40), normal(300, 40), 16, torch.rand(130, generator=generator) > 0.3
    yield normal(20, 16), normal(20, 16).repeat(15, 1), 5, None
    yield normal(1, 24) + 1e-7 * normal(70, 24), normal(140, 24), 3, None
    yield normal(1, 24) + 1e-7 * normal(40, 24), normal(140, 24), 3, None
    yield normal(9, 4), normal(6, 4), 6, torch.zeros(9, dtype=torch.bool)
    yield torch.cat([normal(3, 8), torch.zeros(2, 8)]), normal(130, 8) * 0, 3, None
    yield normal(0, 8), normal(4, 8), 2, None


def main() -> None:
    """Compare every field of the search."""
    from prismlm.ops.prototype_head import triton_kernel

    done = 0
    for z, prototypes, k, mask in cases():
        spread = min(k + SPARE, len(prototypes))
        assert triton_kernel.supports(z, spread)
        found = triton_kernel.scan(z, prototypes, spread, mask)
        actual = settle(found, z, prototypes, k, mask)
        expected = naive.route(z, prototypes, k, 1.0, mask)
        if len(z):
            assert torch.equal(actual.nearest_point, expected.nearest_point), done
        assert torch.equal(actual.indices, expected.indices), done
        torch.testing.assert_close(actual.cosines, expected.cosines, atol=1e-6, rtol=0)
        torch.testing.assert_close(
            actual.nearest_point_cosine, expected.nearest_point_cosine, atol=1e-6, rtol=0
        )
        done += 1
    sys.stdout.write(f"{done} cases equal\n")


if __name__ == "__main__":
    main()
