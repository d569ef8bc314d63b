"""Decoding of pictures and clips, in all the forms that data sets hand over."""

import hashlib
import io
import sys

import numpy as np
import pytest
from PIL import Image

from hf_platonic.encoders.media import Audio, content_hash, decode_audio, decode_image, modality_of
from hf_platonic.errors import ProbeError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def values(probe):
    image = decode_image(probe)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_forms_of_one_image_agree(tmp_path):
    image = Image.fromarray(PIXELS)
    path = tmp_path / "x.png"
    image.save(path)
    for form in (
        image,
        PIXELS,
        PIXELS[::-1].copy()[::-1],
        PIXELS.astype(np.int64),
        PIXELS / 255.0,
        (PIXELS / 255.0).astype(np.float32),
        PIXELS.astype(np.uint16) * 257,
        encoded(image),
        bytearray(encoded(image)),
        path,
        str(path),
        {"bytes": encoded(image), "path": None},
        {"bytes": None, "path": str(path)},
    ):
        np.testing.assert_array_equal(values(form), PIXELS)


def test_grey_becomes_three_equal_channels():
    grey = PIXELS[:, :, 0]
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    for form in (grey, grey[:, :, None], Image.fromarray(grey)):
        np.testing.assert_array_equal(values(form), expected)
    np.testing.assert_array_equal(values(np.eye(3, dtype=bool))[:, :, 0], 255 * np.eye(3, dtype=np.uint8))
    np.testing.assert_array_equal(values(Image.fromarray(np.eye(3, dtype=bool)))[:, :, 0], 255 * np.eye(3))


def test_transparency_lies_over_white():
    alpha = np.full((6, 5, 1), 128, dtype=np.uint8)
    alpha[0], alpha[1] = 0, 255
    rgba = np.concatenate([PIXELS, alpha], axis=2)
    expected = PIXELS * (alpha / 255.0) + 255.0 * (1 - alpha / 255.0)
    for form in (rgba, Image.fromarray(rgba), encoded(Image.fromarray(rgba))):
        np.testing.assert_allclose(values(form), expected, atol=1)
    assert (values(rgba)[0] == 255).all()
    np.testing.assert_array_equal(values(rgba)[1], PIXELS[1])


def test_grey_with_alpha_and_transparent_palettes():
    grey = np.full((4, 4), 40, dtype=np.uint8)
    alpha = np.zeros((4, 4), dtype=np.uint8)
    alpha[:2] = 255
    la = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    pixels = values(la)
    assert (pixels[:2] == 40).all()
    assert (pixels[2:] == 255).all()
    palette = Image.new("P", (4, 2), 0)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.paste(1, (0, 0, 2, 2))
    opaque = values(palette)
    assert opaque[0, 0].tolist() == [200, 100, 50]
    assert opaque[0, 3].tolist() == [10, 20, 30]
    clear = values(encoded(palette, transparency=0))
    assert clear[0, 0].tolist() == [200, 100, 50]
    assert clear[0, 3].tolist() == [255, 255, 255]
    colour_key = encoded(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3))
    assert (values(colour_key) == 255).all()
    assert (values(palette.convert("PA"))[0, 0] == [200, 100, 50]).all()


def test_sixteen_bits_are_scaled_and_not_clipped():
    deep = np.array([[0, 257, 65535, 12850]], dtype=np.uint16)
    expected = [0, 1, 255, 50]
    for form in (deep, Image.fromarray(deep), encoded(Image.fromarray(deep)), Image.fromarray(deep.astype(np.int32))):
        assert values(form)[0, :, 1].tolist() == expected
    assert values(Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32)))[0, :, 0].tolist() == [0, 255]


def test_cmyk_and_other_colour_spaces():
    assert np.abs(values(Image.new("CMYK", (2, 2), (0, 255, 255, 0))).astype(int) - [255, 0, 0]).max() <= 1
    assert (
        np.abs(values(Image.new("RGB", (2, 2), (10, 200, 30)).convert("YCbCr")).astype(int) - [10, 200, 30]).max() < 3
    )


