"""Steps from and to Hugging Face directories and torch's own checkpoint files, checked by the real libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import forebay
from forebay.convert import from_hugging_face, main

TYPES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 "
    "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"
).split()
"""Element types that safetensors has, by torch's names."""


@pytest.fixture(autouse=True)
def silence() -> Any:
    """torch warns of what it is told here: that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def tensors() -> dict[str, torch.Tensor]:
    """One of each type that safetensors has, and awkward ones."""
    base = torch.arange(24).view(4, 6)
    every = {name: (base % 2 if name == "bool" else base).to(getattr(torch, name)) for name in TYPES}
    return {**every, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 7), "turned": base.float().t()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    def content(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.shape, bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist() or [])

    return {name: content(value) for name, value in left.items() if value.numel()} == {
        name: content(value) for name, value in right.items() if value.numel()
    } and left.keys() == right.keys()


def fails(capsys: pytest.CaptureFixture[str], words: list[str], why: str) -> None:
    assert main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ") and why in told, told


def test_one_file_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tensors()
    tied = {**model, "tied": model["float32"], "rows": model["float32"][1:3]}
    forebay.save({"model": tied, "optim": {"lr": 0.5, "m": torch.ones(3)}}, tmp_path / "run", step=4)
    assert main([f"{tmp_path / 'run'}@4", f"hf:{tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().out == "model.safetensors\n"
    assert same(load_file(tmp_path / "out/model.safetensors"), {k: v.contiguous() for k, v in tied.items()})
    assert main([f"hf:{tmp_path / 'out'}", f"{tmp_path / 'back'}@9"]) == 0
    loaded = forebay.load(tmp_path / "back", step=9)
    assert list(loaded) == ["model"] and same(loaded["model"], tied)
    fails(capsys, [f"{tmp_path / 'run'}", f"hf:{tmp_path / 'out'}"], "holds a model already")
    fails(capsys, [f"{tmp_path / 'run'}", f"hf:{tmp_path / 'x'}", "--part", "net"], "is not among `model`, `optim`")
    fails(capsys, [f"{tmp_path / 'run'}@5", f"hf:{tmp_path / 'x'}"], "holds no step 5")
    fails(capsys, [str(tmp_path / "run"), str(tmp_path / "x")], "SOURCE and TARGET are of one kind, forebay")
    assert main([str(tmp_path / "run"), f"hf:{tmp_path / 'optim'}", "--part", "optim"]) == 0
    assert list(load_file(tmp_path / "optim/model.safetensors")) == ["m"]
    forebay.save({"model": {"c": torch.zeros(2, dtype=torch.complex64)}}, tmp_path / "complex")
    fails(capsys, [str(tmp_path / "complex"), f"hf:{tmp_path / 'x'}"], "complex64, which safetensors has not")
    assert not (tmp_path / "x").exists()


def test_directories_come_in_as_their_index_says(tmp_path: Path) -> None:
    """A directory of two files of which one is of another version gave a step that lacked a tensor."""
    hub, names = tmp_path / "hub", ["one.safetensors", "two.safetensors"]
    hub.mkdir()
    save_file({"a": torch.ones(1), "b": torch.ones(2)}, hub / names[0])
    save_file({"b": torch.ones(3)}, hub / names[1])

    def convert(index: dict[str, str]) -> None:
        (hub / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        from_hugging_face(hub, str(tmp_path / "run"), step=1)

    def lengths() -> dict[str, int]:
        return {name: len(value) for name, value in forebay.load(tmp_path / "run", step=1)["model"].items()}

    with pytest.raises(forebay.CheckpointCorrupt, match="`lm_head` in `two.safetensors`, which does not hold it"):
        convert(dict(zip(("a", "lm_head"), names)))
    assert not (tmp_path / "run/steps").exists()
    with pytest.warns(forebay.CheckpointWarning, match="left out of the step: `b` of `one.safetensors`"):
        convert(dict(zip("ab", names)))
    assert lengths() == {"a": 1, "b": 3}
    save_file({"a": torch.ones(9)}, hub / "model.safetensors")
    with pytest.warns(forebay.CheckpointWarning, match="the first alone is read, as by transformers"):
        convert(dict(zip("ab", names)))
    assert lengths() == {"a": 9}


def test_large_models_are_cut_into_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {f"layers.{index}.w": torch.full((1000,), float(index)) for index in range(7)}
    model["large"] = torch.arange(3000.0)
    forebay.save({"model": model}, tmp_path / "run")
    assert main([str(tmp_path / "run"), f"hf:{tmp_path / 'out'}", "--shard-size", "9KB"]) == 0
    names = [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    assert capsys.readouterr().out.split() == names
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 40_000 and set(index["weight_map"].values()) == set(names)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        part = load_file(tmp_path / "out" / name)
        assert all(index["weight_map"][tensor] == name for tensor in part)
        found.update(part)
    assert same(found, model)
    assert main([f"hf:{tmp_path / 'out'}", str(tmp_path / "back"), "--part", ""]) == 0
    assert same(forebay.load(tmp_path / "back"), model)
    path = tmp_path / "out/model.safetensors.index.json"
    path.write_text(path.read_text().replace(names[0], "../" + names[0]))
    fails(capsys, [f"hf:{tmp_path / 'out'}", str(tmp_path / "x")], "is no file of this directory")


def test_damage_is_never_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        forebay.save({"model": {"w": torch.full((1000,), float(step))}}, tmp_path / "run", step=step)
    (manifest,) = (tmp_path / "run").glob(f"steps/{2:020}/*.json")
    shard = tmp_path / "run" / json.loads(manifest.read_text())["body"]["shards"][0]["key"]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    fails(capsys, [str(tmp_path / "run"), f"hf:{tmp_path / 'out'}"], "are damaged")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_others_wrote_comes_in(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    model = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(model, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    assert main([f"hf:{tmp_path / 'hub'}", str(tmp_path / "run"), "--part", "nets.actor"]) == 0
    assert same(forebay.load(tmp_path / "run")["nets"]["actor"], model)


def test_torchs_own_directories_go_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": tensors(), "optim": {"lr": 0.5, "betas": (0.9, 0.99)}, "list": [torch.ones(2), {"n": 5}], "n": 3}
    forebay.save(state, tmp_path / "run", step=6)
    assert main([str(tmp_path / "run"), f"dcp:{tmp_path / 'files'}"]) == 0
    into = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
        "optim": {"lr": 0, "betas": None},
        "list": [torch.zeros(2), {"n": 0}],
        "n": 0,
    }
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "files"))
    assert same(into.pop("model"), state["model"])
    assert into["optim"] == state["optim"] and into["n"] == 3 and torch.equal(into["list"][0], torch.ones(2))
    fails(capsys, [f"dcp:{tmp_path / 'files'}", f"{tmp_path / 'back'}@7"], "--allow-pickle")
    assert main([f"dcp:{tmp_path / 'files'}", f"{tmp_path / 'back'}@7", "--allow-pickle"]) == 0
    loaded = forebay.load(tmp_path / "back", step=7)
    assert same(loaded.pop("model"), state["model"])
    assert loaded["optim"] == state["optim"] and loaded["n"] == 3 and loaded["list"][1] == {"n": 5}
    fails(capsys, [str(tmp_path / "run"), f"dcp:{tmp_path / 'files'}"], "holds a checkpoint already")


def test_other_formats_go_to_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {name: tensor.contiguous() for name, tensor in tensors().items()}
    (tmp_path / "hub").mkdir()
    save_file(model, tmp_path / "hub/model.safetensors")
    assert main([f"hf:{tmp_path / 'hub'}", f"dcp:{tmp_path / 'new/dcp'}"]) == 0
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "new/dcp"))
    assert same(into["model"], model)
    fails(capsys, [f"dcp:{tmp_path / 'new/dcp'}", f"hf:{tmp_path / 'new/hub'}"], "--allow-pickle")
    words = [f"dcp:{tmp_path / 'new/dcp'}", f"hf:{tmp_path / 'new/hub'}", "--allow-pickle", "--shard-size", "500"]
    assert main(words) == 0
    files = capsys.readouterr().out.split()
    assert len(files) > 1
    assert same({name: t for file in files for name, t in load_file(tmp_path / "new/hub" / file).items()}, model)
    torch.save({"net": {"w": torch.arange(5)}}, tmp_path / "net.pt")
    assert main([f"pt:{tmp_path / 'net.pt'}", f"hf:{tmp_path / 'new/net'}", "--part", "net"]) == 0
    assert same(load_file(tmp_path / "new/net/model.safetensors"), {"w": torch.arange(5)})
    fails(capsys, [f"pt:{tmp_path / 'net.pt'}", f"hf:{tmp_path / 'new/net'}", "--part", "net"], "holds a model already")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["dcp", "hub", "net"], "nothing between is left"


def binary() -> Path:
    """The `forebay` that was built beside these tests."""
    built = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[2] / "target")) / "debug/forebay"
    if not built.exists():
        pytest.skip(f"NO BINARY: {built} is not built, so that `forebay ckpt convert` is not tested with torch's files")
    return built


def test_the_binary_has_python_convert_and_tell_it_as_json(tmp_path: Path) -> None:
    def convert(*words: str) -> Any:
        command = [binary(), "ckpt", "convert", *words, "--python", sys.executable, "--json"]
        # Not the user's settings.
        done = subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run, files, hub = f"{tmp_path / 'run'}", f"dcp:{tmp_path / 'files'}", f"hf:{tmp_path / 'hub'}"
    net = {"w": torch.arange(6, dtype=torch.int16), "b": torch.ones(3, 5), "empty": torch.zeros(0, 2)}
    torch.save({"net": net, "n": 3}, tmp_path / "net.pt")
    expected = {"tensors": 3, "bytes": 12 + 60}
    told = convert(f"pt:{tmp_path / 'net.pt'}", f"{run}@4")
    assert told == {"step": 4, **expected}
    assert same(forebay.load(run, step=4)["net"], net)
    told = convert(run, files)
    assert told == {"files": sorted(os.listdir(tmp_path / "files")), **expected} and ".metadata" in told["files"]
    told = convert(files, hub, "--allow-pickle", "--part", "net", "--max-shard-size", "60")
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    assert told == {"files": names, **expected}
    assert same({name: t for file in names for name, t in load_file(tmp_path / "hub" / file).items()}, net)


def test_the_binary_tells_what_python_did_as_what_it_did_itself(tmp_path: Path) -> None:
    def convert(*words: str) -> tuple[int, list[str], list[str]]:
        command = [binary(), "ckpt", "convert", *words, "--python", sys.executable]
        done = subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()

    run = f"{tmp_path / 'run'}"
    torch.save({"net": {"w": torch.ones(3, 5)}}, tmp_path / "net.pt")
    code, told, said = convert(f"pt:{tmp_path / 'net.pt'}", f"{run}@4")
    assert (code, [line.split() for line in told]) == (0, [["step", "4"], ["tensors", "1"], ["size", "60", "B"]]), said
    assert main([run, f"dcp:{tmp_path / 'files'}"]) == 0
    code, told, said = convert(f"dcp:{tmp_path / 'files'}", f"hf:{tmp_path / 'hub'}", "--part", "net")
    assert (code, told) == (1, [])
    assert said == [
        f"error: torch reads {tmp_path / 'files'} by unpickling its files, which can run any code",
        "hint: --allow-pickle, if you trust whoever wrote them",
    ]
    # Warnings of a conversion are as the command's own.
    one = {"a": torch.ones(2), "b": torch.ones(3)}
    (tmp_path / "indexed").mkdir()
    save_file(one, tmp_path / "indexed/one.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors"}}
    (tmp_path / "indexed/model.safetensors.index.json").write_text(json.dumps(index))
    code, told, said = convert(f"hf:{tmp_path / 'indexed'}", f"dcp:{tmp_path / 'from'}", "--part", "net")
    assert (code, [line.split()[0] for line in told]) == (0, ["files", "tensors", "size"]), said
    assert len(said) == 1 and said[0].startswith("warning: "), said
    code, told, said = convert(f"hf:{tmp_path / 'indexed'}", f"dcp:{tmp_path / 'json'}", "--part", "net", "--json")
    assert code == 0 and list(json.loads(said[0])) == ["warning"], said


def test_what_torch_tells_of_a_file_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It tells more than what is wrong, in bold, or a number alone."""
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    (tmp_path / "text.pt").write_text("epoch,loss\n")
    for name in ("module.pt", "text.pt"):
        assert main([f"pt:{tmp_path / name}", f"{tmp_path / 'other'}"]) == 1
        told, said = capsys.readouterr()
        first = said.splitlines()[0]
        assert not told and "\x1b" not in first and "two options" not in first, said
        assert re.search(r"torch.save: [A-Za-z]{3}", first), said
    fails(capsys, [f"pt:{tmp_path / 'none.pt'}", f"{tmp_path / 'other'}"], "none.pt: No such file")


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_nothing_is_written_to_a_directory_that_a_url_was_taken_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lay below the working directory, in `s3:`, and the exit code was 0."""
    monkeypatch.chdir(tmp_path)
    forebay.save({"model": {"w": torch.ones(3)}}, tmp_path / "run", step=1)
    fails(capsys, ["run", f"{kind}:s3://bucket/out"], "mount the bucket")
    other = "dcp" if kind == "hf" else "hf"
    fails(capsys, [f"{kind}:s3://bucket/in", f"{other}:out"], "mount the bucket")
    assert os.listdir(tmp_path) == ["run"]
    assert main(["run", f"{kind}:file://{tmp_path}/out"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_a_conversion_ends_no_training_that_it_is_not_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hub").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "hub/model.safetensors")
    hub, run = f"hf:{tmp_path}/hub", str(tmp_path / "run")
    assert main([hub, f"{run}@4"]) == 0
    for target in (run, f"{run}@4", f"{run}@3"):
        fails(capsys, [hub, target], "a training that saves there would end")
    fails(capsys, [hub, f"{run}@5O"], "`5O` is no step")
    assert main([hub, f"{run}@5"]) == 0 and main([hub, f"{run}@3", "--force"]) == 0
    assert [step for step, _, _ in forebay._loading.newest_steps(f"file://{run}", True)] == [3, 5, 4]
    assert not (tmp_path / "run@5O").exists()


def test_the_binary_has_python_open_the_store_that_its_settings_name(tmp_path: Path, s3_endpoint: str) -> None:
    """It wrote to a bucket of that name at Amazon, where there was one."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    settings = tmp_path / "forebay.toml"

    def convert(options: str, step: int) -> subprocess.CompletedProcess[str]:
        settings.write_text(f"[volume.store]\noptions = {{ {options} }}\n")
        source, target = f"pt:{tmp_path / 'net.pt'}", f"s3://checkpoints/settings@{step}"
        words = ["--config", str(settings), "ckpt", "convert", source, target]
        elsewhere = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
        command = [binary(), *words, "--python", sys.executable]
        return subprocess.run(command, env=elsewhere, capture_output=True, text=True)

    torch.save({"net": torch.ones(3)}, tmp_path / "net.pt")
    done = convert(f'aws_endpoint_url = "{endpoint}"', 1)
    assert done.returncode == 0, done.stderr
    assert forebay.load("s3://checkpoints/settings")["net"].tolist() == [1.0] * 3
    done = convert(f'endpoint_url = "{endpoint}", region = "us-east-1"', 2)
    assert done.returncode == 0, done.stderr


