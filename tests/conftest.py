"""One thread a process, here and in the processes that tests start: the models are too small to gain from more."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

if importlib.util.find_spec("torchvision") is not None:  # open_clip's; nothing else here needs it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about compiled parts that couldn't be loaded
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            # The package index has torchvision for Linux with CUDA only. Beside a CPU build of torch its operators
            # aren't there, and it stops at import since it wants to describe two of them, which no test uses.
            import torch

            operators = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            importlib.import_module("torchvision")
