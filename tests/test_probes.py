"""Probe sets: order, prompts, fingerprints, sources, files."""

import doctest
import gc
import hashlib
import io
import json

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny import tiny_clips, tiny_encoder, tiny_images

from hf_platonic import _hashes, grid, probe_sources
from hf_platonic import probes as probes_module
from hf_platonic.encoders.media import Audio, content_hash
from hf_platonic.errors import DescriptorFormatError, GridMismatchError, ProbeError, PromptError
from hf_platonic.probes import Grid, ProbeSet

NAMES = ("cat", "dog")
TEMPLATES = ("a photo of a {}.", "one {}")


def images(n=4, **more):
    return ProbeSet(tiny_images(n), class_names=NAMES, templates=TEMPLATES, **more)


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def image_dataset(n=6):
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"picture": [{"bytes": png(i), "path": None} for i in tiny_images(n)], "label": list(range(n))}
    return datasets.Dataset.from_dict(rows, features=features)


def test_an_ordered_set_with_prompts():
    pictures = tiny_images(3)
    probes = ProbeSet(pictures, class_names=NAMES, templates=TEMPLATES)
    assert (len(probes), probes.modality) == (3, "image")
    assert probes.class_names == NAMES
    assert probes.prompts == ("a photo of a cat.", "a photo of a dog.")
    assert probes.columns == (("a photo of a cat.", "one cat"), ("a photo of a dog.", "one dog"))
    assert [np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(probes, pictures, strict=True)] == [True] * 3
    assert [content_hash(p) for p in probes[1:]] == list(probes.content_hashes[1:])
    assert content_hash(probes[-1]) == content_hash(probes[2])
    assert repr(probes) == "ProbeSet(3 image probes, 2 prompts)"
    with pytest.raises(IndexError, match="below 3, got 3"):
        probes[3]


def test_a_set_can_be_encoded_whole():
    encoder = tiny_encoder()
    whole = encoder.encode_probes(images())
    assert torch.equal(whole.unit, encoder.encode_probes(tiny_images()).unit)
    with pytest.raises(ProbeError, match="non-empty list of image probes, got ndarray"):
        encoder.encode_probes(np.zeros((2, 8, 8, 3)))


def test_the_callers_list_may_change_afterwards():
    pictures = tiny_images(3)
    probes = ProbeSet(pictures, prompts=["a", "b"])
    pictures.pop()
    assert len(probes) == 3


def test_prompts_are_short_for_names_in_the_plain_template():
    short, long = ProbeSet(tiny_images(1), prompts=["a cat"]), ProbeSet(tiny_images(1), class_names=["a cat"])
    assert short.grid == long.grid
    assert short.templates == ("{}",)


def test_names_with_braces_are_only_text():
    probes = ProbeSet(tiny_images(1), class_names=["{0}", "{}"], templates=["the sign {}"])
    assert probes.prompts == ("the sign {0}", "the sign {}")


def test_fingerprint_follows_order_content_and_prompts():
    base = images().grid
    assert base == images().grid
    assert (base.n, base.m, base.modality, base.reference) == (4, 2, "image", None)
    assert base.prompts == images().prompts
    assert base.columns == images().columns
    others = [
        images(3),
        images().select([1, 0, 2, 3]),
        ProbeSet(tiny_images(4, seed=1), class_names=NAMES, templates=TEMPLATES),
        images().with_prompts(class_names=NAMES[::-1], templates=TEMPLATES),
        images().with_prompts(class_names=NAMES, templates=TEMPLATES[::-1]),
        images().with_prompts(class_names=NAMES, templates=TEMPLATES[:1]),
    ]
    prints = [other.grid.fingerprint for other in others]
    assert len({base.fingerprint, *prints}) == 7
    of_probes = [other.grid.probe_fingerprint == base.probe_fingerprint for other in others]
    assert of_probes == [False, False, False, True, True, True]


def test_fingerprint_is_the_same_for_every_form():
    pictures = tiny_images(3)
    forms = [pictures, [np.asarray(p) for p in pictures], [png(p) for p in pictures]]
    prints = {ProbeSet(form, prompts=["a", "b"]).grid.fingerprint for form in forms}
    assert len(prints) == 1
    hashes = [content_hash(p) for p in pictures]
    text = json.dumps(["image", hashes], separators=(",", ":"))
    of_probes = hashlib.sha256(text.encode()).hexdigest()[:32]
    text = json.dumps([of_probes, ["a", "b"], ["{}"]], separators=(",", ":"))
    assert prints == {hashlib.sha256(text.encode()).hexdigest()[:32]}