def test_exif_orientation_is_applied():
    image = Image.fromarray(PIXELS)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_image(encoded(image, exif=exif))
    assert turned.size == (6, 5)
    np.testing.assert_array_equal(np.asarray(turned), np.rot90(PIXELS, k=-1))


def test_decoding_makes_a_new_image():
    image = Image.fromarray(PIXELS)
    decode_image(image).putpixel((0, 0), (0, 0, 0))
    np.testing.assert_array_equal(np.asarray(image), PIXELS)


def test_first_frame_of_an_animation():
    frames = [Image.new("P", (4, 4), i) for i in (0, 1)]
    for frame in frames:
        frame.putpalette([0, 0, 255, 255, 0, 0])
    assert values(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))[0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7])
def test_truncated_images_are_named(kind, keep):
    data = encoded(Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)), kind)
    with pytest.raises(ProbeError, match=r"readable image for probe 7, got \d+ bytes") as caught:
        decode_image(data[: int(keep * len(data))], index=7)
    assert caught.value.index == 7
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((3, 6, 5), dtype=np.uint8), "channels last"),
        (np.zeros((6, 5, 2), dtype=np.uint8), "channels last"),
        (np.zeros((0, 5, 3), dtype=np.uint8), "channels last"),
        (np.full((4, 4), 255.0), r"floats in \[0, 1\]"),
        (np.full((4, 4), np.nan), r"floats in \[0, 1\]"),
        (np.full((4, 4), -1), "integers in"),
        (np.zeros((4, 4), dtype=complex), "expected uint8"),
        (Image.fromarray(np.full((2, 2), -1, dtype=np.int32)), "16-bit"),
        (Image.new("RGB", (0, 4)), "probe 3"),
        (b"not an image", "cannot identify"),
    ],
)
def test_bad_images_are_explained(bad, message):
    with pytest.raises(ProbeError, match=message) as caught:
        decode_image(bad, index=3)
    assert caught.value.index == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"label": 1}, 'dict with "bytes", "path" or "array"'),
        ("missing.png", "readable file"),
        (5, "image .*or an audio clip"),
        (None, "NoneType"),
    ],
)
def test_things_that_are_neither(bad, message):
    with pytest.raises(ProbeError, match=f"(?s)probe 2.*{message}") as caught:
        decode_image(bad, index=2)
    assert caught.value.index == 2


def test_wrong_modality():
    with pytest.raises(ProbeError, match="Expected an image probe, got an audio clip for probe 0"):
        decode_image((np.zeros(8), 8000), index=0)
    with pytest.raises(ProbeError, match="Expected an audio probe, got an image"):
        decode_audio(PIXELS)


SAMPLES = np.sin(np.arange(800) / 7.0).astype(np.float32)


def sound(samples=SAMPLES, rate=8000, **options):
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, **{"format": "WAV", "subtype": "FLOAT", **options})
    return buffer.getvalue()


class Decoded:
    """What `datasets` hands over for an audio column when torchcodec is there: the methods used, nothing else."""

    def get_all_samples(self):
        return type("Samples", (), {"data": np.stack([SAMPLES, SAMPLES]), "sample_rate": 8000})()


def test_forms_of_one_clip_agree(tmp_path):
    path = tmp_path / "x.wav"
    path.write_bytes(sound())
    for form in (
        Audio(SAMPLES, 8000),
        (SAMPLES, 8000),
        (SAMPLES.astype(np.float64), np.int64(8000)),
        (SAMPLES.tolist(), 8000.0),
        {"array": SAMPLES, "sampling_rate": 8000, "path": None},
        {"array": np.stack([SAMPLES, SAMPLES]), "sampling_rate": 8000},
        {"array": np.stack([SAMPLES, SAMPLES], axis=1), "sampling_rate": 8000},
        Decoded(),
        sound(),
        path,
        str(path),
        {"bytes": sound(), "path": "x.wav"},
        {"bytes": None, "path": str(path)},
        sound(np.stack([SAMPLES, SAMPLES], axis=1)),
    ):
        assert modality_of(form) == "audio"
        clip = decode_audio(form)
        assert clip.sampling_rate == 8000
        assert clip.array.dtype == np.float32
        np.testing.assert_array_equal(clip.array, SAMPLES)


