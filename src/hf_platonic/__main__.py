"""`python -m hf_platonic`, the same as `hf-platonic`; what `torchrun -m` and `accelerate launch -m` start."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