def test_hashes_are_computed_once():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    source = Counting(png(p) for p in tiny_images(4))
    probes = ProbeSet(probe_sources.Rows(source, range(4), "image"), prompts=["a", "b"])
    assert source.reads == 0
    probes[2]
    assert probes.grid == probes.grid
    assert probes.with_prompts(prompts=["c"]).grid.probe_fingerprint == probes.select(range(4)).grid.probe_fingerprint
    assert source.reads == 4


def test_select_keeps_prompts_and_checks_rows():
    probes = images(4)
    picked = probes.select(np.array([3, 1]))
    assert picked.content_hashes == (probes.content_hashes[3], probes.content_hashes[1])
    assert picked.select([1]).content_hashes == (probes.content_hashes[1],)
    assert picked.columns == probes.columns
    for bad, message in (([4], "got 4"), ([-1], "got -1"), ([], "got none")):
        with pytest.raises(ProbeError, match=f"from 0 to 3, {message}"):
            probes.select(bad)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "`class_names` or `prompts`, got neither"),
        ({"prompts": ["a"], "class_names": ["a"]}, "got both"),
        ({"prompts": ["a"], "templates": ["the {}"]}, "no `templates` beside `prompts`"),
        ({"prompts": []}, "at least one entry in `prompts`"),
        ({"class_names": []}, "at least one entry in `class_names`"),
        ({"class_names": ["a"], "templates": []}, "at least one entry in `templates`"),
        ({"class_names": ["a"], "templates": "{}"}, "`templates` to be a list of strings, got '{}'"),
        ({"prompts": "a cat"}, "`prompts` to be a list of strings"),
        ({"prompts": ["a", " "]}, "non-empty string in `prompts`, got ' ' at position 1"),
        ({"prompts": ["a", 3]}, "got 3 at position 1"),
        ({"class_names": ["a", "b", "a"]}, "different entries in `class_names`, got 'a' at positions 0 and 2"),
        ({"prompts": ["a", "a"]}, "different entries in `prompts`"),
        (
            {"class_names": ["a"], "templates": ["{}", "photo"]},
            '"{}" for the class name in every template, got .photo',
        ),
        ({"class_names": ["a"], "templates": ["{}", "{}"]}, "different entries in `templates`"),
    ],
)
def test_bad_prompts(kwargs, message):
    with pytest.raises(PromptError, match=message):
        ProbeSet(tiny_images(1), **kwargs)


@pytest.mark.parametrize("bad", [[], "x.png", b"x", {"image": 1}, None, 3, iter([1])])
def test_inputs_must_be_a_filled_sequence(bad):
    with pytest.raises(ProbeError, match="non-empty sequence of probes"):
        ProbeSet(bad, prompts=["a"])


def test_mixed_and_strange_inputs_are_named():
    with pytest.raises(ProbeError, match=r"got a Dataset. Use ProbeSet.from_dataset"):
        ProbeSet(image_dataset(), prompts=["a"])
    with pytest.raises(ProbeError, match="one modality, got audio for probe 2 after image") as caught:
        ProbeSet([*tiny_images(2), *tiny_clips(1)], prompts=["a"])
    assert caught.value.index == 2
    with pytest.raises(ProbeError, match="probe 1.*got int") as caught:
        ProbeSet([tiny_images(1)[0], 5], prompts=["a"])
    assert caught.value.index == 1
    broken = ProbeSet([png(tiny_images(1)[0]), png(tiny_images(1)[0])[:60]], prompts=["a"])
    with pytest.raises(ProbeError, match="readable image for probe 1"):
        broken.grid  # noqa: B018


def test_from_a_dataset_of_images():
    probes = ProbeSet.from_dataset(image_dataset(), prompts=["a", "b"])
    assert probes.content_hashes == ProbeSet(tiny_images(6), prompts=["a", "b"]).content_hashes
    assert probes.grid.reference is None
    picked = ProbeSet.from_dataset(image_dataset(), prompts=["a"], indices=[4, 0], column="picture")
    assert picked.content_hashes == (probes.content_hashes[4], probes.content_hashes[0])
    formatted = ProbeSet.from_dataset(image_dataset().with_format("numpy"), prompts=["a", "b"])
    assert formatted.content_hashes == probes.content_hashes