def test_tensors_in_tuples_are_written_with_them(tmp_path: Path) -> None:
    state = {"pair": (1, torch.arange(5)), "list": [{"deep": (torch.ones(2), {"x": torch.zeros(3)})}, torch.eye(2)]}
    forebay.save(state, tmp_path / "run")
    assert main([str(tmp_path / "run"), f"dcp:{tmp_path / 'files'}"]) == 0
    into: dict[str, Any] = {"pair": None, "list": [{"deep": None}, torch.zeros(2, 2)]}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "files"))
    assert into["pair"][0] == 1 and torch.equal(into["pair"][1], torch.arange(5))
    ones, rest = into["list"][0]["deep"]
    assert torch.equal(ones, torch.ones(2)) and torch.equal(rest["x"], torch.zeros(3))
    assert torch.equal(into["list"][1], torch.eye(2))


WATCHED = """
import sys
from forebay import _outline, convert

lookup = _outline.Planner.lookup_object

def watched(planner, index):
    found = lookup(planner, index)
    if index.fqn.startswith("model."):
        (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
        print(int(line.split()[1]) << 10)
    return found

_outline.Planner.lookup_object = watched
sys.exit(convert.main(sys.argv[1:]))
"""
"""Converts, and prints what memory the process has whenever it has read a tensor."""


