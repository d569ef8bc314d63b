from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_images

from hf_platonic.descriptor import SCHEMA_VERSION, DescriptorSum, TaskDescriptor
from hf_platonic.encoders.identity import EncoderIdentity
from hf_platonic.errors import DescriptorFormatError, GridMismatchError, HubError, PlatonicError
from hf_platonic.grid import Grid, digest
from hf_platonic.probes import ProbeSet
from hf_platonic.sources import Source

PROBES = ProbeSet(tiny_images(5), prompts=["a", "b", "c"])
OTHER = ProbeSet(tiny_images(4, seed=1), prompts=["a", "b", "c"])


def identity(name: str) -> EncoderIdentity:
    return EncoderIdentity(name, "0" * 40, None, None, "clip", "c", "p")


def descriptor(seed: int = 0, probes: ProbeSet = PROBES, **more: object) -> TaskDescriptor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(probes), probes.grid.m)
    values = {
        "sources": (Source(identity("base"), identity(f"tuned-{seed}")),),
        "spread": 0.1,
        "base_affinity": torch.rand(shape, generator=torch.Generator().manual_seed(9)),
        "name": "task",
        "probes": probes,
        **more,
    }
    return TaskDescriptor(torch.randn(shape, generator=generator), probes.grid, **values)  # type: ignore[arg-type]


def close(a: TaskDescriptor, b: TaskDescriptor) -> None:
    torch.testing.assert_close(a.delta, b.delta, rtol=1e-6, atol=1e-6)


def test_arithmetic_is_that_of_matrices() -> None:
    a, b = descriptor(0), descriptor(1)
    total = 2 * a - b / 4
    assert isinstance(total, TaskDescriptor)
    torch.testing.assert_close(total.delta, 2 * a.delta - b.delta / 4)
    assert [s.coefficient for s in total.sources] == [2.0, -0.25]
    back = (a + b) - b
    assert isinstance(back, TaskDescriptor)
    close(back, a)
    assert back.sources == a.sources
    torch.testing.assert_close(TaskDescriptor.mean([a, b]).delta, (a.delta + b.delta) / 2)
    summed = sum([a, b])
    assert isinstance(summed, TaskDescriptor)
    close(summed, a + b)  # type: ignore[arg-type]
    negated = -a
    close(-negated, a)


def test_norm_and_cosine() -> None:
    a, b = descriptor(0), descriptor(1)
    assert a.norm() == pytest.approx(float(a.delta.norm()))
    assert a.cosine(-2 * a) == pytest.approx(-1.0)
    expected = torch.nn.functional.cosine_similarity(a.delta.flatten(), b.delta.flatten(), dim=0)
    assert a.cosine(b) == pytest.approx(float(expected), abs=1e-6)
    assert a.cosine(0 * b) == 0.0


def test_sums_over_different_grids_keep_their_terms() -> None:
    a, b, c = descriptor(0), descriptor(1, OTHER), descriptor(2)
    total = a + b + c
    assert isinstance(total, DescriptorSum)
    assert [t.grid.fingerprint for t in total] == [PROBES.grid.fingerprint, OTHER.grid.fingerprint]
    torch.testing.assert_close(total.terms[0].delta, a.delta + c.delta)
    halved = -(total / 2)
    torch.testing.assert_close(halved.terms[1].delta, -b.delta / 2)
    less = total - b
    assert isinstance(less, DescriptorSum)
    assert float(less.terms[1].delta.abs().max()) == 0.0
    assert isinstance(sum([a, b]), DescriptorSum)
    assert len(b + total) == 2  # type: ignore[arg-type]


def test_a_sum_keeps_the_base_affinity_only_of_one_base() -> None:
    a, b = descriptor(0), descriptor(1)
    assert (a + b).base_affinity is not None  # type: ignore[union-attr]
    other = descriptor(1, base_affinity=torch.zeros(5, 3), spread=0.3)
    total = a + other
    assert total.base_affinity is None  # type: ignore[union-attr]
    assert total.spread == pytest.approx(0.2)  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None])
def test_refuses_coefficients_that_are_not_finite(value: float) -> None:
    with pytest.raises(PlatonicError, match="`coefficient`"):
        descriptor() * value
    with pytest.raises(PlatonicError, match="other than 0"):
        descriptor() / 0.0


def test_grid_mismatch_names_both_fingerprints() -> None:
    a, b = descriptor(), descriptor(probes=OTHER)
    for call in (lambda: a.cosine(b), lambda: TaskDescriptor.mean([a, b]), lambda: a.with_probes(OTHER)):
        with pytest.raises(GridMismatchError) as caught:
            call()
        assert a.grid.fingerprint[:16] in str(caught.value)
        assert b.grid.fingerprint[:16] in str(caught.value)
        assert "the probes differ (5 against 4" in str(caught.value)
    reordered = PROBES.with_prompts(prompts=["b", "a", "c"])
    with pytest.raises(GridMismatchError, match="the probes agree, the prompts don't"):
        a.with_probes(reordered)


