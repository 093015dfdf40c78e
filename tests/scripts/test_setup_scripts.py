"""Setting up: what the project declares, and what the scripts refuse, install, and when."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parent.parent.parent
SCRIPTS = REPO / "scripts"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [Requirement(text) for text in (*PROJECT["dependencies"], *chain(*EXTRAS.values()))]
TOOLS = ["bash", "cat", "cut", "dirname", "env", "realpath", "rm", "sha256sum", "timeout"]
HAS_DRIVER = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


# --- what is declared -----------------------------------------------------------------------------


def requirements(file: str) -> list[Requirement]:
    lines = (REPO / file).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("2.10.1", False),
        ("2.11.0a0+nv26.3", True),
        ("2.12.0a0+nv26.5", True),
        ("2.13.0", True),
    ],
)
def test_nvidias_torch_satisfies_us(version: str, accepted: bool) -> None:
    (torch,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    # As pip judges what is installed.
    assert torch.specifier.contains(version, prereleases=True) is accepted


def test_constraints_pin_everything_that_is_needed() -> None:
    pins = {canonicalize_name(pin.name): pin for pin in requirements("constraints.txt")}
    assert all(re.fullmatch(r"==[^*+]+", str(pin.specifier)) for pin in pins.values())

    seen: set[tuple[str, frozenset[str]]] = set()
    queue = list(DECLARED)
    while queue:
        wanted = queue.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        if name.startswith("nvidia-") and name not in pins:
            continue  # torch's CUDA build pins these by itself
        assert name in pins, f"constraints.txt does not pin {wanted}"
        (pin,) = pins[name].specifier
        assert wanted.specifier.contains(pin.version, prereleases=True), f"{wanted}: {pins[name]}"
        try:
            needs = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # the [gpu] extra, on a machine without it
            continue
        for need in needs:
            extras = wanted.extras or {""}
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(need)
    assert len(seen) > 50


def test_the_pyramid_toolkit_called_apex_is_nowhere() -> None:
    names = {requirement.name for requirement in DECLARED}
    for file in ("constraints.txt", "requirements-no-torch.txt"):
        names |= {requirement.name for requirement in requirements(file)}
    assert "apex" not in names


def test_the_image_gets_every_dependency_but_torch() -> None:
    declared = [Requirement(text) for text in PROJECT["dependencies"]]
    assert requirements("requirements-no-torch.txt") == [r for r in declared if r.name != "torch"]


def test_the_dockerfile_never_installs_torch() -> None:
    text = (REPO / "Dockerfile").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    commands = code.replace("\\\n", " ")
    assert re.search(r"^ARG BASE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3$", commands, re.MULTILINE)
    assert re.search(r"^FROM \$\{BASE\}$", commands, re.MULTILINE)
    runs = [line for line in commands.splitlines() if line.startswith("RUN ")]
    first, second = (run.split("pip install ")[1].split("&&")[0].split() for run in runs)
    assert first == [
        "--no-cache-dir",
        "--constraint",
        "/tmp/torch.txt",  # the image's own torch
        "--requirement",
        "requirements-no-torch.txt",
    ]
    assert second == ["--no-cache-dir", "--no-deps", "--editable", "."]
    assert "constraints.txt" not in commands


# --- what is missing on a machine ---------------------------------------------------------------


def tools(folder: Path, **programs: str) -> str:
    """A PATH with the tools of a bare machine and these scripts, and nothing else."""
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    for name, text in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return str(folder)


def python_that_says(tmp_path: Path, text: str) -> str:
    """The lines of a `python3` that runs this Python after `text`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(text)
    return f'PYTHONPATH={tmp_path}/site exec {sys.executable} "$@"'


