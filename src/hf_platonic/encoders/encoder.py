"""`DualEncoder`: one two-tower model as the rest of the package sees it, unit embeddings in, unit embeddings out."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from .._checks import finite_rows
from .._pooling import Feature, features_of
from .._processes import process_state
from ..errors import EncoderError, ProbeError, PromptError
from .blocks import FEATURE_LAYERS, find_features
from .discovery import guess, verified
from .families import (
    EditSite,
    SiteKind,
    Tower,
    bare_model,
    call,
    device_of,
    edit_site,
    edited_linear,
    evaluating,
    family_of,
)
from .features import ProbeFeatures, run_probes
from .identity import EncoderIdentity, config_digest, digest_of
from .loading import load_adapter, load_model, load_weights, public_name, recorded_base
from .media import decoder
from .preprocessing import RULES, cut_prompts, in_chunks, prompt_ids, prompt_limit

if TYPE_CHECKING:
    from torch import Tensor, nn
    from typing_extensions import Self

__all__ = ["DualEncoder", "ProbeFeatures"]

_CANARY = ("A photo of a Cat, 42.", "the sound of rain; naïve — 雨")
"""Their token ids stand for a tokenizer's merges, normaliser and end-token rule in the preprocessing digest."""


class DualEncoder:
    """A dual encoder of a supported family, with its processor.

    An image model of another family with the usual getters is read by the roles of its parts, where running it bears
    them out; a warning says what was found.

    Args:
        model: A transformers two-tower model, or a PeftModel around one. It's used as it is, never copied, and every
            call runs in evaluation mode without gradients, whatever mode it's in (the mode is put back).
        processor: Its processor, with a `tokenizer` and an `image_processor` or `feature_extractor`.
        repo: Where it came from, for its identity.
        revision: The commit hash there.
        long_clips: What is heard of a clip longer than the model takes at once: "crop", its centre (of a fusion model
            the whole and three crops), or "mean", the mean of the embeddings of equal parts, before normalisation.

    Raises:
        EncoderError: If the family is unknown, the edit site missing, or the processor incomplete.

    Example:
        >>> encoder = DualEncoder.from_pretrained("openai/clip-vit-base-patch32")  # doctest: +SKIP
        >>> encoder.encode_prompts(["a cat", "a dog"]).shape  # doctest: +SKIP
        torch.Size([2, 512])
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        *,
        repo: str | None = None,
        revision: str | None = None,
        long_clips: Literal["crop", "mean"] = "crop",
    ) -> None:
        if long_clips not in ("crop", "mean"):
            raise EncoderError(f'Expected `long_clips` to be "crop" or "mean", got {long_clips!r}.')
        self.long_clips = long_clips
        self.model = model
        self.processor = processor
        try:
            self.family = family_of(model)
            unknown = False
        except EncoderError:
            self.family = guess(model)
            unknown = True
        self._site = None if self.family.site is None else edit_site(model, family=self.family)
        self._source: tuple[str | None, ...] = (repo, revision, None, None)
        self._bare_of_adapters = False
        bare = bare_model(model)
        part = "image_processor" if self.family.modality == "image" else "feature_extractor"
        getters = (self.family.probe_getter, self.family.prompt_getter)
        missing = [f"model.{name}" for name in getters if isinstance(name, str) and not hasattr(bare, name)]
        missing += [f"processor.{name}" for name in ("tokenizer", part) if getattr(processor, name, None) is None]
        if missing:
            raise EncoderError(
                f"Expected {', '.join(missing)} for family {self.family.name}, got {type(bare).__name__} with "
                f"{type(processor).__name__}. Load the two-tower model with AutoModel and AutoProcessor."
            )
        if unknown:
            self.family = verified(self)
            self._site = self.family.site

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        weights: str | os.PathLike[str] | None = None,
        task_vector: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        adapter_revision: str | None = None,
        subfolder: str | None = None,
        long_clips: Literal["crop", "mean"] = "crop",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """The encoder from a Hub repo or a local folder, with a fine-tune on top if one is named.

        Images always go through Pillow, even where torchvision is installed: its resampling gives other values.

        Args:
            repo_or_path: The two-tower model and its processor; or a PEFT adapter, which is then loaded on the base
                and base revision it records; or a model of open_clip's by its own name, "hf-hub:owner/name".
            adapter: A PEFT adapter of any layer-level method, as repo id or folder.
            weights: Fine-tuned weights of the model or of one of its towers, as `CLIPVisionModel` checkpoints are: a
                file (`.safetensors`, or `.pt` and the like, read without running code), a folder or a repo id.
            task_vector: The same as differences to the base, which are added.
            revision: Of `repo_or_path`.
            adapter_revision: Of `adapter`, `weights` or `task_vector`.
            subfolder: Within `adapter`.
            long_clips: As for the class.
            dtype: Of the weights; float32 by default.
            device: By default the one accelerate gives this process.
            token: For private repos.
            cache_dir: Of the Hub client.
            local_files_only: Use only what is already on disk.

        Raises:
            EncoderError: If something is missing, of an unsupported family, if weights of the model or the fine-tune
                would be left at their initial values or unused, or if there are two fine-tunes.
        """
        tunes = {"adapter": adapter, "weights": weights, "task_vector": task_vector}
        named = {key: os.fspath(value) for key, value in tunes.items() if value is not None}
        if len(named) > 1:
            raise EncoderError(f"Expected one fine-tune on top of the base, got {' and '.join(named)}.")
        hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        name = os.fspath(repo_or_path)
        try:
            model, processor, commit = load_model(name, revision, dtype or torch.float32, hub)
        except EncoderError:
            recorded = None if named else recorded_base(name, revision, subfolder, hub)
            if recorded is None:
                raise
            named, adapter_revision, (name, revision) = {"adapter": name}, revision, recorded
            model, processor, commit = load_model(name, revision, dtype or torch.float32, hub)
        source: tuple[str | None, ...] = (public_name(name), commit, None, None)
        for kind, extra in named.items():
            if kind == "adapter":
                model, at = load_adapter(model, extra, adapter_revision, subfolder, hub)
                shown: str | None = public_name(extra)
            else:
                shown, at = load_weights(model, extra, adapter_revision, hub, add=kind == "task_vector")
            source = (*source[:2], shown, at)
        model = model.eval().to(process_state().device if device is None else device)
        encoder = cls(model, processor, long_clips=long_clips)
        encoder._source = source
        return encoder

    def at(
        self,
        *,
        site: SiteKind | None = None,
        tower: Tower | None = None,
        features: int | Sequence[Feature] = FEATURE_LAYERS,
    ) -> Self:
        """The same encoder, sharing model and processor, to be edited at another place.

        Args:
            site: Which side of the layer that writes the embedding: "output", or "input" (exact for the probe tower
                of every family that has such a layer); or "features", to add what is read from inner features of
                the probe tower, which can't be merged. None: as the family's row says.
            tower: "probe", or "text" to move the prompts' embeddings instead. If both are None it's this encoder.
            features: For "features": blocks of the tower to read at most, evenly spaced, the last one always among
                them; or exactly what to read.

        Raises:
            EncoderError: If that place can't be edited exactly.
        """
        if site is None and tower is None:
            return self
        view = copy.copy(self)
        view._site = edit_site(self.model, tower=tower or "probe", kind=site, family=self.family)
        if site == "features":
            read = find_features(self, features) if isinstance(features, int) else features_of(features)
            view._site = replace(view._site, features=read)
        return view

    def without_adapters(self) -> Self:
        """The base model behind this one's PEFT adapters: the same weights, read with the adapters switched off.

        Raises:
            EncoderError: If the model has no adapter, or one that also trained biases of the base, which stay when
                it's switched off.
        """
        if not hasattr(self.model, "disable_adapter"):
            raise EncoderError(
                f"Expected a PeftModel, whose base is at hand with the adapter off, got {type(self.model).__name__}. "
                "Load the base as an encoder of its own."
            )
        configs: dict[str, Any] = self.model.peft_config  # type: ignore[assignment]
        biased = [name for name, config in configs.items() if getattr(config, "bias", "none") not in ("none", False)]
        if biased:
            raise EncoderError(
                f'Expected adapters with bias="none", got {biased}: the biases they trained are part of the base '
                "model and stay when they are switched off. Load the base as an encoder of its own."
            )
        view = copy.copy(self)
        view.__dict__.pop("identity", None)
        view._bare_of_adapters = True
        view._source = (*self._source[:2], None, None)
        return view

    @property
    def site(self) -> EditSite:
        """Where it's edited.

        Raises:
            EncoderError: If it can be a source only.
        """
        return edit_site(self.model, family=self.family) if self._site is None else self._site

    @property
    def reads_input(self) -> bool:
        """Whether `ProbeFeatures.design` is something else than the unit embeddings."""
        return self._site is not None and self._site.kind != "output"

    @property
    def modality(self) -> str:
        """What its probes are: "image" or "audio"."""
        return self.family.modality

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return device_of(self.model, self._site)

    @property
    def dtype(self) -> torch.dtype:
        """What its towers compute in; results are float32 all the same."""
        return next(p.dtype for p in bare_model(self.model).parameters() if p.is_floating_point())

    @cached_property
    def embedding_dim(self) -> int:
        """d, the size of its embeddings."""
        if self._site is None:  # both towers write vectors of one size
            return self._encode_ids(self._tokenise(_CANARY[:1])).shape[1]
        return self._linear.out_features

    @property
    def design_dim(self) -> int:
        """p, the number of columns of `ProbeFeatures.design`."""
        if not self.reads_input:
            return self.embedding_dim
        inner = [feature.size for feature in self.site.features]
        ones = bool(inner) or getattr(self._linear, "bias", None) is not None
        return self._linear.in_features + sum(inner) + ones

    @cached_property
    def identity(self) -> EncoderIdentity:
        """Its source and digests; see `EncoderIdentity`."""
        repo, revision, adapter, adapter_revision = self._source
        config = self._config
        return EncoderIdentity(
            repo=repo,
            revision=revision,
            adapter=adapter,
            adapter_revision=adapter_revision,
            model_type=config.model_type,
            config_digest=config_digest(config),
            preprocessing_digest=self._preprocessing_digest(),
        )

    def preprocess(self, inputs: Sequence[object], *, offset: int = 0) -> dict[str, Tensor]:
        """The probe tower's keyword arguments: deterministic, and for each probe independent of the others.

        Args:
            inputs: b probes of the encoder's modality, in any form `hf_platonic.encoders.media` decodes.
            offset: Index of the first one within its set, for messages.

        Returns:
            CPU tensors of b rows each; with `long_clips="mean"` one row a part, and in "parts" how many each has.

        Raises:
            ProbeError: If one can't be decoded or is of the wrong modality; `index` says which.
        """
        if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, Sequence) or not len(inputs):
            raise ProbeError(
                f"Expected a non-empty list of {self.modality} probes, got {type(inputs).__name__}. "
                "Put a single probe in a list."
            )
        decode = decoder(self.modality)
        decoded = [decode(probe, index=index) for index, probe in enumerate(inputs, start=offset)]
        if self.modality == "image" or self.long_clips == "crop":
            return self.family.prepare(self.processor, self._config, decoded, offset)
        parts = [in_chunks(clip, self.processor.feature_extractor) for clip in decoded]  # type: ignore[arg-type]
        batch = self.family.prepare(self.processor, self._config, [part for clip in parts for part in clip], offset)
        return {**batch, "parts": torch.tensor([len(clip) for clip in parts])}

    def probe_features(self, batch: Mapping[str, Tensor], *, design: bool = True, offset: int = 0) -> ProbeFeatures:
        """Unit embeddings and design rows of one batch, from one forward pass of the probe tower.

        Args:
            batch: From `preprocess`; it's moved to the model's device, and floats to its dtype.
            design: False skips what an operator multiplies besides `unit` (`design` is then `unit`).
            offset: Index of the first probe within its set, for messages.

        Returns:
            float32 rows on the model's device.

        Raises:
            ProbeError: If an embedding is NaN, infinite or zero; `index` says which.
        """
        dtype = self.dtype
        inputs = {
            key: value.to(self.device, dtype if value.is_floating_point() else None) for key, value in batch.items()
        }
        parts = inputs.pop("parts", None)
        wants_input = design and self.reads_input
        watched = self.site if wants_input else None
        if parts is not None and watched is None:
            watched = edit_site(self.model, family=self.family)
        with self._reading() as bare:
            seen = run_probes(bare, self.family, inputs, watched)
        inner = self.family.site is not None and self.family.site.kind == "output"
        if parts is not None:
            seen = seen.joined(parts.tolist(), inner=inner)
        unit, norm = seen.unit(offset=offset)
        if not wants_input:
            return ProbeFeatures(unit, unit)
        return ProbeFeatures(unit, seen.design(self._linear, self.site, norm, inner=inner))

    def encode_probes(self, inputs: Sequence[object], *, offset: int = 0) -> ProbeFeatures:
        """`probe_features(preprocess(inputs))`, as one batch."""
        return self.probe_features(self.preprocess(inputs, offset=offset), offset=offset)

    def canonical_prompts(self, prompts: Sequence[str]) -> tuple[str, ...]:
        """The prompts as the text tower was trained to see them: lower-cased for SigLIP 2, else unchanged."""
        lower = self.family.lower_case(self.processor.tokenizer)
        return tuple(prompt.lower() if lower else prompt for prompt in prompts)

    def encode_prompts(self, prompts: Sequence[str], *, batch_size: int = 256) -> Tensor:
        """Unit embeddings of prompts, padded and masked as the family was trained.

        Args:
            prompts: m texts. A text that occurs twice is encoded once.
            batch_size: Texts per forward pass; it doesn't change a result beyond rounding.

        Returns:
            Shape (m, d), float32, on the model's device.

        Raises:
            PromptError: If there are none, one isn't a non-empty string, or two different ones become the same
                tokens.

        Warns:
            UserWarning: If prompts are longer than the model reads; they're cut, with the end token kept.
        """
        if isinstance(prompts, str) or not len(prompts):
            raise PromptError(f"Expected a non-empty list of prompts, got {prompts!r}.")
        for position, prompt in enumerate(prompts):
            if not isinstance(prompt, str) or not prompt.strip():
                raise PromptError(f"Expected prompt {position} to be a non-empty string, got {prompt!r}.")
        unique = list(dict.fromkeys(prompts))
        rows = self._tokenise(unique)
        cut_prompts(self.processor.tokenizer, unique, self.canonical_prompts(unique), rows, self._prompt_limit)
        encoded = [self._encode_ids(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
        positions = {prompt: position for position, prompt in enumerate(unique)}
        units = finite_rows(torch.cat(encoded), "prompt embedding")
        return units[torch.tensor([positions[prompt] for prompt in prompts], device=units.device)]

    @property
    def _config(self) -> Any:
        return bare_model(self.model).config

    @property
    def _text_config(self) -> Any:
        return getattr(self._config, "text_config", self._config)

    @contextmanager
    def _reading(self) -> Iterator[nn.Module]:
        """The bare model, in evaluation mode, without gradients, and with its adapters off if that is asked for."""
        bare = bare_model(self.model)
        with ExitStack() as stack:
            if self._bare_of_adapters:
                trained = {p: p.requires_grad for p in bare.parameters()}
                stack.callback(lambda: [p.requires_grad_(was) for p, was in trained.items()])  # PEFT sets it anew
                stack.enter_context(self.model.disable_adapter())  # type: ignore[operator]
            stack.enter_context(torch.no_grad())
            stack.enter_context(evaluating(bare))
            yield bare

    @property
    def _linear(self) -> nn.Linear:
        return edited_linear(self.model, self.site)

    @property
    def _prompt_limit(self) -> int:
        text = self._text_config
        if self.family.padding == "max_length":  # rows fill the positions whatever the tokenizer says
            return int(text.max_position_embeddings)
        return prompt_limit(self.processor.tokenizer, text) - (self.family.padding == "some")

    def _tokenise(self, prompts: Sequence[str]) -> list[list[int]]:
        tokenizer, text = self.processor.tokenizer, self._text_config
        end = None
        if self.family.pools_eos:
            # Configurations older than transformers PR 24773 say 2 and mean the tokenizer's.
            end = tokenizer.eos_token_id if text.eos_token_id == 2 else text.eos_token_id
        return prompt_ids(tokenizer, prompts, self.canonical_prompts(prompts), self._prompt_limit, end=end)

    def _prompt_inputs(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The text tower's keyword arguments, padded and masked as the family needs."""
        width = max(map(len, rows)) + (self.family.padding == "some")
        if self.family.padding == "max_length":
            width = self._prompt_limit
        pad = self.processor.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.device)
        inputs = {"input_ids": ids}
        if self.family.text_mask:
            lengths = torch.tensor([[len(row)] for row in rows], device=self.device)
            inputs["attention_mask"] = (torch.arange(width, device=self.device) < lengths).long()
        return inputs

    def _encode_ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        inputs = self._prompt_inputs(rows)
        with self._reading() as bare:
            raw = call(bare, self.family.prompt_getter, inputs)
        return functional.normalize(raw, dim=1)

    def _preprocessing_digest(self) -> str:
        tokenizer = self.processor.tokenizer
        part = getattr(self.processor, "image_processor" if self.modality == "image" else "feature_extractor")
        return digest_of(
            {
                "rules": RULES,
                **({} if self.long_clips == "crop" else {"long_clips": self.long_clips}),
                "fused": getattr(getattr(self._config, "audio_config", None), "enable_fusion", None),
                "probe": {"class": type(part).__name__, **part.to_dict()},
                # Not the tokenizer's class: one file loads as several classes that do the same.
                "vocabulary": digest_of(sorted(tokenizer.get_vocab().items())),
                "limit": self._prompt_limit,
                "padding": [self.family.padding, self.family.text_mask, tokenizer.pad_token_id],
                "canary": self._tokenise(_CANARY),
            }
        )