def test_refuses_what_is_no_descriptor() -> None:
    with pytest.raises(PlatonicError, match=r"`delta` of shape \(5, 3\), got \(3, 5\)"):
        TaskDescriptor(torch.zeros(3, 5), PROBES.grid)
    with pytest.raises(PlatonicError, match="finite descriptor"):
        TaskDescriptor(torch.full((5, 3), float("nan")), PROBES.grid)
    with pytest.raises(PlatonicError, match="at least one descriptor"):
        TaskDescriptor.mean([])
    for wrong in (torch.zeros(5, dtype=torch.int64), torch.zeros(5, 1, dtype=torch.int32)):
        with pytest.raises(PlatonicError, match=r"Expected `predictions` of shape \(5,\) in int32, got"):
            descriptor(predictions=wrong)
    for outside in (-1, 3):
        with pytest.raises(PlatonicError, match=r"Expected `predictions` in \[0, 3\)"):
            descriptor(predictions=torch.full((5,), outside, dtype=torch.int32))
    with pytest.raises(TypeError):
        descriptor() + 1  # type: ignore[operator]


def test_saved_and_loaded_is_bit_equal(tmp_path: Path) -> None:
    a = descriptor()
    a.save_pretrained(tmp_path / "d")
    b = TaskDescriptor.from_pretrained(tmp_path / "d")
    assert torch.equal(a.delta, b.delta)
    assert b.base_affinity is not None
    assert a.base_affinity is not None
    assert torch.equal(a.base_affinity, b.base_affinity)
    assert (a.grid, a.sources, a.spread, a.name) == (b.grid, b.sources, b.spread, b.name)
    assert b.probes is None
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["descriptor.safetensors", "descriptor_config.json"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predictions_are_saved_as_whole_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    a = descriptor(predictions=torch.tensor([0, 2, 1, 1, 0], dtype=torch.int32))
    a.save_pretrained(tmp_path, dtype=dtype)
    assert load_file(tmp_path / TENSORS)["predictions"].dtype is torch.int32
    found = TaskDescriptor.from_pretrained(tmp_path).predictions
    assert found is not None
    assert found.tolist() == [0, 2, 1, 1, 0]
    descriptor().save_pretrained(tmp_path)
    assert TaskDescriptor.from_pretrained(tmp_path).predictions is None
    config = json.loads((tmp_path / CONFIG).read_text())
    del config["predictions"]  # as an earlier version wrote it
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert TaskDescriptor.from_pretrained(tmp_path).predictions is None


def test_saving_twice_replaces_and_leaves_other_files_alone(tmp_path: Path) -> None:
    descriptor(0).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    descriptor(1).save_pretrained(tmp_path)
    assert torch.equal(TaskDescriptor.from_pretrained(tmp_path).delta, descriptor(1).delta)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_half_precision_halves_the_file(tmp_path: Path) -> None:
    big = ProbeSet(tiny_images(64), prompts=[f"class {i}" for i in range(64)])
    a = descriptor(probes=big, base_affinity=None)
    a.save_pretrained(tmp_path / "16", dtype=torch.float16)
    b = TaskDescriptor.from_pretrained(tmp_path / "16")
    assert torch.equal(a.delta.half().float(), b.delta)
    assert (tmp_path / "16" / "descriptor.safetensors").stat().st_size < 64 * 64 * 2 + 512
    with pytest.raises(PlatonicError, match=r"float32, float16 or bfloat16, got torch\.float64"):
        a.save_pretrained(tmp_path / "64", dtype=torch.float64)


def test_a_large_descriptor_with_its_references_is_hardly_more_than_its_matrix(tmp_path: Path) -> None:
    n, m = 11_910, 397
    hashes = [f"{i:032x}" for i in range(n)]
    reference = {"repo": "tanganke/sun397", "revision": "0" * 40, "name": None, "split": "train", "column": "image"}
    names, templates = tuple(f"scene number {i}" for i in range(m)), ("a photo of a {}.",)
    grid = Grid(
        digest(["p", list(names), list(templates)]),
        "p",
        n,
        names,
        templates,
        "image",
        {**reference, "indices": [3 * i for i in range(n)], "content_hashes": hashes},
    )
    TaskDescriptor(torch.zeros(n, m), grid).save_pretrained(tmp_path, dtype=torch.float16)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1.05 * 2 * n * m
    assert TaskDescriptor.from_pretrained(tmp_path).grid.reference == grid.reference


def test_probes_travel_by_value_when_asked_to(tmp_path: Path) -> None:
    a = descriptor()
    a.save_pretrained(tmp_path, include_probes=True)
    b = TaskDescriptor.from_pretrained(tmp_path)
    assert b.probes is not None
    assert b.probes.grid == a.grid
    with pytest.raises(PlatonicError, match="isn't at hand"):
        descriptor(probes=PROBES).__class__(a.delta, a.grid).save_pretrained(tmp_path, include_probes=True)


def test_an_interrupted_write_leaves_the_old_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor(0).save_pretrained(tmp_path)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        descriptor(1).save_pretrained(tmp_path)
    assert torch.equal(TaskDescriptor.from_pretrained(tmp_path).delta, descriptor(0).delta)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/x", "a b", "a/b/c", ""])
def test_refuses_names_that_are_neither_folder_nor_repo(name: str) -> None:
    with pytest.raises(HubError, match="Expected a folder or a repo id like 'user/name'"):
        TaskDescriptor.from_pretrained(name)


TENSORS, CONFIG = "descriptor.safetensors", "descriptor_config.json"


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        config.update(changes)
        (folder / CONFIG).write_text(json.dumps(config))

    return edit


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    digest = json.loads((folder / CONFIG).read_text())["digest"]
    tensors = change(load_file(folder / TENSORS))
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / TENSORS, metadata={"digest": digest})


