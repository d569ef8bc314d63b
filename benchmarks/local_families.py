"""Dual encoders of other people's pre-trained parts, registered as third-party families.

A classifier and a sentence encoder become a dual encoder without training, by ConSE (convex combination of semantic
embeddings): a probe's embedding is the mean of the class names' centred sentence embeddings, weighted by the
classifier's probabilities; a prompt's is its own centred sentence embedding. Both end in one linear layer.

Importing this file is all that is needed before `DualEncoder.from_pretrained(folder)`; on the command line pass
`--plugin benchmarks/local_families.py`. `local_models.py` builds the folders. The classes need nothing but torch and
transformers.

Reference: Norouzi et al. 2013, "Zero-Shot Learning by Convex Combination of Semantic Embeddings", arXiv 1312.5650.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, BertConfig, BertModel, PreTrainedConfig, PreTrainedModel

from hf_platonic import register_family, supported_families
from hf_platonic.encoders import EditSite, Family
from hf_platonic.encoders.preprocessing import audio_inputs

__all__ = ["ConseConfig", "ConseModel", "LiteConfig", "LiteConse", "TagsConfig", "TagsConse"]


class ConseConfig(PreTrainedConfig):
    """What all ConSE dual encoders have.

    Attributes:
        text_config: Of the BERT inside the sentence encoder.
        concepts: k, the classes of the pre-trained classifier.
        temperature: The classifier's logits are divided by it before the softmax.
        projection_dim: d, the size of the embeddings; at most that of the sentence encoder.
        feature_channels: p, the size of the pooled features that the classifier reads.
        adapter_channels: Hidden size of the residual perceptron on the pooled features; it's zero in a base model.
    """

    sub_configs_defaults = {"text_config": BertConfig}  # noqa: RUF012  # transformers reads it so

    text_config: dict | PreTrainedConfig | None = None
    concepts: int = 1000
    temperature: float = 1.5
    projection_dim: int = 384
    feature_channels: int = 1280
    adapter_channels: int = 96


class LiteConfig(ConseConfig):
    """An EfficientNet-lite of any size beside a sentence encoder.

    Attributes:
        image_size: Side of the input in pixels.
        stem_channels: Channels of the first convolution.
        stage_channels: Output channels of each stage; the other lists have as many entries.
        stage_blocks: Blocks of each stage.
        stage_kernels: Side of each stage's depthwise kernels.
        stage_strides: Stride of each stage's first block.
        stage_expansions: Hidden channels of a block over its input channels.
    """

    model_type = "efficientnet-lite-conse"

    image_size: int = 96
    stem_channels: int = 32
    stage_channels: list | tuple = (16, 24, 40, 80, 112, 192, 320)
    stage_blocks: list | tuple = (1, 2, 2, 3, 3, 4, 1)
    stage_kernels: list | tuple = (3, 3, 5, 3, 5, 5, 3)
    stage_strides: list | tuple = (1, 2, 2, 2, 1, 2, 1)
    stage_expansions: list | tuple = (1, 6, 6, 6, 6, 6, 6)


class MeanPool(nn.Module):
    """Means over all positions of a feature map, as a module so that a hook can read them."""

    def forward(self, features: Tensor) -> Tensor:
        """Shape (b, channels), from (b, channels, height, width)."""
        return features.mean((2, 3))


class SameConv(nn.Conv2d):
    """A convolution that gives ceil(size / stride) positions, padding more behind than before, as TensorFlow does."""

    def forward(self, features: Tensor) -> Tensor:
        """Shape (b, out channels, ceil(height / stride), ceil(width / stride))."""
        pads: list[int] = []
        for size, kernel, stride in zip(features.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            pad = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            pads += [pad // 2, pad - pad // 2]
        return super().forward(functional.pad(features, pads))


def _convolution(before: int, after: int, kernel: int, stride: int = 1, *, depthwise: bool = False) -> list[nn.Module]:
    convolution = SameConv(before, after, kernel, stride, bias=False, groups=before if depthwise else 1)
    return [convolution, nn.BatchNorm2d(after, eps=1e-3)]


class LiteBlock(nn.Module):
    """Expansion, depthwise convolution and linear projection, with a shortcut where the shapes allow it."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside = before * expansion
        layers = [*_convolution(before, inside, 1), nn.ReLU6()] if expansion > 1 else []
        layers += [*_convolution(inside, inside, kernel, stride, depthwise=True), nn.ReLU6()]
        self.layers = nn.Sequential(*layers, *_convolution(inside, after, 1))
        self.shortcut = before == after and stride == 1

    def forward(self, features: Tensor) -> Tensor:
        """Shape (b, after, height / stride, width / stride)."""
        out = self.layers(features)
        return features + out if self.shortcut else out


