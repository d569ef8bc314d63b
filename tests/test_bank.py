from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_transfers import affinities, descriptor
from tiny import tiny_encoder

from hf_platonic.bank import OperatorBank
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.errors import BaseMismatchError, DescriptorFormatError, PlatonicError
from hf_platonic.solutions import solve_operators
from hf_platonic.transfers import transfer

KEYS = (("clip", "task"), ("siglip", "task"))


@pytest.fixture(scope="module")
def descriptors() -> dict[tuple[str, str], TaskDescriptor]:
    return {key: descriptor(key[0], n=8) for key in KEYS}


@pytest.fixture
def bank(descriptors: dict[tuple[str, str], TaskDescriptor]) -> OperatorBank:
    return OperatorBank.solve(descriptors, tiny_encoder("siglip2", seed=2))


def test_saved_and_loaded_is_bit_equal_and_lazy(bank: OperatorBank, tmp_path: Path) -> None:
    bank.save_pretrained(tmp_path)
    loaded = OperatorBank.from_pretrained(tmp_path)
    assert (loaded.site, loaded.target, loaded.provenance) == (bank.site, bank.target, bank.provenance)
    assert list(loaded.operators) == list(KEYS)
    (tmp_path / "siglip" / "task" / "adapter_model.safetensors").unlink()
    assert torch.equal(loaded.operators[KEYS[0]].dense(), bank.operators[KEYS[0]].dense())
    with pytest.raises(DescriptorFormatError, match="but it isn't there"):
        loaded.operators[KEYS[1]]


def test_each_entry_is_a_peft_adapter_that_knows_its_base(
    bank: OperatorBank, descriptors: dict[tuple[str, str], TaskDescriptor], tmp_path: Path
) -> None:
    bank.save_pretrained(tmp_path)
    target, other = (tiny_encoder("siglip2", seed=2) for _ in range(2))
    model = PeftModel.from_pretrained(target.model, tmp_path, subfolder="clip/task", adapter_name="one")
    model.load_adapter(tmp_path, "two", subfolder="siglip/task")
    model.set_strengths({"one": 1.0, "two": -0.5})
    transfer([descriptors[KEYS[0]], -0.5 * descriptors[KEYS[1]]], other, strength=1.0)
    probes = descriptors[KEYS[0]].probes
    assert probes is not None
    torch.testing.assert_close(
        affinities(DualEncoder(model, target.processor), probes), affinities(other, probes), rtol=0, atol=1e-5
    )
    with pytest.raises(BaseMismatchError, match=r"hf_platonic\.transfer"):
        PeftModel.from_pretrained(tiny_encoder("siglip2", seed=5).model, tmp_path, subfolder="clip/task")


def test_entries_take_the_options_of_the_solve(descriptors: dict[tuple[str, str], TaskDescriptor]) -> None:
    target = tiny_encoder("siglip2", seed=2)
    calibrated = OperatorBank.solve(descriptors, target, calibration="spread")
    (expected,) = solve_operators([descriptors[KEYS[1]]], target, calibration="spread")
    assert torch.equal(calibrated.operators[KEYS[1]].dense(), expected.dense())
    assert calibrated.provenance[KEYS[1]]["calibration"] == "spread"


def test_thin_factors_take_at_most_a_third_of_dense_ones(tmp_path: Path) -> None:
    """48 operators at d = 768 over the paper's eight prompt counts, six sources each."""
    from dataclasses import replace

    from hf_platonic.operator import Operator

    counts, d = (10, 47, 196, 43, 10, 45, 10, 397), 768
    small = OperatorBank.solve({"a": descriptor(n=4)}, tiny_encoder("clip", seed=2))
    operators = {
        (f"source{s}", f"task{t}"): Operator(torch.zeros(d, m), torch.zeros(m, d))
        for s in range(6)
        for t, m in enumerate(counts)
    }
    replace(small, operators=operators, provenance={}).save_pretrained(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size <= 48 * d * d * 4 / 3


@pytest.mark.parametrize("key", ["../x", "a/b", "", (), ("a", ".."), ("a", 1), ".hidden", ("a", ""), "x" * 97])
def test_refuses_keys_that_cannot_be_folders(key: object, tmp_path: Path) -> None:
    with pytest.raises(PlatonicError, match="Its parts become folders"):
        OperatorBank.solve({key: descriptor(n=4)}, tiny_encoder("clip", seed=2))  # type: ignore[dict-item]


def test_refuses_broken_configs(bank: OperatorBank, tmp_path: Path) -> None:
    bank.save_pretrained(tmp_path)
    path = tmp_path / "bank_config.json"
    whole = json.loads(path.read_text())
    for change, message in (
        ({"schema_version": 2, "library_version": "9.0"}, "Install hf-platonic 9.0 or newer"),
        ({"site": {"module": "x", "kind": "sideways"}}, "doesn't parse"),
        ({"entries": [{**whole["entries"][0], "key": ["..", "etc"]}]}, "doesn't parse"),
        ({"entries": [{**whole["entries"][0], "rank": -1}]}, "doesn't parse"),
        ({"target": {}}, "doesn't parse"),
    ):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(DescriptorFormatError, match=message):
            OperatorBank.from_pretrained(tmp_path)
    entry = {**whole["entries"][0], "rank": 10**12}
    path.write_text(json.dumps({**whole, "entries": [entry]}))
    with pytest.raises(DescriptorFormatError, match="of shape"):
        OperatorBank.from_pretrained(tmp_path).operators[KEYS[0]]
    path.unlink()
    with pytest.raises(DescriptorFormatError, match="but it isn't there"):
        OperatorBank.from_pretrained(tmp_path)
