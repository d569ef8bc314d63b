"""What is pushed says truly how it came about, and the code on its card runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hub_server import ALICE, Client, HubServer, client_environment
from test_hub import HELPERS

PUBLISH = """
from peft import PeftModel
from tiny import tiny_encoder, tiny_images, tiny_parts
from hf_platonic.consensus import Consensus
from hf_platonic.few_shot import finish_transfer
from hf_platonic.prompting import with_prompts
for name, family, seed in (
    *(("source", "clip", 0), ("tuned", "clip", 1), ("other", "siglip", 0), ("tuned2", "siglip", 1)),
    *(("target", "siglip2", 2), ("blip", "blip_itc", 2)),
):
    model, processor = tiny_parts(family, seed=seed)
    model.push_to_hub(f"alice/{name}")
    processor.push_to_hub(f"alice/{name}")

def load(name="target"):
    return DualEncoder.from_pretrained(f"alice/{name}")

probes = ProbeSet(tiny_images(9), class_names=["cat", "dog", "bird"], templates=("a {}",))
probes.push_to_hub("alice/probes")
one = extract(load("source"), load("tuned"), probes, name="pets", store_base=True)
two = extract(load("other"), load("tuned2"), probes, name="pets", store_base=True)
base = load("source")
scores = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
teacher = TaskDescriptor.from_scores(scores, probes, name="taught")
changed, share = with_prompts(one, base, class_names=["dog", "a cat", "bird"], templates=("a {}",), least_share=0.0)
descriptors = {
    "plain": one, "teacher": teacher, "prompts": changed, "consensus": Consensus.of([one, two]).descriptor,
    "sum": 0.5 * one - two, "negated": -one, "mixed": one + 0.25 * teacher,
    "unknown": TaskDescriptor(one.delta, one.grid, probes=probes, spread=1.0),
}
for name, descriptor in descriptors.items():
    descriptor.push_to_hub(f"alice/{name}", include_probes=True)
one.push_to_hub("alice/bare")

test = EvaluationSet(probes, [0, 1, 2] * 3)
def edited(term, adapter_name="default", target=None, **options):
    target = load() if target is None else target
    return transfer(term, target, adapter_name=adapter_name, **options), target

push_adapter(edited(one, strength=0.7)[0], "alice/head")
push_adapter(edited([teacher], objective="endpoint")[0], "alice/taught-head")
push_adapter(edited(one, recipe="auto")[0], "alice/auto-head")
model, target = edited(one, strength=0.7)
finish_transfer(model, target, test)
push_adapter(model, "alice/finished-head")
push_adapter(model, "alice/finished-lora", form="lora")
model, target = edited(one, strength=0.7)
operator = model.get_operator("default")
model.load_factors("default", 2 * operator.left, operator.right)
push_adapter(model, "alice/changed-head")
push_adapter(model, "alice/changed-lora", form="lora")
model, target = edited(one, "first", strength=0.5)
transfer(-two, target, adapter_name="second", strength=1.0)
model.add_weighted_adapter(["first", "second"], [2.0, 0.5], "both")
push_adapter(model, "alice/both-head", adapter_name="both")
settings = MatchingArguments(max_steps=2, batch_size=8)
model = transfer(one, load(), method="lora", training_args=settings)
push_adapter(model, "alice/trained", form="lora")
push_adapter(transfer(one, load("blip")), "alice/blip-lora", form="lora")
OperatorBank.solve({"pets": one, ("a", "taught"): teacher}, load(), objective="endpoint").push_to_hub("alice/bank")
result = [share, model.peft_config["default"].r]
"""

RUN = """
import io, re, warnings
from contextlib import redirect_stdout
from huggingface_hub import ModelCard
from peft import PeftModel
found = {}
for name in NAMES:
    text = ModelCard.load(f"alice/{name}", repo_type="dataset" if name == "probes" else "model").text
    code = re.search(r"```python\\n(.*?)```", text, re.S)[1]
    code = code.replace("your/dual-encoder", "alice/target").replace("your/probe-set", "alice/probes")
    space = {}
    exec(code, space)
    model = space.get("model")
    found[name] = [text, type(model).__name__, getattr(model, "active_adapters", None)]
result = found
"""

DESCRIPTORS = ("plain", "teacher", "prompts", "consensus", "sum", "negated", "mixed", "unknown", "bare")
ADAPTERS = (
    *("head", "taught-head", "auto-head", "finished-head", "changed-head", "both-head"),
    *("finished-lora", "changed-lora", "trained", "blip-lora"),
)


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Per repo the card's text, and what its code made; with the pushing process's own figures under ""."""
    home = tmp_path_factory.mktemp("homes")
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        publisher = Client(client_environment(server, home / "alice", ALICE), home / "alice.log")
        reader = Client(client_environment(server, home / "reader"), home / "reader.log")
        try:
            publisher.run(HELPERS)
            figures = publisher.run(PUBLISH)
            reader.run(HELPERS)
            found = reader.run(f"NAMES = {(*DESCRIPTORS, *ADAPTERS, 'bank', 'probes')!r}\n" + RUN)
        finally:
            publisher.close()
            reader.close()
    return {**found, "": figures}


