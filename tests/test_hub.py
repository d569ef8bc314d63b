"""One team pushes, another pulls with nothing but the repo ids: through the real client, in other processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import ALICE, PYTHON, Client, ClientError, HubServer, client_environment

HELPERS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import hashlib, torch, hf_platonic
from hf_platonic import *
from hf_platonic.affinities import affinity
from hf_platonic.encoding import encode_columns, encode_probes

def sha(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

def seen(encoder, probes):
    return affinity(encode_probes(encoder, probes).unit, encode_columns(encoder, probes.columns)).tolist()
"""

PUBLISH = """
from tiny import tiny_images, tiny_parts
from huggingface_hub import HfApi, ModelCard, ModelCardData
for name, family, seed in (("source", "clip", 0), ("tuned", "clip", 1), ("target", "siglip2", 2)):
    model, processor = tiny_parts(family, seed=seed)
    model.push_to_hub(f"alice/{name}")
    processor.push_to_hub(f"alice/{name}")
card = ModelCard.from_template(ModelCardData(license="mit"), template_str="---\\n{{ card_data }}\\n---\\n")
card.push_to_hub("alice/source")
probes = ProbeSet(tiny_images(9), class_names=["cat", "dog", "bird"], templates=("a {}",))
base, tuned, target = (DualEncoder.from_pretrained(f"alice/{n}") for n in ("source", "tuned", "target"))
task = extract(base, tuned, probes, name="pets", store_base=True)
first = task.push_to_hub("alice/pets", include_probes=True)
HfApi().create_tag("alice/pets", tag="v1")
second = (2 * task).push_to_hub("alice/pets", include_probes=True)
(3 * task).push_to_hub("alice/pets", include_probes=True, revision="next")
task.push_to_hub("alice/secret", private=True)
request = task.push_to_hub("alice/pets", create_pr=True, commit_message="Offer")
bank = OperatorBank.solve({("source", "pets"): task, ("source", "less"): -0.5 * task}, target)
bank.push_to_hub("alice/bank")
probes.push_to_hub("alice/probes")
model = transfer(task, target, strength=0.7)
test = EvaluationSet(probes, [0, 1, 2] * 3)
report = evaluate(target, {"pets": test})
push_adapter(model, "alice/head", results=report)
push_adapter(model, "alice/lora", form="lora")
model.push_to_hub("alice/head-by-peft")
from datasets import Dataset, Features, Image
rows = Dataset.from_dict({"image": tiny_images(8, seed=5)}, features=Features({"image": Image()}))
rows.push_to_hub("alice/data")
drawn = ProbeSet.from_hub("alice/data", split="train", n=6, prompts=["a cat", "a dog"])
far = extract(base, tuned, drawn, name="far")
far.push_to_hub("alice/far")
drawn.push_to_hub("alice/drawn", by="reference")
other = DualEncoder.from_pretrained("alice/target")
transfer(far, other, strength=1.0)
result = {
    "far": seen(other, drawn), "drawn": drawn.grid.fingerprint,
    "first": first.revision, "second": second.revision, "pr": request.pull_request,
    "delta": sha(task.delta), "base": sha(task.base_affinity), "twice": sha((2 * task).delta),
    "thrice": sha((3 * task).delta), "grid": probes.grid.fingerprint,
    "bank": [sha(bank.operators[k].left) for k in bank.operators], "seen": seen(target, probes),
    "target": target.identity.revision, "source": base.identity.revision,
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(scope="module")
def pushed(server: HubServer, home: Path) -> dict[str, Any]:
    client = Client(client_environment(server, home / "alice", ALICE), home / "alice.log")
    try:
        client.run(HELPERS)
        found: dict[str, Any] = client.run(PUBLISH)
    finally:
        client.close()
    assert ALICE not in (home / "alice.log").read_text()
    return found


@pytest.fixture(scope="module")
def reader(server: HubServer, home: Path, pushed: dict[str, Any]) -> Iterator[Client]:
    client = Client(client_environment(server, home / "reader"), home / "reader.log")
    client.run(HELPERS)
    yield client
    client.close()


def test_descriptors_come_back_bit_equal_by_branch_tag_and_commit(reader: Client, pushed: dict[str, Any]) -> None:
    for revision, wanted in (
        (None, "twice"),
        ("main", "twice"),
        ("v1", "delta"),
        (pushed["first"], "delta"),
        (pushed["second"], "twice"),
        ("next", "thrice"),
        ("refs/pr/1", "delta"),
    ):
        code = f"d = TaskDescriptor.from_pretrained('alice/pets', revision={revision!r})"
        code += "; result = [sha(d.delta), d.origin]"
        delta, origin = reader.run(code)
        assert delta == pushed[wanted], revision
        assert origin[0] == "alice/pets"
        assert len(origin[1]) == 40
    code = """