def test_a_dataset_is_read_when_asked_for():
    features = datasets.Features({"image": datasets.Image()})
    rows = [{"bytes": png(tiny_images(1)[0]), "path": None}, {"bytes": b"broken", "path": None}]
    probes = ProbeSet.from_dataset(datasets.Dataset.from_dict({"image": rows}, features=features), prompts=["a"])
    assert probes[0].size == (20, 24)
    with pytest.raises(ProbeError, match="probe 1, got 6 bytes"):
        probes[1]


def test_sampling_is_uniform_seeded_and_blind_to_labels():
    data = image_dataset(40)

    def rows(**more):
        probes = ProbeSet.from_dataset(data, prompts=["a"], **more)
        everything = ProbeSet.from_dataset(data, prompts=["a"]).content_hashes
        return [everything.index(h) for h in probes.content_hashes]

    drawn = rows(n=10)
    assert drawn == sorted(np.random.default_rng(42).choice(40, 10, replace=False).tolist())
    assert drawn == rows(n=10, seed=42)
    assert drawn != rows(n=10, seed=1)
    assert rows(n=40) == list(range(40))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n": 3, "indices": [0]}, "`indices` or `n`, got both"),
        ({"n": 7}, "`n` from 1 to 6, the rows there are, got 7"),
        ({"n": 0}, "got 0"),
        ({"indices": [6]}, "from 0 to 5, got 6"),
        ({"column": "image"}, r"one of \['label', 'picture'\], got 'image'"),
        ({"column": "label"}, "got int"),
    ],
)
def test_bad_dataset_arguments(kwargs, message):
    with pytest.raises(ProbeError, match=message):
        ProbeSet.from_dataset(image_dataset(), prompts=["a"], **kwargs)


def test_a_dataset_must_be_one_split_with_one_column_and_rows():
    data = image_dataset()
    two = datasets.concatenate_datasets([data, data.rename_columns({"picture": "second", "label": "other"})], axis=1)
    with pytest.raises(ProbeError, match=r"one split, got \['train'\]"):
        ProbeSet.from_dataset(datasets.DatasetDict(train=data), prompts=["a"])
    with pytest.raises(ProbeError, match="with rows, got an empty one"):
        ProbeSet.from_dataset(data.to_iterable_dataset().take(0), prompts=["a"])
    untyped = datasets.IterableDataset.from_generator(lambda: iter([{"picture": 1}]))
    with pytest.raises(ProbeError, match="knows its features, got one without"):
        ProbeSet.from_dataset(untyped, prompts=["a"])
    with pytest.raises(ProbeError, match="datasets.Dataset, got list"):
        ProbeSet.from_dataset([1], prompts=["a"])
    with pytest.raises(ProbeError, match=r"got \['picture', 'second'\]"):
        ProbeSet.from_dataset(two, prompts=["a"])
    with pytest.raises(ProbeError, match=r"got none among \['label'\]"):
        ProbeSet.from_dataset(data.select_columns(["label"]), prompts=["a"])
    with pytest.raises(ProbeError, match="with rows, got an empty one"):
        ProbeSet.from_dataset(data.select([]), prompts=["a"])


def test_streaming_gives_the_same_probes_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = image_dataset()
    whole = ProbeSet.from_dataset(data, prompts=["a"]).content_hashes
    probes = ProbeSet.from_dataset(data.to_iterable_dataset(), prompts=["a"])
    assert probes.content_hashes == whole
    drawn = ProbeSet.from_dataset(data.to_iterable_dataset().take(4), prompts=["a"], indices=[3, 1])
    assert drawn.content_hashes == (whole[3], whole[1])
    assert len(list(tmp_path.iterdir())) == 2
    picked = probes.select([2])
    del probes, drawn
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1  # still needed by what was picked
    assert ProbeSet([picked[0]], prompts=["a"]).content_hashes == (whole[2],)
    del picked
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_streamed_files_beside_the_data_come_in_too(tmp_path):
    for index, image in enumerate(tiny_images(3)):
        image.save(tmp_path / f"{index}.jpg", quality=30)
    options = {"data_dir": str(tmp_path), "split": "train"}
    stream = datasets.load_dataset("imagefolder", streaming=True, **options)
    loaded = datasets.load_dataset("imagefolder", cache_dir=str(tmp_path / "cache"), **options)
    hashes = [ProbeSet.from_dataset(data, prompts=["a"]).content_hashes for data in (stream, loaded)]
    assert hashes[0] == hashes[1]