def refused(tmp_path: Path, script: str, *arguments: str, **settings: str) -> str:
    """Run a script that must stop with exit code 2 and one line, before it makes anything."""
    venv = tmp_path / "venv"
    environment = {"VENV": str(venv), "CXX": "", **settings}
    result = subprocess.run(
        [SCRIPTS / script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert not venv.exists()
    return result.stderr


PYTHON = f'exec {sys.executable} "$@"'
COMPILER = "exit 0"


@pytest.mark.parametrize("script", ["setup.sh", "quickstart.sh", "test.sh"])
def test_a_missing_compiler_is_one_line(tmp_path: Path, script: str) -> None:
    path = tools(tmp_path / "bin", python3=PYTHON)
    assert "apt-get install g++\n" in refused(tmp_path, script, PATH=path)


def test_a_missing_venv_module_is_one_line(tmp_path: Path) -> None:
    python = python_that_says(tmp_path, "import sys; sys.modules['ensurepip'] = None")
    path = tools(tmp_path / "bin", python3=python, **{"g++": COMPILER})
    line = refused(tmp_path, "setup.sh", PATH=path)
    version = f"python3.{sys.version_info.minor}"
    assert line.endswith(("apt-get install python3-venv\n", f"apt-get install {version}-venv\n"))


def test_everything_missing_is_one_line(tmp_path: Path) -> None:
    python = python_that_says(
        tmp_path,
        "import sys, sysconfig; sys.modules['ensurepip'] = None\n"
        "sysconfig.get_path = lambda *names: '/nonexistent'",
    )
    line = refused(tmp_path, "setup.sh", PATH=tools(tmp_path / "bin", python3=python))
    packages = line.split("apt-get install ")[1].split()
    assert packages[0] == "g++"
    assert [name.rsplit("-", 1)[1] for name in packages[1:]] == ["venv", "dev"]


def test_no_python_is_one_line(tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", python3="exit 1", **{"g++": COMPILER})
    line = refused(tmp_path, "setup.sh", PATH=path)
    assert "no Python 3.11 or newer" in line and "apt-get install python3.11 " in line


def test_a_named_python_that_is_too_old_is_one_line(tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", python3=PYTHON, old="exit 1", **{"g++": COMPILER})
    assert "PYTHON=old" in refused(tmp_path, "setup.sh", PATH=path, PYTHON="old")


def test_an_unknown_argument_is_one_line(tmp_path: Path) -> None:
    path = os.environ["PATH"]
    assert "'gpu': give dev" in refused(tmp_path, "setup.sh", "gpu", PATH=path)


# --- installing a small project of the same shape -----------------------------------------------


def write_wheel(folder: Path, name: str, version: str, metadata: str = "") -> None:
    """A wheel with nothing in it but its metadata, made without a build tool."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", head + metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")


BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    shutil.copy("built/project-1-py3-none-any.whl", folder)
    return "project-1-py3-none-any.whl"
"""


def imports_of_a_run() -> list[str]:
    """The modules that setup.sh imports once they are installed."""
    text = (SCRIPTS / "setup.sh").read_text()
    lines = re.search(r'bin/python" -c "\n((?:import .*\n?)+)"', text)
    assert lines
    return re.findall(r"[\w.]+(?=,|$)", lines[1], re.MULTILINE)


class Checkout:
    """The set-up scripts in a project whose parts come from two package indexes of our own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.root, self.url = folder / "a checkout", url
        self.venv = self.root / ".venv"
        shutil.copytree(SCRIPTS, self.root / "scripts")
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (self.root / "backend.py").write_text(BACKEND)
        write_wheel(
            self.root / "built",
            "project",
            "1",
            "Requires-Dist: torch\nProvides-Extra: dev\nRequires-Dist: checker; extra == 'dev'\n",
        )
        for name in imports_of_a_run():  # empty modules stand for them
            *packages, module = name.split(".")
            folder = self.root / "imports"
            folder.mkdir(exist_ok=True)
            for package in packages:
                folder = folder / package
                folder.mkdir(exist_ok=True)
                (folder / "__init__.py").touch()
            (folder / f"{module}.py").touch()

    def constrain(self, *lines: str) -> None:
        (self.root / "constraints.txt").write_text("\n".join(lines))

    def run(self, script: str, *arguments: str, code: int = 0, **settings: str) -> str:
        """The output of a script, which must end with this exit code."""
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PIP_")},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{self.url}/main",
            "TORCH_CPU_INDEX": f"{self.url}/cpu",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(self.root / "imports"),
            **settings,
        }
        environment.pop("VENV", None)
        result = subprocess.run(
            [self.root / "scripts" / script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
        )
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout

    def installed(self) -> set[str]:
        """Name-version of what the environment holds beside pip and setuptools."""
        names = (self.venv / "lib").glob("python*/site-packages/*.dist-info")
        found = {path.name.removesuffix(".dist-info") for path in names}
        return {name for name in found if name.split("-")[0] not in ("pip", "setuptools")}


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    site = tmp_path / "site"
    write_wheel(site / "main" / "checker", "checker", "1")
    for version in ("1", "2"):
        write_wheel(site / "main" / "torch", "torch", version)
        write_wheel(site / "cpu" / "torch", "torch", f"{version}+cpu")
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Checkout(tmp_path, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_life_of_an_environment(checkout: Checkout, tmp_path: Path) -> None:
    # An index that takes the connection and says nothing: three seconds, and on.
    checkout.constrain("torch==1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        output = checkout.run("setup.sh", TORCH_CPU_INDEX=url)
    assert "done in" in output
    assert (f"{url} does not answer" in output) is not HAS_DRIVER
    assert checkout.installed() == {"project-1", "torch-1"}

    # Nothing to do, so no index is asked.
    assert checkout.run("setup.sh", PIP_INDEX_URL="http://127.0.0.1:9/") == ""

    # What failed is not taken for done.
    checkout.constrain("torch==3")
    assert "done in" not in checkout.run("setup.sh", code=1)
    assert not (checkout.venv / ".fp8train-setup").exists()

    # Another constraint; the CPU build where its index answers.
    checkout.constrain("torch==2", "checker==1")
    checkout.run("setup.sh", "dev")
    torch = "torch-2" if HAS_DRIVER else "torch-2+cpu"
    assert checkout.installed() == {"project-1", torch, "checker-1"}
    assert checkout.run("setup.sh") == "", "what dev installed is more than enough"

    # pytest's closing line and exit code.
    (checkout.root / "test_it.py").write_text(
        "import pytest\ndef test_quick(): pass\n@pytest.mark.slow\ndef test_slow(): assert 0\n"
    )
    ours = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    fast = checkout.run("test.sh", "--fast", "test_it.py", PYTHONPATH=ours)
    assert "1 passed, 1 deselected" in fast.splitlines()[-1]
    whole = checkout.run("test.sh", "test_it.py", PYTHONPATH=ours, code=1)
    assert "1 failed, 1 passed" in whole.splitlines()[-1]

    # The Python that it was made with went away, and there is a driver: pip's own index.
    python = checkout.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").symlink_to("/bin/true")
    checkout.run("setup.sh", "dev", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert checkout.installed() == {"project-1", "torch-2", "checker-1"}
