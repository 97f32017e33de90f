"""The package as it is installed: its types, and the one wheel on every Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import forebay
import pytest

PROGRAM = Path(__file__).with_name("typed_program.py")
SITE = Path(forebay.__file__).parent.parent


def mypy(cache: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Checks types as python/pyproject.toml says, in the place where the package is installed."""
    config = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache)]
    return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, cwd=SITE, check=False)


def test_types_are_whole_and_catch_what_is_wrong(tmp_path: Path) -> None:
    ended = mypy(tmp_path, SITE / "forebay", PROGRAM)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import forebay\n"
        "forebay.Checkpointer('s3://b/r', every='often')\n"
        "forebay.save({})\n"
        "start: int = forebay.Checkpointer('s3://b/r').restore({})\n"
        "forebay.Checkpointer('s3://b/r').steps(1, {})\n"
        "import forebay.huggingface, forebay.lightning\n"
        "forebay.huggingface.Callback('s3://b/r', 5, linger=1.5, on_error='warn', local='/nvme', local_bytes='5GiB')\n"
        "forebay.huggingface.Callback('s3://b/r', linger='long')\n"
        "forebay.huggingface.Callback('s3://b/r', rng=False)\n"
        "forebay.lightning.CheckpointIO(flush_rate='5MiB', agent_log='log')\n"
        "forebay.lightning.CheckpointIO(linger=5)\n"
        "forebay.lightning.sharded(object, local='/nvme')\n"
    )
    ended = mypy(tmp_path, wrong)
    lines = {line.split(":")[1] for line in ended.stdout.splitlines() if ": error:" in line}
    assert lines == {"2", "3", "4", "5", "8", "9", "11", "12"}, ended.stdout + ended.stderr


def other_pythons() -> list[str]:
    """Pythons of other versions on PATH, or of pyenv, that run and are new enough."""
    home = Path.home() / ".pyenv/versions"
    names = [found for minor in range(10, 20) if (found := shutil.which(f"python3.{minor}"))]
    pythons: dict[str, str] = {}
    for python in [*names, *map(str, home.glob("*/bin/python3"))]:
        ask = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
        if version and tuple(map(int, version.split("."))) >= (3, 10):
            pythons.setdefault(version, python)
    pythons.pop(f"{sys.version_info[0]}.{sys.version_info[1]}", None)
    return list(pythons.values())


def test_the_typed_program_runs_on_every_python(tmp_path: Path) -> None:
    others = other_pythons()
    for index, python in enumerate([sys.executable, *others]):
        folder = tmp_path / str(index)
        folder.mkdir()
        # Nothing but the package: neither torch nor numpy is needed.
        variables = {**os.environ, "PYTHONPATH": str(SITE)}
        ended = subprocess.run(
            [python, str(PROGRAM), str(folder)], capture_output=True, text=True, env=variables, check=False
        )
        assert ended.returncode == 0, f"{python}: {ended.stdout}{ended.stderr}"
        # What one wrote this one reads.
        assert forebay.load(folder / "alone") == {"values": [1, "two", 3.0]}
    if not others:
        pytest.skip("NO OTHER PYTHON on PATH: the wheel is tested on one version only")
