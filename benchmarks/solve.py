"""The closed form against thin SVDs, a bank against separate solves, and memory against the number of probes.

    python benchmarks/solve.py [--json FILE]

At the size of the paper's largest task: n = 11,910 probes, m = 397 prompts, d = 768. About two minutes on two cores.
All figures are ratios taken in one run.
"""

from __future__ import annotations

import json

import torch
from _figures import arguments, child, peak_mebibytes, ratio, report, seconds
from torch import Tensor
from torch.nn.functional import normalize

from hf_platonic.solve import PROBE_RIDGE, PROMPT_RIDGE, GridSolver, ProbeSums, closed_form

N, M, D, TASKS = 11_910, 397, 768, 48


def thin_svds(design: Tensor, prompts: Tensor, delta: Tensor) -> Tensor:
    """The paper's route to the same operator, in float64."""
    design, prompts, delta = design.double(), prompts.double(), delta.double()
    uf, sf, vf = torch.linalg.svd(design, full_matrices=False)
    ug, sg, vg = torch.linalg.svd(prompts.T, full_matrices=False)
    filter_f = sf / (sf**2 + PROBE_RIDGE * (sf**2).mean())
    filter_g = sg / (sg**2 + PROMPT_RIDGE * (sg**2).mean())
    return ((vf.T * filter_f) @ (uf.T @ delta @ vg.T) @ (ug * filter_g).T).double()


def streamed_peak(n: int) -> float:
    """Peak memory of a process that streams n made-up probes through the sums and solves."""
    generator = torch.Generator().manual_seed(0)
    prompts = normalize(torch.randn(40, 256, generator=generator), dim=-1)
    sums = ProbeSums.zeros(256, 40)
    for _ in range(0, n, 1000):
        rows = normalize(torch.randn(1000, 256, generator=generator), dim=-1)
        sums.update(rows, [torch.randn(1000, 40, generator=generator)])
    GridSolver.from_sums(sums, prompts).solve_cross(sums.cross)
    return peak_mebibytes()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streamed", type=int, help="only stream this many probes and print the peak memory")
    options = parser.parse_args()
    if options.streamed:
        print(json.dumps({"mebibytes": streamed_peak(options.streamed)}))
        return
    generator = torch.Generator().manual_seed(0)
    design = normalize(torch.randn(N, D, generator=generator), dim=-1)
    prompts = normalize(torch.randn(M, D, generator=generator), dim=-1)
    delta = 0.01 * torch.randn(N, M, generator=generator)

    left, right = closed_form(design, prompts, delta)
    oracle = thin_svds(design, prompts, delta)

    def together() -> None:
        GridSolver.of(design, prompts).solve([delta] * TASKS, design)

    def separately() -> None:
        for _ in range(TASKS):
            closed_form(design, prompts, delta)

    figures = {
        "relative_difference_to_thin_svds": float((left @ right - oracle).norm() / oracle.norm()),
        "speedup_over_thin_svds": ratio(
            lambda: thin_svds(design, prompts, delta), lambda: closed_form(design, prompts, delta), rounds=3
        ),
        "bank_of_48_over_48_solves": seconds(together) / seconds(separately),
        "peak_memory_200k_over_20k_probes": child("--streamed", "200000")["mebibytes"]
        / child("--streamed", "20000")["mebibytes"],
    }
    report(figures, options.json)


if __name__ == "__main__":
    main()