def wav(clip):
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, clip.array, clip.sampling_rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def test_from_a_dataset_of_audio_files(tmp_path):
    clips = tiny_clips(3)
    expected = ProbeSet(clips, prompts=["a"]).content_hashes
    paths = []
    for position, clip in enumerate(clips):
        paths.append(str(tmp_path / f"{position}.wav"))
        (tmp_path / f"{position}.wav").write_bytes(wav(clip))
    files = datasets.Dataset.from_dict({"clip": paths})
    typed = files.cast_column("clip", datasets.Audio())
    assert ProbeSet.from_dataset(typed, prompts=["a"]).content_hashes == expected
    undecoded = files.cast_column("clip", datasets.Audio(decode=False))
    assert ProbeSet.from_dataset(undecoded, prompts=["a"]).content_hashes == expected
    assert ProbeSet.from_dataset(files, prompts=["a"], column="clip").content_hashes == expected
    stored = datasets.Dataset.from_dict({"audio": [{"bytes": wav(c), "path": None} for c in clips]})
    assert ProbeSet.from_dataset(stored, prompts=["a"]).content_hashes == expected


def test_from_a_dataset_of_samples():
    clips = tiny_clips(3)
    features = datasets.Features(
        {"audio": {"array": datasets.List(datasets.Value("float32")), "sampling_rate": datasets.Value("int32")}}
    )
    rows = [{"array": c.array, "sampling_rate": c.sampling_rate} for c in clips]
    data = datasets.Dataset.from_dict({"audio": rows}, features=features)
    probes = ProbeSet.from_dataset(data, prompts=["a"])
    assert probes.modality == "audio"
    assert probes.content_hashes == ProbeSet(clips, prompts=["a"]).content_hashes


@pytest.mark.parametrize("make", [tiny_images, tiny_clips])
def test_a_saved_set_comes_back_bit_equal(make, tmp_path):
    probes = ProbeSet(make(70 if make is tiny_images else 5), class_names=["caf\u00e9", "dog"], templates=TEMPLATES)
    probes.save_pretrained(tmp_path / "a" / "b")
    loaded = ProbeSet.from_pretrained(tmp_path / "a" / "b")
    assert loaded.grid == probes.grid
    assert loaded.columns == probes.columns
    for got, wanted in zip(loaded, probes, strict=True):
        if isinstance(wanted, Audio):
            assert got.sampling_rate == wanted.sampling_rate
            np.testing.assert_array_equal(got.array, wanted.array)
        else:
            np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["probes.parquet", "probes_config.json"]


def test_saved_rows_are_an_ordinary_dataset(tmp_path):
    images(3).save_pretrained(tmp_path / "probes")
    data = datasets.Dataset.from_parquet(str(tmp_path / "probes" / "probes.parquet"), cache_dir=str(tmp_path / "c"))
    assert isinstance(data.features["image"], datasets.Image)
    assert ProbeSet.from_dataset(data, class_names=NAMES, templates=TEMPLATES).grid == images(3).grid


def test_saving_again_replaces_the_set_and_nothing_else(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    images(4).save_pretrained(tmp_path)
    images(2).save_pretrained(tmp_path)
    assert len(ProbeSet.from_pretrained(tmp_path)) == 2
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_failed_save_keeps_the_old_set(tmp_path):
    images(3).save_pretrained(tmp_path)
    broken = ProbeSet([*tiny_images(2), png(tiny_images(1)[0])[:60]], prompts=["a"])
    with pytest.raises(ProbeError, match="probe 2"):
        broken.save_pretrained(tmp_path)
    assert ProbeSet.from_pretrained(tmp_path).grid == images(3).grid
    assert len(list(tmp_path.iterdir())) == 2


def edit(folder, **changes):
    path = folder / "probes_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_damaged_folders_are_refused(tmp_path):
    images(3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "probes_config.json").read_text())
    edit(tmp_path, schema_version=99, library_version="9.9")
    with pytest.raises(
        DescriptorFormatError, match=r"schema 1 or older .* got 99\. Install hf-platonic 9\.9 or newer"
    ):
        ProbeSet.from_pretrained(tmp_path)
    edit(tmp_path, schema_version=1, grid={**config["grid"], "class_names": ["cow", "dog"]})
    with pytest.raises(DescriptorFormatError, match="grid fingerprint .*edited"):
        ProbeSet.from_pretrained(tmp_path)
    edit(tmp_path, grid={"n": 3})
    with pytest.raises(DescriptorFormatError, match=r"grid with the fields"):
        ProbeSet.from_pretrained(tmp_path)
    hashes = [*config["content_hashes"]]
    hashes[1] = "0" * 32
    edit(tmp_path, grid=config["grid"], content_hashes=hashes)
    with pytest.raises(GridMismatchError, match=f"hash {'0' * 32} for probe 1 of probes.parquet"):
        ProbeSet.from_pretrained(tmp_path)
    edit(tmp_path, content_hashes=hashes[:2])
    with pytest.raises(DescriptorFormatError, match="Expected 3 `content_hashes`"):
        ProbeSet.from_pretrained(tmp_path)
    del config["content_hashes"]
    (tmp_path / "probes_config.json").write_text(json.dumps(config))
    with pytest.raises(DescriptorFormatError, match="neither content hashes nor a reference"):
        ProbeSet.from_pretrained(tmp_path)
    (tmp_path / "probes_config.json").write_text("{")
    with pytest.raises(DescriptorFormatError, match=r"Expected JSON"):
        ProbeSet.from_pretrained(tmp_path)
    with pytest.raises(DescriptorFormatError, match=r"Expected 'probes_config.json' in folder"):
        ProbeSet.from_pretrained(tmp_path / "none")