def truncate(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep]) and None


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), "Expected 'descriptor_config.json' in folder"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "Expected 'descriptor.safetensors' in folder"),
    "no folder": (lambda f: shutil.rmtree(f), "in folder .*, but it isn't there. Check the path"),
    "truncated config": (truncate(CONFIG, 40), "Expected JSON"),
    "truncated tensors": (truncate(TENSORS, 200), "whole safetensors file"),
    "truncated header": (truncate(TENSORS, 5), "whole safetensors file"),
    "empty tensors": (truncate(TENSORS, 0), "whole safetensors file"),
    "oversized tensors": (
        lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes() + b"more") and None,
        "whole safetensors file",
    ),
    "huge header": (
        lambda f: (f / TENSORS).write_bytes((2**60).to_bytes(8, "little") + b"{}") and None,
        "whole safetensors file",
    ),
    "a pickle": (lambda f: (f / TENSORS).write_bytes(pickle.dumps({"delta": 1})) and None, "whole safetensors file"),
    "a foreign tensor": (lambda f: rewrite(f, lambda t: {"weight": t["delta"]}), "Expected tensors .*, got .'weight'"),
    "a wrong shape": (lambda f: rewrite(f, lambda t: {k: v.T for k, v in t.items()}), r"shape \(5, 3\) .*\(3, 5\)"),
    "a wrong dtype": (lambda f: rewrite(f, lambda t: {k: v.double() for k, v in t.items()}), "in float32 in .*F64"),
    "another dtype": (lambda f: rewrite(f, lambda t: {k: v.half() for k, v in t.items()}), "in float32 .*float16"),
    "NaN": (lambda f: rewrite(f, lambda t: {k: v * float("nan") for k, v in t.items()}), "finite descriptor"),
    "another save's tensors": (edit_config(digest="0"), "different saves"),
    "a newer schema": (
        edit_config(schema_version=SCHEMA_VERSION + 1, library_version="9.9.0"),
        "schema 1 or older .*, got 2. Install hf-platonic 9.9.0 or newer",
    ),
    "no schema": (edit_config(schema_version="1"), "`schema_version`"),
    "a list for a config": (lambda f: (f / CONFIG).write_text("[]") and None, "`schema_version`"),
    "a wrong grid": (edit_config(grid={}), "doesn't parse"),
    "a spread that isn't finite": (edit_config(spread=float("nan")), "doesn't parse"),
    "sources that aren't": (edit_config(sources=[{}]), "doesn't parse"),
    "a giant grid": (lambda f: edit_config(grid={**_grid(f), "n": 10**15})(f), "shape"),
}


def _grid(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / CONFIG).read_text())["grid"])


@pytest.mark.parametrize("case", BROKEN)
def test_refuses_broken_folders(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    descriptor().save_pretrained(folder)
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(DescriptorFormatError, match=message):
        TaskDescriptor.from_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: rewrite(f, lambda t: {**t, "predictions": t["predictions"].long()}), "`predictions` in int32"),
        (lambda f: rewrite(f, lambda t: {**t, "predictions": t["predictions"].float()}), "`predictions` in int32"),
        (lambda f: rewrite(f, lambda t: {**t, "predictions": t["predictions"][:4]}), r"of shape \(5,\) .*\(4,\)"),
        (lambda f: rewrite(f, lambda t: {**t, "predictions": t["predictions"] + 7}), r"`predictions` in \[0, 3\)"),
        (lambda f: rewrite(f, lambda t: {k: v for k, v in t.items() if k != "predictions"}), "Expected tensors"),
        (edit_config(predictions=False), "Expected tensors"),
    ],
)
def test_refuses_broken_predictions(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    descriptor(predictions=torch.zeros(5, dtype=torch.int32)).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(DescriptorFormatError, match=message):
        TaskDescriptor.from_pretrained(tmp_path)