@pytest.mark.parametrize("name", [*DESCRIPTORS, *ADAPTERS])
def test_the_code_of_every_card_makes_a_model(name: str, cards: dict[str, Any]) -> None:
    assert cards[name][1:] == ["PeftModel", ["default"]]


def says(cards: dict[str, Any], name: str, *wanted: str, never: tuple[str, ...] = ()) -> None:
    text = " ".join(cards[name][0].split())
    for phrase in wanted:
        assert phrase in text, f"{name}: no {phrase!r} in\n{cards[name][0]}"
    for phrase in never:
        assert phrase not in text, f"{name}: {phrase!r} in\n{cards[name][0]}"


def test_descriptors_say_what_they_are(cards: dict[str, Any]) -> None:
    plain, change = "prompts, the change of the cosines, `A(fine-tuned) - A(base)`.", "the change of the cosines"
    says(cards, "plain", plain, "What a fine-tune does", "Base spread", never=("was done to it",))
    says(cards, "bare", plain, "don't travel with this repo", 'ProbeSet.from_pretrained("your/probe-set")')
    says(cards, "unknown", "What it was made of isn't recorded", "Not recorded.", never=(plain, "Base spread"))
    says(
        cards,
        "teacher",
        *("What a teacher says", "its scores", "| none | a teacher's scores `", 'objective="endpoint"'),
        never=(change, "Base spread", "Not recorded"),
    )
    share = cards[""][0]
    says(
        cards,
        "prompts",
        f"combined out of 3 other prompts', which cover {share:.2f}",
        "was done to it",
        never=(plain,),
    )
    says(cards, "consensus", "A signed sum", "brought from spread", "alice/tuned2", never=(plain, "Base spread"))
    says(cards, "negated", "prompts, -1 times the change of the cosines", never=(plain,))
    says(cards, "sum", "A signed sum", "| 0.5 |", "| -1 |", "U = sum_i c_i U_i", never=(plain, "was done to it"))
    says(cards, "negated", "takes away what its sources learned", "| -1 |", never=(plain,))
    says(cards, "mixed", "of a fine-tune the change", "of a teacher its scores", "| 0.25 |", never=(plain,))


def test_adapters_say_how_they_came_about(cards: dict[str, Any]) -> None:
    then = "| then |"
    says(cards, "head", "closed form", "| strength | 0.7 |", "change, calibration: none", never=(then,))
    says(cards, "taught-head", "a teacher's scores `", "endpoint, calibration: spread", never=(then,))
    says(cards, "auto-head", "by gcv, prompts", "endpoint, calibration: spread", never=(then,))
    finished = "trained further on 9 labelled examples of 3 classes"
    says(cards, "finished-head", finished, never=("isn't recorded",))
    says(cards, "finished-lora", finished, "0.7, part of the weights", "plain LoRA", never=("isn't recorded",))
    for name in ("changed-head", "changed-lora"):
        says(cards, name, "weights were changed in a way that isn't recorded", never=(finished,))
    says(cards, "both-head", "| sum of adapters | 2, exact |", "| 1 |", "| -0.5 |", "alice/target", never=(then,))
    says(cards, "trained", "trained inside the tower", "2 of 8 probes", "training on unlabelled", never=("is exact",))
    says(cards, "blip-lora", "BlipForImageTextRetrieval.from_pretrained", never=("AutoModel",))


def test_banks_say_what_each_entry_is_from(cards: dict[str, Any]) -> None:
    says(cards, "bank", "sums of them don't mean anything", never=("any composition",))
    says(
        cards, "bank", "bank.compose({'pets': 1.0})", "| pets: +1 x `alice/tuned`", "taught: +1 x a teacher's scores `"
    )


def test_what_cannot_be_pushed_says_what_can(tmp_path: Path) -> None:
    from peft import IA3Config, LoraConfig, get_peft_model
    from test_transfers import descriptor
    from tiny import tiny_encoder

    from hf_platonic import push_adapter
    from hf_platonic.errors import EncoderError, PlatonicError
    from hf_platonic.export import push_adapter_folder

    several = descriptor(n=5) + descriptor("siglip", n=4, seed=3)
    with pytest.raises(AttributeError, match=re.escape("no attribute 'push_to_hub': it's several descriptors")):
        several.push_to_hub("alice/several")
    lora = get_peft_model(tiny_encoder().model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(EncoderError, match="a LoRA in form \"lora\", got LORA in form 'platonic'"):
        push_adapter(lora, "alice/lora")
    with pytest.raises(PlatonicError, match=r"a PEFT model with an adapter 'mine', got one with \['default'\]"):
        push_adapter(lora, "alice/lora", adapter_name="mine")
    other = get_peft_model(
        tiny_encoder().model, IA3Config(target_modules=["q_proj"], feedforward_modules=[], inference_mode=True)
    )
    other.save_pretrained(tmp_path)
    with pytest.raises(PlatonicError, match=r"Expected a PLATONIC adapter or a LoRA in .*, got IA3"):
        push_adapter_folder(tmp_path, "alice/other")