class LiteTower(nn.Module):
    """An EfficientNet-lite without its classifier.

    Its `pooler` and every entry of `stage_pools` give pooled features, (b, channels): places for a hook.
    """

    def __init__(self, config: LiteConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, config.stem_channels, 3, 2), nn.ReLU6())
        self.stages, self.stage_pools, before = nn.ModuleList(), nn.ModuleList(), config.stem_channels
        rows = (config.stage_channels, config.stage_blocks, config.stage_kernels, config.stage_strides)
        for after, blocks, kernel, stride, expansion in zip(*rows, config.stage_expansions, strict=True):
            stage = [LiteBlock(before, after, kernel, stride, expansion)]
            stage += [LiteBlock(after, after, kernel, 1, expansion) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(*stage))
            self.stage_pools.append(MeanPool())
            before = after
        self.head = nn.Sequential(*_convolution(before, config.feature_channels, 1), nn.ReLU6())
        self.pooler = MeanPool()

    def forward(self, pixels: Tensor) -> Tensor:
        """Pooled features (b, feature channels) of pixels (b, 3, height, width) in about [-1, 1]."""
        features = self.stem(pixels.contiguous(memory_format=torch.channels_last))
        for stage, pool in zip(self.stages, self.stage_pools, strict=True):
            features = stage(features)
            pool(features)  # for whoever listens
        return self.pooler(self.head(features))


