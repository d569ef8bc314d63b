"""Writes docs/families.md and the README's table of families from what `tests/test_families.py` measures.

    python docs/families.py

About 20 seconds on one core, offline: tiny random models, built in memory. It prints the paths it wrote. The rows of
open_clip's models are measured where the extra `open-clip` is installed, and otherwise stay as they are in the file;
`tests/test_open_clip.py` compares them in either case.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import conftest  # noqa: E402, F401  # lets torchvision load
from family_checks import HEADER, check, support_row  # noqa: E402
from tiny import FAMILIES, SOURCES  # noqa: E402

COLUMNS = 5  # in the README
START, END = "<!-- families -->", "<!-- /families -->"

TEXT = """# Families

Written by `python docs/families.py`; `tests/test_families.py` measures the same and compares each row with this file.

{table}

* **Source**: descriptors can be extracted from it, whichever tower was fine-tuned.
* **Probe tower as target**: where `transfer(..., site=...)` writes, and what `site` may be; the first is the default.
  "output" acts behind the layer, "input" on what goes into it (SigLIP's head adds a residual behind the layer, so only
  its input is exact), "features" adds what is read from inner layers, and is exact as a live adapter only
  ([sites.md](sites.md)). "no": no affine layer writes the embedding, so nothing could be merged exactly; such a model
  is refused as a target, with an error that says so. An adapter on a layer normalisation or a pooling would be exact
  only while it is live, and is left out on purpose.
* **Text tower as target**: where `transfer(..., tower="text")` writes. It moves the prompts instead of the probes, by
  the transposed operator; the probe tower isn't touched. It's the way to edit ALIGN.
* **Order**: whether cosines rank the prompts as the model's own `forward` does. X-CLIP's `forward` rewrites each
  prompt by what it sees in the video, so there is nothing to compare; a probe is one frame, shown as a still clip.
* **Largest deviation** of unit embeddings, over all edits in the row: live adapter and operator, merged model and live
  adapter, merged model (or live adapter) before and after saving and loading, the tower that isn't edited before and
  after; and of embeddings over batch sizes and of descriptors over permuted probes and prompts. Unmerging gives every
  bit back.
* **Pipeline**: `zero-shot-image-classification` or `zero-shot-audio-classification` gives the same scores (2e-5) for
  the adapted and the merged model; "-": the pipeline doesn't take this class, draws crops at random (fused CLAP), or
  there is no edit to see.

Not supported: PE-Audio and PE-AV (their scores are dot products, not cosines), BLIP-2 (a maximum over query tokens),
FLAVA (`forward` doesn't use its projections), open_clip's CoCa.

## open_clip

`pip install hf-platonic[open-clip]`, and `DualEncoder.from_pretrained` takes open_clip's own names:
`"hf-hub:timm/eva02_large_patch14_clip_224.merged2b_s4b_b131k"` (the paper's EVA-CLIP), or `"local-dir:FOLDER"`.
`DualEncoder(*open_clip_parts(model, tokenizer, model_cfg))` takes a model at hand. The last affine of either tower
becomes a layer named `projection`, since open_clip's own code multiplies by a bare parameter there or asks for the
layer's class. The state dict keeps open_clip's keys and shapes, so checkpoints and task vectors go in as they are, and
`save_open_clip(model, folder)` writes what open_clip itself loads. A ResNet's last layer isn't called but read by its
attention pooling: such a model is a source, and its text tower a target.

torchvision, which open_clip needs, must be of the same build as torch. Where they differ (torch for the CPU,
torchvision for CUDA) neither open_clip nor transformers can be imported: install both from one index.

## Models without a row

An image model with `get_image_features` and `get_text_features` is tried out when it's wrapped: prompts must not
depend on what they are batched with, and the last linear layer of the embedding's size becomes the edit site if a
change of its weights moves the embedding exactly as an operator would. A warning says what was found. If prompts
depend on their padding the model is refused; if no layer passes, it's a source only.

## Your own family

One row says how a family reads probes and prompts and where it is edited. `tests/test_families.py` runs this:

```python
import torch
from transformers import CLIPConfig, CLIPModel

from hf_platonic import DualEncoder, register_family
from hf_platonic.encoders import EditSite, Family


class TwoHeadsConfig(CLIPConfig):
    model_type = "two-heads"


class TwoHeads(CLIPModel):
    # A CLIP with one more linear layer behind its image tower.

    config_class = TwoHeadsConfig

    def __init__(self, config):
        super().__init__(config)
        self.last = torch.nn.Linear(config.projection_dim, config.projection_dim)

    def embed_pixels(self, pixel_values):
        return self.last(self.get_image_features(pixel_values=pixel_values).pooler_output)


register_family(
    Family(
        name="Two heads",
        model_types=("two-heads",),
        modality="image",
        site=EditSite("last", "output"),  # the affine layer that writes the image embedding
        text_site="text_projection",
        probe_getter="embed_pixels",
        pools_eos=True,  # the text tower reads its embedding at the end token
    )
)

encoder = DualEncoder(TwoHeads(TwoHeadsConfig(**config)), processor)
```

Site "features" finds the tower's blocks by running it; `feature_modules`, a regular expression, names them where that
fails.

Every transfer compares the edited model, live and merged, with the operator, and takes the edit back if they differ:
a wrong row can't go unnoticed.
"""


def short(table: list[str]) -> str:
    """The table's first columns, as the README shows them."""
    return "\n".join("|".join(line.split("|")[: COLUMNS + 1]) + "|" for line in table)


def main() -> None:
    """Measures, and writes the files."""
    path, readme = HERE / "families.md", HERE.parent / "README.md"
    families = [*FAMILIES, *SOURCES]
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| open_clip")]
    if importlib.util.find_spec("open_clip") is not None:
        from tiny_open_clip import CONFIGS

        families, kept = [*families, *CONFIGS], []
    rows = [*(support_row(family, check(family)) for family in families), *kept]
    path.write_text(TEXT.replace("{table}", "\n".join([*HEADER, *rows])), encoding="utf-8")
    before, after = (readme.read_text(encoding="utf-8").split(mark)[i] for mark, i in ((START, 0), (END, 1)))
    readme.write_text(f"{before}{START}\n{short([*HEADER, *rows])}\n{END}{after}", encoding="utf-8")
    sys.stdout.write(f"{path}\n{readme}\n")


if __name__ == "__main__":
    main()