def test_damaged_rows_are_refused(tmp_path):
    images(3).save_pretrained(tmp_path)
    path = tmp_path / "probes.parquet"
    whole = path.read_bytes()
    pq.write_table(pq.read_table(path).slice(0, 2), path)
    with pytest.raises(DescriptorFormatError, match=r"Expected 3 probes in .*probes.parquet, got 2"):
        ProbeSet.from_pretrained(tmp_path)
    images(3).save_pretrained(tmp_path / "zstd")
    pq.write_table(pq.read_table(tmp_path / "zstd" / "probes.parquet"), tmp_path / "zstd" / "probes.parquet")
    with pytest.raises(DescriptorFormatError, match="plain, uncompressed pages"):
        ProbeSet.from_pretrained(tmp_path / "zstd")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DescriptorFormatError, match="probes in .*probes.parquet, got Arrow"):
        ProbeSet.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(DescriptorFormatError, match="got FileNotFoundError"):
        ProbeSet.from_pretrained(tmp_path)


def test_a_grid_survives_json():
    grid = images().grid
    again = Grid.from_dict(json.loads(json.dumps(grid.to_dict())))
    assert again == grid
    assert again.templates == TEMPLATES


REFERENCE = {"repo": "me/cats", "revision": "a" * 40, "name": None, "split": "train", "column": "image"}


def test_a_reference_follows_selections_and_is_not_compared(tmp_path):
    probes = images(4, reference={**REFERENCE, "indices": [10, 20, 30, 40]})
    reference = probes.select([3, 1]).grid.reference
    assert reference["indices"] == [40, 20]
    assert reference["content_hashes"] == [probes.content_hashes[3], probes.content_hashes[1]]
    assert probes.grid == images(4).grid
    probes.save_pretrained(tmp_path)
    assert ProbeSet.from_pretrained(tmp_path).grid.reference == probes.grid.reference
    assert Grid.from_dict(json.loads(json.dumps(probes.grid.to_dict()))).reference == probes.grid.reference


def test_a_grid_without_a_reference_says_what_to_do():
    with pytest.raises(GridMismatchError, match=r"none for grid .*ProbeSet.from_pretrained"):
        ProbeSet.from_reference(images().grid)
    with pytest.raises(DescriptorFormatError, match=r"reference with \['content_hashes', 'indices'\]"):
        ProbeSet.from_reference(REFERENCE, prompts=["a"])


def test_an_unknown_data_set_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ProbeError, match="(?s)find the data set 'me/none' at 'main'.*full commit hash") as caught:
        ProbeSet.from_hub("me/none", split="train", revision="main", prompts=["a"])
    assert caught.value.__cause__ is not None


def test_the_example_in_the_class_runs():
    assert all(doctest.testmod(module).failed == 0 for module in (probes_module, grid, _hashes))


def test_a_png_is_stored_as_it_was_decoded(tmp_path):
    rgba = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8))
    probes = ProbeSet([rgba], prompts=["a"])
    probes.save_pretrained(tmp_path)
    assert ProbeSet.from_pretrained(tmp_path).content_hashes == probes.content_hashes