class ResidualAdapter(nn.Module):
    """`f + fc2(gelu(fc1(f)))`; the identity while `fc2` is zero."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, features: Tensor) -> Tensor:
        """The same shape."""
        return features + self.fc2(functional.gelu(self.fc1(features)))


class ConseModel(PreTrainedModel):
    """A pre-trained classifier and a sentence encoder as two towers; a subclass says what `probe_model` is."""

    config_class = ConseConfig
    probe_model: nn.Module

    def __init__(self, config: ConseConfig) -> None:
        super().__init__(config)
        size = config.text_config.hidden_size
        self.adapter = ResidualAdapter(config.feature_channels, config.adapter_channels)
        self.classifier = nn.Linear(config.feature_channels, config.concepts)
        # Row i of its transpose is the centred sentence embedding of class i.
        self.probe_projection = nn.Linear(config.concepts, config.projection_dim, bias=False)
        self.text_model = BertModel(config.text_config, add_pooling_layer=False)
        # Its bias takes the mean of the classes' sentence embeddings off.
        self.text_projection = nn.Linear(size, config.projection_dim)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(20.0)))

    def concept_probabilities(self, features: Tensor) -> Tensor:
        """What the classifier says about pooled features (b, p): shape (b, k), rows that add to 1."""
        return torch.softmax(self.classifier(self.adapter(features)) / self.config.temperature, dim=-1)

    def pooled_features(self, inputs: Tensor) -> Tensor:
        """What the adapter and the classifier read, (b, p), of the probe tower's inputs."""
        return self.probe_model(inputs)

    def embed_features(self, features: Tensor) -> Tensor:
        """Embeddings (b, d), not normalised, of pooled features (b, p)."""
        return self.probe_projection(self.concept_probabilities(features))

    def get_text_features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embeddings (b, d), not normalised, of tokenised prompts."""
        states = self.text_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        return self.text_projection(functional.normalize(mean, dim=-1))

    def logits(self, probes: Tensor, prompts: Tensor) -> Tensor:
        """Scaled cosines (b, m) of embeddings (b, d) and (m, d)."""
        unit = functional.normalize(probes, dim=-1) @ functional.normalize(prompts, dim=-1).T
        return self.logit_scale.exp() * unit


class LiteConse(ConseModel):
    """ConSE on an EfficientNet-lite."""

    config_class = LiteConfig
    main_input_name = "pixel_values"

    def __init__(self, config: LiteConfig) -> None:
        super().__init__(config)
        self.probe_model = LiteTower(config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Embeddings (b, d), not normalised, of pixels (b, 3, height, width)."""
        return self.embed_features(self.pooled_features(pixel_values))

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scaled cosines of every picture and every prompt, (b, m)."""
        return self.logits(self.get_image_features(pixel_values), self.get_text_features(input_ids, attention_mask))


class TagsConfig(ConseConfig):
    """A music tagger beside a sentence encoder.

    Attributes:
        tower: "musicnn", with filters over all pitches and over long times, or "vgg", of square ones.
        channels: Of every layer of a "vgg"; the middle layers of a "musicnn".
        filters: Timbral and temporal filters of each shape of a "musicnn".
        mels: Bands of the spectrogram.
        frames: Its length; longer ones are cut.
    """

    model_type = "music-tags-conse"

    tower: str = "musicnn"
    channels: int = 64
    filters: list | tuple = (204, 51)
    mels: int = 96
    frames: int = 187


class Filters(nn.Module):
    """Convolution, rectifier, normalisation, and the largest value over all bands: (b, channels, frames)."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm2d(convolution.out_channels, eps=1e-3)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """From (b, 1, frames, bands)."""
        return self.norm(functional.relu(self.convolution(spectrogram))).amax(dim=3)


class MiddleLayer(nn.Module):
    """The same along time alone: (b, after, frames) from (b, before, frames)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(before, after, 7, padding=3)
        self.norm = nn.BatchNorm1d(after, eps=1e-3)

    def forward(self, features: Tensor) -> Tensor:
        """From (b, before, frames)."""
        return self.norm(functional.relu(self.convolution(features)))


class TimePool(nn.Module):
    """Largest value and mean over time, in turn for each channel: (b, 2 channels) from (b, channels, frames)."""

    def forward(self, features: Tensor) -> Tensor:
        """From (b, channels, frames)."""
        return torch.stack([features.amax(dim=2), features.mean(dim=2)], dim=2).flatten(1)


class MusicnnTower(nn.Module):
    """The tagger of Pons and Serra 2019, arXiv 1909.06654, without its classifier; `pooler` is a place for a hook."""

    def __init__(self, config: TagsConfig) -> None:
        super().__init__()
        (timbral, temporal), channels, mels = config.filters, config.channels, config.mels
        self.norm = nn.BatchNorm2d(1, eps=1e-3)
        tall = [nn.Conv2d(1, timbral, (7, int(part * mels)), padding=(3, 0)) for part in (0.4, 0.7)]
        long = [SameConv(1, temporal, (length, 1)) for length in (128, 64, 32)]
        self.front = nn.ModuleList(Filters(convolution) for convolution in (*tall, *long))
        front = 2 * timbral + 3 * temporal
        self.middle = nn.ModuleList(MiddleLayer(before, channels) for before in (front, channels, channels))
        self.pooler = TimePool()
        pooled = 2 * (front + 3 * channels)
        self.dense = nn.Sequential(
            nn.BatchNorm1d(pooled, eps=1e-3),
            nn.Linear(pooled, config.feature_channels),
            nn.ReLU(),
            nn.BatchNorm1d(config.feature_channels, eps=1e-3),
        )

    def forward(self, spectrogram: Tensor) -> Tensor:
        """Features (b, feature channels) of spectrograms (b, 1, frames, mels)."""
        spectrogram = self.norm(spectrogram)
        features = torch.cat([part(spectrogram) for part in self.front], dim=1)
        levels = [features, self.middle[0](features)]
        for layer in self.middle[1:]:
            levels.append(levels[-1] + layer(levels[-1]))
        return self.dense(self.pooler(torch.cat(levels, dim=1)))