def test_a_directory_is_written_a_tensor_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # So large that the allocator keeps nothing of what was freed.
    size, count = 40 << 20, 8
    state = {"model": {f"w{index}": torch.full((size,), index, dtype=torch.uint8) for index in range(count)}, "n": 3}
    forebay.save(state, tmp_path / "run", step=1)
    del state

    # In a process of its own: what this one has freed would be taken again there.
    words = [str(tmp_path / "run"), f"dcp:{tmp_path / 'files'}"]
    told = subprocess.run([sys.executable, "-c", WATCHED, *words], check=True, capture_output=True, text=True).stdout
    used = [int(line) for line in told.split()]
    assert len(used) == count
    assert max(used) - used[0] < 2 * size, used
    into = {"model": {f"w{index}": torch.zeros(size, dtype=torch.uint8) for index in range(count)}, "n": 0}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "files"))
    assert all(bool((into["model"][f"w{index}"] == index).all()) for index in range(count)) and into["n"] == 3
    # What is damaged is told, and no directory is left that could be taken for one.
    (shard,) = (tmp_path / "run").glob("shards/*/*/*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    fails(capsys, [str(tmp_path / "run"), f"dcp:{tmp_path / 'other'}"], "are damaged")
    assert not (tmp_path / "other/.metadata").exists()
