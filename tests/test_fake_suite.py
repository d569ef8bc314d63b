"""The suite `vision8` on tiny stand-ins, through the real clients and a Hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_suite import data_files, publish, write_suite
from hub_server import Client, ClientError, HubServer, client_environment

from hf_platonic.benchmark.suites import load_suite

ALL = """
from pathlib import Path
from hf_platonic.benchmark import Workbench, load_suite
from hf_platonic.extraction import extract
from hf_platonic.transfers import transfer

suite = load_suite({suite!r})
bench = Workbench(suite, seed=42, cache=Path({cache!r}))
names = {{}}
for task in suite.tasks + suite.controls:
    data = bench.control(task.name) if task in suite.controls else bench.task(task.name)
    names[task.name] = {{
        "probes": data.probes.grid.reference, "labels": list(data.test.labels), "size": len(data.test.probes),
    }}
data, base = bench.task("dtd"), bench.encoder("clip-l")
tuned, target = bench.tuned("clip-l", "dtd"), bench.encoder("siglip2-l")
descriptor = extract(base, tuned, data.probes, progress=False)
transfer(descriptor, target, probes=data.probes, strength=1.0, progress=False)
bench.encoder("siglip-l"), bench.encoder("metaclip-l")
pair = {{"size": float(descriptor.delta.norm()), "revision": base.identity.revision}}
result = {{"names": names, "pair": pair}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("home")
    running = Client(client_environment(server, home), home / "log")
    yield running
    running.close()


def test_every_data_set_and_model_of_the_suite_by_its_own_name(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path / "fake.yaml")
    publish(server, suite)
    found: dict[str, Any] = client.run(ALL.format(suite=str(tmp_path / "fake.yaml"), cache=str(tmp_path / "cache")))
    for task in suite.tasks:
        got = found["names"][task.name]
        reference = got["probes"]
        assert (reference["repo"], reference["name"]) == (task.data.path, task.data.config)
        assert (reference["split"], len(reference["revision"])) == (task.data.train, 40)
        assert reference["column"] == (task.data.input_column or "image")
        held_out = task.data.train == task.data.test
        assert len(reference["indices"]) == (32 if held_out else 40)
        assert got["size"] == (8 if held_out else 40)
        assert max(got["labels"]) >= 6 or len(task.class_names) <= 10  # the first six of another order
    assert found["names"]["cifar100"]["probes"]["column"] == "img"
    assert found["names"]["imagenet"]["probes"]["split"] == "validation"
    assert found["pair"]["size"] > 0.1
    assert len(found["pair"]["revision"]) == 40
    # Each data set and model was asked for by the suite's own name, and nothing but the server was.
    for entry in (*suite.models[::3], *(task.data for task in suite.tasks + suite.controls)):
        assert server.requests(entry.path)
    assert not server.requests("unasked")


def test_labels_that_changed_on_the_hub_are_refused_by_name(server: HubServer, client: Client, tmp_path: Path) -> None:
    suite = load_suite("vision8")
    task = suite.task("dtd")
    renamed = type(task)(**{**vars(task), "labels": ("stripy", *task.labels[1:])})
    server.put("other/dtd", data_files(renamed, 0), kind="dataset")
    code = f"""
from dataclasses import replace
from hf_platonic.benchmark import Workbench, load_suite
suite = load_suite("vision8")
task = suite.task("dtd")
moved = replace(suite, tasks=(replace(task, data=replace(task.data, path="other/dtd")),), methods=suite.methods)
from pathlib import Path
Workbench(moved, cache=Path({str(tmp_path)!r})).task("dtd")
"""
    with pytest.raises(ClientError, match=r"there: \['banded'\]; without one in the suite: \['stripy'\]"):
        client.run(code)


RUN = """
from dataclasses import replace
from pathlib import Path
from hf_platonic.benchmark import load_suite
from hf_platonic.benchmark.runs import narrowed, run_benchmark

suite = narrowed(load_suite({suite!r}), tasks=["dtd", "eurosat"])
suite = replace(suite, models=(suite.model("clip-l"), suite.model("siglip-l")), controls=suite.controls[:1])
methods = [replace(m, tasks=("dtd",)) if m.realisation == "lora" else m for m in suite.methods]
found = run_benchmark(replace(suite, methods=tuple(methods)), Path({out!r}), processes=1, progress=False)
result = {{"suite": found["suite"], "not_run": found["not_run"], "transfer": found["transfer"],
           "methods": found["summary"]["image"]["methods"]}}
"""


def test_the_runner_takes_the_suite_from_fine_tunes_to_results(
    server: HubServer, client: Client, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path / "fake.yaml")
    publish(server, suite)
    found = client.run(RUN.format(suite=str(tmp_path / "fake.yaml"), out=str(tmp_path / "run")))
    assert not found["not_run"]
    assert [row["method"] for row in found["methods"]] == [method.name for method in suite.methods]
    sizes = {task["name"]: (task["probes"], task["prompts"], task["test"]) for task in found["suite"]["tasks"]}
    assert sizes == {"dtd": (40, 47, 40), "eurosat": (32, 10, 8)}
    cases = [(case["source"], case["target"]) for case in found["transfer"] if case["method"] == "lora"]
    assert sorted(cases) == [(a, b) for a in ("clip-l", "siglip-l") for b in ("clip-l", "siglip-l")]
    assert (tmp_path / "run" / "results.json").is_file()