d = TaskDescriptor.from_pretrained("alice/pets", revision="v1")
result = [sha(d.base_affinity), d.probes.grid.fingerprint, d.sources[0].base.repo, d.sources[0].base.revision, d.name]
"""
    assert reader.run(code) == [pushed["base"], pushed["grid"], "alice/source", pushed["source"], "pets"]


def test_a_pulled_descriptor_edits_another_model_as_the_pushed_one_did(reader: Client, pushed: dict[str, Any]) -> None:
    code = """
d = TaskDescriptor.from_pretrained("alice/pets", revision="v1")
target = DualEncoder.from_pretrained("alice/target")
model = transfer(d, target, strength=0.7)
made = model.peft_config["default"].provenance
result = [seen(target, d.probes), made["terms"][0]["descriptor"], made["target"]["revision"]]
"""
    got, descriptor, target = reader.run(code)
    assert _close(got, pushed["seen"])
    assert descriptor == ["alice/pets", pushed["first"]]
    assert target == pushed["target"]


def test_probes_by_reference_are_loaded_when_needed(reader: Client, server: HubServer, pushed: dict[str, Any]) -> None:
    code = """
d = TaskDescriptor.from_pretrained("alice/far")
target = DualEncoder.from_pretrained("alice/target")
transfer(d, target, strength=1.0)
probes = ProbeSet.from_pretrained("alice/drawn")
result = [d.probes is None, seen(target, probes), probes.grid.fingerprint, d.grid.reference["repo"]]
"""
    bare, got, fingerprint, repo = reader.run(code)
    assert bare
    assert _close(got, pushed["far"])
    assert (fingerprint, repo) == (pushed["drawn"], "alice/data")


def _close(got: list[list[float]], wanted: list[list[float]], tolerance: float = 1e-6) -> bool:
    return all(abs(a - b) <= tolerance for x, y in zip(got, wanted, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("repo", ["alice/head", "alice/head-by-peft", "alice/lora"])
def test_adapters_give_the_same_model(repo: str, reader: Client, pushed: dict[str, Any]) -> None:
    code = f"""
from peft import AutoPeftModel, PeftModel
from transformers import AutoModel, AutoProcessor
probes = ProbeSet.from_pretrained("alice/probes")
processor = AutoProcessor.from_pretrained("alice/target", backend="pil")
one = PeftModel.from_pretrained(AutoModel.from_pretrained("alice/target"), "{repo}")
two = AutoPeftModel.from_pretrained("{repo}")
result = [seen(DualEncoder(m, processor), probes) for m in (one, two)] + [type(one.base_model).__name__]
"""
    one, two, kind = reader.run(code)
    tolerance = 1e-5 if repo.endswith("lora") else 1e-6
    assert _close(one, pushed["seen"], tolerance)
    assert _close(two, pushed["seen"], tolerance)
    assert kind == ("LoraModel" if repo.endswith("lora") else "PlatonicModel")


def test_banks_are_read_lazily_and_their_entries_are_adapters(
    reader: Client, server: HubServer, pushed: dict[str, Any]
) -> None:
    server.log.clear()
    reader.run("bank = OperatorBank.from_pretrained('alice/bank'); result = None")
    assert not server.requests("safetensors")
    assert reader.run("result = [sha(bank.operators[k].left) for k in bank.operators]") == pushed["bank"]
    code = """
from peft import PeftModel
from transformers import AutoModel
one = PeftModel.from_pretrained(AutoModel.from_pretrained("alice/target"), "alice/bank", subfolder="source/pets")
result = sha(one.get_operator("default").left)
"""
    assert reader.run(code) == pushed["bank"][0]


def test_private_repos_need_a_token(reader: Client, pushed: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match="hf auth login") as caught:
        reader.run("TaskDescriptor.from_pretrained('alice/secret')")
    assert caught.value.type == "HubError"
    code = f"result = sha(TaskDescriptor.from_pretrained('alice/secret', token={ALICE!r}).delta)"
    assert reader.run(code) == pushed["delta"]


def test_cards_say_what_a_repo_is(server: HubServer, reader: Client, pushed: dict[str, Any]) -> None:
    code = """
from huggingface_hub import ModelCard
cards = {n: ModelCard.load(f"alice/{n}") for n in ("pets", "head", "lora", "bank", "head-by-peft")}
result = {n: [c.data.to_dict(), c.text] for n, c in cards.items()}
"""
    cards = reader.run(code)
    data, text = cards["pets"]
    assert data["library_name"] == "hf_platonic"
    assert data["base_model"] == ["alice/source"]
    assert data["license"] == "mit"  # the source's
    assert "task-descriptor" in data["tags"]
    assert pushed["grid"] in text
    assert "cat, dog, bird" in text
    data, text = cards["head"]
    assert (data["base_model"], data["base_model_relation"]) == ("alice/target", "adapter")
    assert data["pipeline_tag"] == "zero-shot-image-classification"
    assert data["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    assert "platonic-operator" in data["tags"]
    assert "operator head" in text
    assert "plain LoRA" in cards["lora"][1]
    assert "source/less" in cards["bank"][1]


def test_a_hand_written_card_stays(server: HubServer, home: Path, pushed: dict[str, Any]) -> None:
    code = """
