from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_transfers import affinities, descriptor
from tiny import FAMILIES, tiny_encoder

from hf_platonic import export_lora, transfer
from hf_platonic.errors import EncoderError, PlatonicError

ALONE = """
import sys, torch
from pathlib import Path
from peft import PeftModel
from torch.nn.functional import normalize
from transformers import AutoModel
for folder in Path(sys.argv[1]).iterdir():
    batch, getter = torch.load(folder / "batch.pt")
    base = AutoModel.from_pretrained(folder / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "lora").eval()
    with torch.no_grad():
        live = getattr(model.get_base_model(), getter)(**batch).pooler_output
        merged = getattr(model.merge_and_unload(), getter)(**batch).pooler_output
    torch.save([normalize(live, dim=-1), normalize(merged, dim=-1)], folder / "got.pt")
assert "hf_platonic" not in sys.modules
"""


def test_loads_with_peft_alone_and_gives_the_same(tmp_path: Path) -> None:
    expected = {}
    for family in (name for name in FAMILIES if name != "blip_itc"):  # it has no getter
        audio = family.startswith("clap")
        first, second = (descriptor("clap" if audio else "clip", seed=seed, n=6) for seed in (0, 1))
        target = tiny_encoder(family, seed=2)
        target.model.save_pretrained(tmp_path / family / "base")
        transfer(first, target, strength=1.0, adapter_name="first")
        model = transfer(-second, target, strength=0.5, adapter_name="second")
        export_lora(model, tmp_path / family / "lora")
        assert first.probes is not None
        torch.save((target.preprocess(first.probes[:]), target.family.probe_getter), tmp_path / family / "batch.pt")
        expected[family] = affinities(target, first.probes), target.encode_prompts(first.prompts)
    run = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    for family, (affinity, columns) in expected.items():
        for got in torch.load(tmp_path / family / "got.pt"):  # live, and merged by PEFT
            torch.testing.assert_close(got @ columns.T, affinity, rtol=0, atol=1e-5, msg=family)


def test_the_rank_is_at_most_that_of_the_layer(tmp_path: Path) -> None:
    target = tiny_encoder("clip", seed=2)
    for index in range(8):
        model = transfer(descriptor(seed=index, n=6), target, adapter_name=f"a{index}")
    export_lora(model, tmp_path)
    layer = target.model.base_model.model.visual_projection
    assert LoraConfig.from_pretrained(tmp_path).r == min(layer.in_features, layer.out_features, 8 * 3)


def test_refuses_what_it_cannot_export(tmp_path: Path) -> None:
    target = tiny_encoder("clip", seed=2)
    with pytest.raises(EncoderError, match="type PLATONIC, got LoraModel"):
        export_lora(get_peft_model(tiny_encoder().model, LoraConfig(target_modules=["q_proj"])), tmp_path)
    model = transfer(descriptor(n=6), target)
    with pytest.raises(PlatonicError, match=r"adapters among \['default'\], got \['x'\]"):
        export_lora(model, tmp_path, adapters=["x"])
    model.merge_adapter()
    with pytest.raises(PlatonicError, match="live adapters, got merged"):
        export_lora(model, tmp_path)
    assert not list(tmp_path.iterdir())
    model.unmerge_adapter()
    export_lora(model, tmp_path)  # what was refused is exported once the reason is gone
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