class VggTower(nn.Module):
    """Five square convolutions with pooling; every entry of `stage_pools` is a place for a hook."""

    def __init__(self, config: TagsConfig) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, eps=1e-3)
        self.stages, self.stage_pools, before = nn.ModuleList(), nn.ModuleList(), 1
        for size, stride in (((4, 1), 2), (2, 2), (2, 2), (2, 2), (4, 4)):
            convolution = nn.Conv2d(before, config.channels, 3, padding=1)
            norm = nn.BatchNorm2d(config.channels, eps=1e-3)
            self.stages.append(nn.Sequential(convolution, nn.ReLU(), norm, nn.MaxPool2d(size, stride)))
            self.stage_pools.append(MeanPool())
            before = config.channels

    def forward(self, spectrogram: Tensor) -> Tensor:
        """Features (b, feature channels) of spectrograms (b, 1, frames, mels)."""
        features = self.norm(spectrogram)
        for stage, pool in zip(self.stages, self.stage_pools, strict=True):
            features = stage(features)
            pool(features)  # for whoever listens
        return features.permute(0, 2, 3, 1).flatten(1)


class TagsConse(ConseModel):
    """ConSE on a music tagger."""

    config_class = TagsConfig
    main_input_name = "input_features"

    def __init__(self, config: TagsConfig) -> None:
        super().__init__(config)
        self.probe_model = MusicnnTower(config) if config.tower == "musicnn" else VggTower(config)
        self.post_init()

    def pooled_features(self, inputs: Tensor) -> Tensor:
        """The same of mel spectrograms in dB; the taggers were trained on log10(1 + 1e4 power)."""
        power = 10 ** (inputs[:, :1, : self.config.frames] / 10)
        return self.probe_model(torch.log10(1 + 1e4 * power))

    def get_audio_features(self, input_features: Tensor) -> Tensor:
        """Embeddings (b, d), not normalised, of mel spectrograms (b, 1, frames, mels) in dB."""
        return self.embed_features(self.pooled_features(input_features))

    def forward(self, input_features: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scaled cosines of every clip and every prompt, (b, m)."""
        return self.logits(self.get_audio_features(input_features), self.get_text_features(input_ids, attention_mask))


def clip_inputs(processor: Any, config: Any, probes: Any, offset: int = 0) -> dict[str, Tensor]:
    """Spectrograms of clips, the short ones repeated, the long ones cut to their centre."""
    cut = SimpleNamespace(audio_config=SimpleNamespace(enable_fusion=False))
    return {"input_features": audio_inputs(processor, cut, probes, offset)["input_features"]}


def register(config: type[Any], model: type[Any], family: Family) -> None:
    """Make a class known to transformers' Auto classes and to the table of families; doing it again is harmless."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    if config.model_type not in supported_families():
        register_family(family)


# "output" is the row's default; `at(site="input")` edits the same layer's other side, the class probabilities.
_SITE = EditSite("probe_projection", "output")
register(
    LiteConfig,
    LiteConse,
    Family("EfficientNet-lite (ConSE)", (LiteConfig.model_type,), "image", _SITE, text_site="text_projection"),
)
register(
    TagsConfig,
    TagsConse,
    Family(
        "Music tagger (ConSE)",
        (TagsConfig.model_type,),
        "audio",
        _SITE,
        probe_getter="get_audio_features",
        prepare=clip_inputs,
        text_site="text_projection",
    ),
)
