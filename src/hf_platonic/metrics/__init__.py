"""The measures as `evaluate` modules, which load without network: `load_metric("retention")`.

>>> from hf_platonic.metrics import metric_names
>>> metric_names()
('normalized_accuracy', 'recall_at_k', 'retention', 'zero_shot_accuracy')
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import PlatonicError

__all__ = ["load_metric", "metric_names", "metric_path"]

_FOLDER = Path(__file__).parent


def metric_names() -> tuple[str, ...]:
    """Names of the metrics."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/*.py") if path.stem == path.parent.name))


def metric_path(name: str) -> Path:
    """The folder of a metric, as `evaluate.load` reads it.

    Raises:
        PlatonicError: If there's no such metric.
    """
    if name not in metric_names():
        raise PlatonicError(f"Expected a metric out of {', '.join(metric_names())}, got {name!r}. Take one of these.")
    return _FOLDER / name


def load_metric(name: str, **options: Any) -> Any:
    """A metric, as `evaluate.load` gives it; nothing is downloaded.

    Args:
        name: One of `metric_names()`.
        options: Further arguments of `evaluate.load`.

    Raises:
        PlatonicError: If there's no such metric.
    """
    import evaluate

    return evaluate.load(str(metric_path(name)), **options)