def test_channels_are_averaged_and_integers_scaled():
    left, right = np.array([0.5, -0.5, 0.25], dtype=np.float32), np.array([0.0, 0.5, 0.75], dtype=np.float32)
    np.testing.assert_array_equal(decode_audio((np.stack([left, right]), 8000)).array, [0.25, 0.0, 0.5])
    np.testing.assert_array_equal(decode_audio((np.array([-32768, 16384], dtype=np.int16), 8000)).array, [-1.0, 0.5])
    np.testing.assert_array_equal(decode_audio((np.array([0, 128], dtype=np.uint8), 8000)).array, [-1.0, 0.0])
    np.testing.assert_array_equal(decode_audio((np.array([2**30], dtype=np.int32), 8000)).array, [0.5])


@pytest.mark.parametrize("kind", ["FLAC", "OGG"])
def test_other_containers(kind):
    clip = decode_audio(sound(format=kind, subtype=None))
    assert clip.sampling_rate == 8000
    np.testing.assert_allclose(clip.array, SAMPLES, atol=0.05)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SAMPLES, "sampling rate in Hz for probe 4, got None"),
        ((SAMPLES, 0), "sampling rate in Hz for probe 4, got 0"),
        ((SAMPLES, 8000.5), "got 8000.5"),
        ((SAMPLES, True), "got True"),
        ((SAMPLES, "8000"), "got '8000'"),
        ((SAMPLES, float("inf")), "got inf"),
        ({"array": SAMPLES, "sampling_rate": "fast"}, "got 'fast'"),
        ({"array": SAMPLES}, "got None"),
        ((np.zeros(0, dtype=np.float32), 8000), "got an empty one"),
        ((np.array([0.0, np.inf]), 8000), "infinite samples"),
        ((np.zeros((40, 40)), 8000), "at most 16 channels"),
        ((np.zeros((1, 1, 9)), 8000), "samples of shape"),
        ((np.zeros(4, dtype=complex), 8000), "got complex128"),
        ((np.zeros(4, dtype=np.int64), 8000), "got int64"),
        (b"RIFF1234WAVEnothing", "readable clip for probe 4, got 19 bytes"),
    ],
)
def test_bad_clips_are_explained(bad, message):
    with pytest.raises(ProbeError, match=message) as caught:
        decode_audio(bad, index=4)
    assert caught.value.index == 4


def test_encoded_audio_without_soundfile_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ImportError, match="pip install soundfile"):
        decode_audio(b"RIFF1234WAVEnothing")


def test_content_hash_sees_content_only():
    image = decode_image(PIXELS)
    assert content_hash(image) == content_hash(decode_image(encoded(Image.fromarray(PIXELS))))
    assert len(content_hash(image)) == 32
    assert content_hash(decode_image(PIXELS.reshape(5, 6, 3))) != content_hash(image)
    changed = PIXELS.copy()
    changed[0, 0, 0] ^= 1
    assert content_hash(decode_image(changed)) != content_hash(image)
    clip = Audio(SAMPLES, 8000)
    assert content_hash(clip) == content_hash(decode_audio(sound()))
    assert content_hash(Audio(SAMPLES, 16000)) != content_hash(clip)
    assert content_hash(Audio(-SAMPLES, 8000)) != content_hash(clip)


def test_content_hash_is_pinned():
    def digest(text):
        return hashlib.sha256(text).hexdigest()[:32]

    assert content_hash(decode_image(np.zeros((1, 2, 3), dtype=np.uint8))) == digest(b"image:RGB:2x1:" + bytes(6))
    assert content_hash(Audio(np.array([0.5], dtype=np.float32), 8000)) == digest(b"audio:8000:1:" + b"\0\0\0?")
