"""Rendered images with captions: coloured objects on textured grounds, and typeset or drawn glyphs.

The six image models of the playground were pre-trained on pictures of this module, and seven of its eight image
tasks are drawn by it. Everything is numpy and Pillow, seeded through the generator that the caller passes, and
takes about 0.6 ms a picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 40
"""Side of a rendered picture in pixels."""

_CANVAS = 2 * SIDE

_OBJECT_RGB = {
    "red": (225, 40, 40),
    "green": (60, 190, 60),
    "blue": (60, 90, 235),
    "yellow": (240, 220, 50),
    "purple": (150, 60, 190),
    "pink": (250, 150, 195),
    "white": (245, 245, 245),
    "turquoise": (70, 225, 215),
}
_GROUND_RGB = {
    "black": (22, 22, 22),
    "grey": (118, 118, 118),
    "navy": (22, 30, 95),
    "maroon": (100, 22, 40),
    "teal": (15, 95, 95),
    "khaki": (150, 135, 85),
    "chocolate": (95, 58, 25),
}
_RADIUS = {"tiny": 5.2, "small": 7.4, "large": 10.6, "huge": 15.0}
_CENTRE = {
    "centre": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "top": (0, -1),
    "bottom": (0, 1),
    "top left": (-1, -1),
    "top right": (1, -1),
    "bottom left": (-1, 1),
    "bottom right": (1, 1),
}

FACTORS: dict[str, tuple[str, ...]] = {
    "kind": ("single", "group", "digit", "letter"),
    "shape": ("circle", "square", "triangle", "star", "cross", "ring", "crescent", "heart"),
    "colour": tuple(_OBJECT_RGB),
    "size": tuple(_RADIUS),
    "position": tuple(_CENTRE),
    "count": ("one", "two", "three", "four", "five"),
    "texture": ("plain", "striped", "dotted", "chequered", "grainy", "shaded", "wavy", "tiled"),
    "background": tuple(_GROUND_RGB),
    "digit": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "letter": tuple("ABEHKMRSTX"),
}
"""Every factor of a picture and the words for its values."""

_KIND_SHARE = (0.50, 0.16, 0.21, 0.13)
_PLAIN_SHARE = 0.25

Scene = dict[str, str]
"""One value for each factor that the picture has; `kind` is always there."""


def sample_scene(rng: np.random.Generator, fixed: Mapping[str, str | tuple[str, ...]] | None = None) -> Scene:
    """Return one scene, its factors drawn uniformly but for kinds and for plain backgrounds, which are more common.

    Args:
        rng: Source of randomness.
        fixed: Factor to value, or factor to the values to draw from.

    Returns:
        The scene. Singles have a shape, size and position; groups a shape and a count from two up; glyphs a digit
        or a letter.
    """
    fixed = fixed or {}

    def draw(factor: str, values: tuple[str, ...]) -> str:
        choice = fixed.get(factor, values)
        return choice if isinstance(choice, str) else choice[int(rng.integers(len(choice)))]

    kinds = FACTORS["kind"]
    kind = draw("kind", kinds) if "kind" in fixed else kinds[int(rng.choice(len(kinds), p=_KIND_SHARE))]
    scene = {"kind": kind, **{name: draw(name, FACTORS[name]) for name in ("colour", "texture", "background")}}
    if "texture" not in fixed and rng.random() < _PLAIN_SHARE:
        scene["texture"] = "plain"
    if kind in ("digit", "letter"):
        scene[kind] = draw(kind, FACTORS[kind])
        return scene
    scene["shape"] = draw("shape", FACTORS["shape"])
    if kind == "group":
        scene["count"] = draw("count", FACTORS["count"][1:])
    else:
        scene["count"] = "one"
        scene["size"] = draw("size", FACTORS["size"])
        # A huge object leaves no room to be anywhere but near the middle.
        scene["position"] = "centre" if scene["size"] == "huge" else draw("position", FACTORS["position"])
    return scene


def describe(scene: Scene, rng: np.random.Generator, keep: float = 0.5) -> tuple[str, frozenset[str]]:
    """Return a caption that names a random part of the scene.

    Args:
        scene: What the picture shows.
        rng: Source of randomness.
        keep: Probability in [0, 1] with which each factor is named.

    Returns:
        The caption, and the factors that it names. A picture fits the caption when it agrees on all of these.
    """
    # A third of the captions name about one factor, as class prompts do.
    keep = 0.18 if rng.random() < 0.35 else keep
    named: set[str] = set()

    def say(factor: str, probability: float = keep) -> bool:
        if factor in scene and rng.random() < probability:
            named.add(factor)
            return True
        return False

    ground = [scene[name] for name in ("texture", "background") if say(name)]
    if ground and rng.random() < 0.15:
        return f"a {' '.join(ground)} background", frozenset(named)
    named.add("kind")
    words = [scene[name] for name in ("size", "colour") if say(name)]
    kind = scene["kind"]
    if kind in ("digit", "letter"):
        words = ["the", *words, kind, scene[kind]] if say(kind, 0.85) else ["a", *words, kind]
    elif kind == "group":
        noun = scene["shape"] if say("shape", max(keep, 0.4)) else "thing"
        words = [scene["count"] if say("count", max(keep, 0.6)) else "some", *words, _plural(noun)]
    else:
        noun = scene["shape"] if say("shape", max(keep, 0.4)) else "thing"
        words = ["one" if rng.random() < 0.15 else "a", *words, noun]
        if say("position"):
            words += ["at", "the", scene["position"]]
    if ground:
        words += ["on", "a", *ground, "background"]
    return " ".join(words), frozenset(named)


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return the picture of a scene.

    Args:
        scene: What to draw.
        rng: Source of the jitter in colour, place, tilt and outline.

    Returns:
        Array (40, 40, 3), float32 in [0, 1].
    """
    canvas = Image.fromarray(_ground(scene, rng))
    draw = ImageDraw.Draw(canvas)
    fill = tuple(int(v) for v in np.clip(np.array(_OBJECT_RGB[scene["colour"]]) + rng.normal(0, 10, 3), 0, 255))
    kind = scene["kind"]
    if kind in ("digit", "letter"):
        _draw_glyph(canvas, scene[kind], fill, rng)
    elif kind == "group":
        count = FACTORS["count"].index(scene["count"]) + 1
        cells = rng.permutation(9)[:count]
        radius = 2 * rng.uniform(4.4, 5.2)
        for cell in cells:
            centre = 40 + 24 * np.array([cell % 3 - 1, cell // 3 - 1]) + rng.uniform(-1.5, 1.5, 2)
            _draw_shape(draw, scene["shape"], centre, radius, fill, rng)
    else:
        radius = 2 * _RADIUS[scene["size"]] * rng.uniform(0.92, 1.08)
        reach = min(24.0, 39.0 - radius)
        centre = 40 + reach * np.array(_CENTRE[scene["position"]]) + rng.uniform(-3, 3, 2)
        _draw_shape(draw, scene["shape"], centre, radius, fill, rng)
    return np.asarray(canvas.reduce(2), dtype=np.float32) / 255


def to_image(pixels: np.ndarray) -> Image.Image:
    """Return an RGB image from float pixels (height, width, 3) in [0, 1]; values outside are clipped."""
    return Image.fromarray((np.clip(pixels, 0, 1) * 255 + 0.5).astype(np.uint8), mode=None)


def _ground(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return the textured background (80, 80, 3) as uint8."""
    rows, columns = np.mgrid[:_CANVAS, :_CANVAS].astype(np.float32)
    rows, columns = rows + rng.integers(0, 16), columns + rng.integers(0, 16)
    texture = scene["texture"]
    if texture == "striped":
        pattern = np.where((columns // 6) % 2 == 0, 1.0, -1.0)
    elif texture == "dotted":
        pattern = np.where(np.hypot(rows % 14 - 7, columns % 14 - 7) < 3.6, 1.8, -0.3)
    elif texture == "chequered":
        pattern = np.where((rows // 10 + columns // 10) % 2 == 0, 1.0, -1.0)
    elif texture == "grainy":
        pattern = rng.normal(0, 1.2, (_CANVAS // 2, _CANVAS // 2)).repeat(2, 0).repeat(2, 1)
    elif texture == "shaded":
        pattern = (rows - rows.mean()) / 22
    elif texture == "wavy":
        pattern = np.sin(rows / 3.2 + 2.4 * np.sin(columns / 6))
    elif texture == "tiled":
        pattern = np.where((rows % 16 < 3) | (columns % 16 < 3), 1.6, -0.35)
    else:
        pattern = np.zeros_like(rows)
    base = np.array(_GROUND_RGB[scene["background"]]) + rng.normal(0, 5, 3)
    return np.asarray(np.clip(base + 26 * pattern[..., None], 0, 255), dtype=np.uint8)


@cache
def _outline(shape: str) -> np.ndarray:
    """Return the outline (points, 2) of a shape of radius about one."""
    turn = np.linspace(0, 2 * np.pi, 28, endpoint=False)
    if shape == "square":
        points = 0.86 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    elif shape == "triangle":
        points = np.array([(0, -1.1), (1.0, 0.8), (-1.0, 0.8)])
    elif shape == "star":
        length = np.where(np.arange(10) % 2 == 0, 1.15, 0.45)
        points = length[:, None] * np.stack([np.sin(np.arange(10) * np.pi / 5), -np.cos(np.arange(10) * np.pi / 5)], 1)
    elif shape == "cross":
        corner = [(-1, -0.32), (-0.32, -0.32), (-0.32, -1)]
        points = np.array([_quarter(p, k) for k in range(4) for p in corner])
    elif shape == "crescent":
        outer = np.linspace(0.25 * np.pi, 1.75 * np.pi, 20)
        inner = outer[::-1]
        points = np.concatenate(
            [
                np.stack([np.cos(outer), np.sin(outer)], 1),
                np.stack([0.32 + 0.72 * np.cos(inner), 0.72 * np.sin(inner)], 1),
            ]
        )
    elif shape == "heart":
        points = (
            np.stack(
                [
                    16 * np.sin(turn) ** 3,
                    -13 * np.cos(turn) + 5 * np.cos(2 * turn) + 2 * np.cos(3 * turn) + np.cos(4 * turn),
                ],
                1,
            )
            / 15.5
        )
    else:
        points = np.stack([np.cos(turn), np.sin(turn)], 1)
    return points


def _quarter(point: tuple[float, float], turns: int) -> tuple[float, float]:
    x, y = point
    for _ in range(turns):
        x, y = -y, x
    return x, y


def _draw_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    centre: np.ndarray,
    radius: float,
    fill: tuple[int, ...],
    rng: np.random.Generator,
) -> None:
    points = centre + radius * _outline(shape) @ _tilt(rng.uniform(-15, 15)).T
    if shape == "ring":
        x, y = centre
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius), outline=fill, width=max(3, round(0.36 * radius))
        )
    else:
        draw.polygon([(float(x), float(y)) for x, y in points], fill=fill)


def _tilt(degrees: float) -> np.ndarray:
    angle = np.deg2rad(degrees)
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


# Seven-segment displays, segments by their ends in a box of 2 x 4; below, freehand skeletons in the unit square.
_SEGMENT = {
    "a": ((0, 0), (2, 0)),
    "b": ((2, 0), (2, 2)),
    "c": ((2, 2), (2, 4)),
    "d": ((0, 4), (2, 4)),
    "e": ((0, 2), (0, 4)),
    "f": ((0, 0), (0, 2)),
    "g": ((0, 2), (2, 2)),
}
_LIT = dict(
    zip(
        FACTORS["digit"],
        ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"),
        strict=True,
    )
)
_SKELETON: dict[str, tuple[tuple[tuple[float, float], ...], ...]] = {
    "zero": (
        ((0.5, 0), (0.12, 0.2), (0.05, 0.55), (0.2, 0.9), (0.5, 1), (0.85, 0.85), (0.95, 0.45), (0.8, 0.12), (0.5, 0)),
    ),
    "one": (((0.25, 0.22), (0.55, 0), (0.52, 1)),),
    "two": (((0.1, 0.22), (0.35, 0), (0.75, 0.05), (0.85, 0.32), (0.5, 0.65), (0.08, 0.98), (0.95, 0.98)),),
    "three": (((0.12, 0.08), (0.6, 0), (0.85, 0.2), (0.45, 0.46), (0.88, 0.7), (0.6, 0.98), (0.1, 0.92)),),
    "four": (((0.6, 0), (0.1, 0.62), (0.95, 0.6)), ((0.68, 0.35), (0.62, 1))),
    "five": (((0.85, 0.02), (0.22, 0.04), (0.16, 0.44), (0.65, 0.42), (0.88, 0.68), (0.6, 0.98), (0.1, 0.92)),),
    "six": (
        ((0.72, 0), (0.3, 0.3), (0.12, 0.7), (0.35, 0.98), (0.75, 0.92), (0.82, 0.65), (0.5, 0.52), (0.16, 0.72)),
    ),
    "seven": (((0.08, 0.05), (0.9, 0.05), (0.55, 0.5), (0.4, 1)), ((0.3, 0.52), (0.75, 0.5))),
    "eight": (
        (
            (0.5, 0.48),
            (0.15, 0.22),
            (0.5, 0),
            (0.85, 0.2),
            (0.5, 0.48),
            (0.12, 0.78),
            (0.5, 1),
            (0.88, 0.78),
            (0.5, 0.48),
        ),
    ),
    "nine": (((0.85, 0.25), (0.5, 0), (0.15, 0.25), (0.45, 0.5), (0.85, 0.28), (0.78, 0.7), (0.55, 1)),),
}


def _draw_glyph(canvas: Image.Image, name: str, fill: tuple[int, ...], rng: np.random.Generator) -> None:
    """Draw a digit or letter in one of three hands: typeset, seven segments, or freehand strokes."""
    hand = rng.choice(3, p=(0.4, 0.2, 0.4)) if name in _SKELETON else 0
    height = rng.uniform(38, 62)
    mask = Image.new("L", (_CANVAS, _CANVAS), 0)
    pen = ImageDraw.Draw(mask)
    width = int(rng.integers(4, 10))
    if hand == 0:
        character = str(FACTORS["digit"].index(name)) if name in _SKELETON else name
        stroke = int(rng.integers(0, 3))
        pen.text((40, 40), character, fill=255, font=_font(round(height * 1.35)), anchor="mm", stroke_width=stroke)
    elif hand == 1:
        unit = height / 4
        for segment in _LIT[name]:
            line = [(40 + unit * 1.15 * (x - 1), 40 + unit * (y - 2)) for x, y in _SEGMENT[segment]]
            pen.line(line, fill=255, width=width)
    else:
        box = np.array([height * rng.uniform(0.5, 0.8), height])
        for stroke_points in _SKELETON[name]:
            points = 40 + (np.array(stroke_points) - 0.5 + rng.normal(0, 0.035, (len(stroke_points), 2))) * box
            pen.line([(float(x), float(y)) for x, y in points], fill=255, width=width, joint="curve")
    slant, angle = rng.uniform(-0.25, 0.25), rng.uniform(-10, 10)
    matrix = np.linalg.inv(_tilt(angle) @ np.array([[1, slant], [0, 1]]))
    offset = 40 - matrix @ (40 + rng.uniform(-6, 6, 2))
    coefficients = (matrix[0, 0], matrix[0, 1], offset[0], matrix[1, 0], matrix[1, 1], offset[1])
    mask = mask.transform(mask.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    canvas.paste(fill, (0, 0), mask)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)
