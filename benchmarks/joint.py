"""The joint solve at full size, eight terms and controls at d = 1,152: seconds, steps and residual.

    python benchmarks/joint.py [--json FILE]

Made-up embeddings with what real ones have: a common direction, spectra that fall like 1/k, prompts that resemble each
other within and across tasks, probes of a domain of their own. About two minutes on two cores.
"""

from __future__ import annotations

import torch
from _figures import arguments, report, seconds
from torch import Tensor
from torch.nn.functional import normalize

from hf_platonic.joint import JointSolution, JointTerm, joint_solve
from hf_platonic.solve import closed_form

D = 1152
PROBES = (400, 600, 800, 1000, 1200, 1500, 1800, 2000)
PROMPTS = (10, 10, 20, 25, 30, 40, 45, 50)
CONTROL = 1000


def embeddings(rows: int, d: int, generator: torch.Generator, centre: Tensor) -> Tensor:
    """Unit rows around a centre of norm 1.5, their spectrum falling like 1/k in directions of their own."""
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    scales = normalize(1 / torch.arange(1, d + 1, dtype=torch.float32), dim=0)
    return normalize(centre + (torch.randn(rows, d, generator=generator) * scales) @ basis.T, dim=-1)


def terms(d: int, probes: tuple[int, ...], prompts: tuple[int, ...], control: int) -> list[JointTerm]:
    """One term a task, each with its probes against the other tasks' prompts at zero, and a control of all prompts."""
    generator = torch.Generator().manual_seed(0)
    middle, texts = (1.0 * normalize(torch.randn(d, generator=generator), dim=0) for _ in range(2))
    words = []
    for m in prompts:
        task = texts + 0.5 * normalize(torch.randn(d, generator=generator), dim=0)
        words.append(normalize(task + 0.5 * normalize(torch.randn(m, d, generator=generator), dim=-1), dim=-1))
    found = []
    for i, (n, m) in enumerate(zip(probes, prompts, strict=True)):
        domain = 1.2 * middle + 0.8 * normalize(torch.randn(d, generator=generator), dim=0)
        design = embeddings(n, d, generator, domain)
        found.append(JointTerm(design, words[i], 0.05 * torch.randn(n, m, generator=generator)))
        found.append(JointTerm(design, torch.cat(words[:i] + words[i + 1 :])))
    found.append(JointTerm(embeddings(control, d, generator, 1.5 * middle), torch.cat(words)))
    return found


def main() -> None:
    options = arguments(__doc__).parse_args()
    figures: dict[str, float] = {}

    def measured(name: str, problem: list[JointTerm]) -> None:
        found: list[JointSolution] = []
        figures[f"{name}_seconds"] = seconds(lambda: found.append(joint_solve(problem)))
        figures[f"{name}_steps"] = found[0].iterations
        figures[f"{name}_residual"] = found[0].residual

    problem = terms(D, PROBES, PROMPTS, CONTROL)
    measured("eight_terms_and_controls", problem)
    measured("without_controls", problem[:-1:2])
    # More prompts than dimensions and nothing to preserve, the hard case: nothing falls apart, and steps are many.
    measured("more_prompts_than_dimensions", terms(64, (400,) * 8, (10,) * 8, 400)[:-1:2])

    one = problem[0]
    assert one.delta is not None
    left, right = closed_form(one.design, one.prompts, one.delta)
    joint = joint_solve([one])
    figures["relative_difference_to_the_closed_form"] = float(
        (joint.left @ joint.right - left @ right).norm() / (left @ right).norm()
    )
    report(figures, options.json)


if __name__ == "__main__":
    main()
