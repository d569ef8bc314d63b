"""A small world to try everything in without network: pre-trained encoders, fine-tunes, tasks and controls.

Six image-text families and two audio-text models, pre-trained on rendered captioned pictures and sounds, with one
LoRA adapter per model and task, all in ordinary folders that `from_pretrained` reads. The `build` module made them
and can make them again.

    >>> from hf_platonic.playground import load_task, model_names
    >>> model_names("audio")
    ('clap-narrow', 'clap-wide')
    >>> task = load_task("shapes")
    >>> task.prompts()[:2]
    ('a circle', 'a square')
    >>> len(task.split("probes", 3).inputs)
    3
"""

from __future__ import annotations

from pathlib import Path

from .architectures import BLUEPRINTS
from .captioned import CAPTIONED, CaptionedSplit, CaptionedTask, load_captioned
from .tasks import CONTROLS, TASKS, Modality, Split, Task, load_control, load_task

__all__ = [
    "AUDIO_TASKS",
    "IMAGE_TASKS",
    "MODELS",
    "RETRIEVAL_TASKS",
    "CaptionedSplit",
    "CaptionedTask",
    "Split",
    "Task",
    "adapter_path",
    "controls",
    "load_captioned",
    "load_control",
    "load_task",
    "model_names",
    "model_path",
]

MODELS: tuple[str, ...] = tuple(BLUEPRINTS)
"""Names of all models, image models first."""

IMAGE_TASKS: tuple[str, ...] = tuple(name for name, task in TASKS.items() if task.modality == "image")
"""Names of the image tasks."""

AUDIO_TASKS: tuple[str, ...] = tuple(name for name, task in TASKS.items() if task.modality == "audio")
"""Names of the sound tasks."""

RETRIEVAL_TASKS: tuple[str, ...] = tuple(CAPTIONED)
"""Names of the retrieval tasks, which have no fine-tunes: controls of what an edit leaves alone."""

_WEIGHTS = Path(__file__).parent / "weights"


def model_names(modality: Modality | None = None) -> tuple[str, ...]:
    """Return the names of the models, of one modality if given."""
    _check_modality(modality)
    return tuple(name for name in MODELS if modality in (None, BLUEPRINTS[name].modality))


def controls(modality: Modality) -> tuple[str, ...]:
    """Return the names of the controls of a modality."""
    _check_modality(modality)
    return tuple(name for name, task in CONTROLS.items() if task.modality == modality)


def model_path(name: str) -> Path:
    """Return the folder of a model and its processor, as `from_pretrained` reads it.

    Raises:
        ValueError: There is no such model.
        FileNotFoundError: The weights are not installed.
    """
    _check_model(name)
    return _existing(_WEIGHTS / "models" / name)


def adapter_path(model: str, task: str) -> Path:
    """Return the folder of the LoRA that fine-tunes a model on a task, as `PeftModel.from_pretrained` reads it.

    Raises:
        ValueError: There is no such model, or no such task of the model's modality.
        FileNotFoundError: The weights are not installed.
    """
    _check_model(model)
    names = IMAGE_TASKS if BLUEPRINTS[model].modality == "image" else AUDIO_TASKS
    if task not in names:
        raise ValueError(
            f"Expected a task of {model!r} out of {names}, got {task!r}. Take a task of the model's modality."
        )
    return _existing(_WEIGHTS / "adapters" / model / task)


def _check_model(name: str) -> None:
    if name not in BLUEPRINTS:
        raise ValueError(f"Expected a model out of {MODELS}, got {name!r}. Take one from `model_names()`.")


def _check_modality(modality: str | None) -> None:
    if modality not in (None, "image", "audio"):
        raise ValueError(f"Expected modality 'image' or 'audio', got {modality!r}. Pass one of the two.")


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Expected playground weights in {folder}, got no such folder. "
            "Reinstall the package, or build them with `python -m hf_platonic.playground.build`."
        )
    return folder