from huggingface_hub import HfApi, hf_hub_download
api = HfApi()
d = TaskDescriptor.from_pretrained("alice/pets", revision="v1")
d.push_to_hub("alice/mine")
generated = open(hf_hub_download("alice/mine", "README.md")).read()
api.upload_file(path_or_fileobj=b"# Mine", path_in_repo="README.md", repo_id="alice/mine")
again = (2 * d).push_to_hub("alice/mine")
result = [generated, open(hf_hub_download("alice/mine", "README.md", revision=again.revision)).read()]
"""
    client = Client(client_environment(server, home / "alice", ALICE), home / "alice2.log")
    try:
        client.run(HELPERS)
        generated, kept = client.run(code)
    finally:
        client.close()
    assert "hf_platonic: generated card" in generated
    assert kept == "# Mine"


def cli(home: Path, server: HubServer, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, "-m", "hf_platonic", *arguments],
        env=client_environment(server, home / "reader", token),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_line_pulls_pushes_and_inspects(server: HubServer, home: Path, pushed: dict[str, Any]) -> None:
    got = cli(home, server, "pull", "alice/pets", str(home / "pulled"), "--revision", "v1")
    assert got.returncode == 0, got.stderr
    assert pushed["first"] in got.stdout
    shown = cli(home, server, "inspect", str(home / "pulled"), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["name"] == "pets"
    refused = cli(home, server, "pull", "alice/pets", str(home / "pulled"))
    assert refused.returncode == 1
    assert "Expected an empty folder" in refused.stderr
    again = cli(home, server, "push", str(home / "pulled"), "alice/again", "--license", "mit", token=ALICE)
    assert again.returncode == 0, again.stderr
    assert "alice/again" in again.stdout
    nobody = cli(home, server, "push", str(home / "pulled"), "alice/again")
    assert nobody.returncode == 1
    assert "hf auth login" in nobody.stderr
    for repo, word in (
        ("alice/again", "pets"),
        ("alice/bank", "entries"),
        ("alice/head", "operator head"),
        ("alice/lora", "plain LORA"),
    ):
        run = cli(home, server, "inspect", repo)
        assert run.returncode == 0, run.stderr
        assert word in run.stdout
    nothing = cli(home, server, "inspect", "alice/nothing")
    assert nothing.returncode == 1
    assert "no such repo" in nothing.stderr


def test_after_the_server_is_gone_the_cache_serves_without_a_request(
    server: HubServer, home: Path, pushed: dict[str, Any], reader: Client
) -> None:
    reader.run("""
from peft import PeftModel
from transformers import AutoModel
TaskDescriptor.from_pretrained("alice/pets", revision="v1")
ProbeSet.from_pretrained("alice/probes")
bank = OperatorBank.from_pretrained("alice/bank")
[bank.operators[k] for k in bank.operators]
for repo in ("alice/head", "alice/lora"):
    PeftModel.from_pretrained(AutoModel.from_pretrained("alice/target"), repo)
""")
    server.stop()
    client = Client(client_environment(server, home / "reader", offline=True), home / "offline.log")
    try:
        client.run(HELPERS)
        code = """
d = TaskDescriptor.from_pretrained("alice/pets", revision="v1")
target = DualEncoder.from_pretrained("alice/target")
transfer(d, target, strength=0.7)
result = [sha(d.delta), seen(target, d.probes), ProbeSet.from_pretrained("alice/probes").grid.fingerprint]
"""
        delta, affinities, grid = client.run(code)
        code = """
from peft import PeftModel
from transformers import AutoModel
bank = OperatorBank.from_pretrained("alice/bank")
result = [[sha(bank.operators[k].left) for k in bank.operators]]
for repo in ("alice/head", "alice/lora"):
    model = PeftModel.from_pretrained(AutoModel.from_pretrained("alice/target"), repo)
    result.append(seen(DualEncoder(model, target.processor), d.probes))
"""
        bank, head, lora = client.run(code)
        assert bank == pushed["bank"]
        assert _close(head, pushed["seen"])
        assert _close(lora, pushed["seen"], 1e-5)
        assert delta == pushed["delta"]
        assert _close(affinities, pushed["seen"])
        assert grid == pushed["grid"]
        with pytest.raises(ClientError, match="isn't whole in the cache"):
            client.run("TaskDescriptor.from_pretrained('alice/never', local_files_only=True)")
    finally:
        client.close()
        server.start()
