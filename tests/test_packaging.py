"""The layout and the packages: the adapters lie beside the core and are imported as parts of it."""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import hvdlite
from hvdlite.horovod.names import VERSION

ROOT = Path(__file__).parent.parent


def packages_in_tree():
    """Name the packages, found without following links."""
    core = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "hvdlite").rglob("__init__.py")
    }
    adapters = {
        ".".join(("hvdlite", *path.parent.relative_to(ROOT / "adapters").parts))
        for path in (ROOT / "adapters").rglob("__init__.py")
    }
    return core | adapters


def test_wheel_holds_the_adapters_inside_the_package(tmp_path):
    # A copy: setuptools leaves build folders beside the sources.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("hvdlite", "adapters"):
        (source / folder).symlink_to(ROOT / folder)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*command, "--no-index", "-w", tmp_path, source], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entries,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(entries).decode()
    scripts = dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))
    assert scripts.keys() == {"horovodrun", "hvdlite", "hvdliterun"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    for package in packages_in_tree():
        assert package.replace(".", "/") + "/__init__.py" in names
    assert "hvdlite/py.typed" in names
    assert f"hvdlite/horovod/metadata/horovod-{VERSION}.dist-info/METADATA" in names
    assert not any(name.startswith(("adapters", "tests", "examples")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def tracked_files():
    """Return the paths of all files that git tracks."""
    command = ["git", "-C", ROOT, "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"not a repository: {done.stderr}")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def test_sdist_holds_all_that_the_repository_has(tmp_path):
    tracked = tracked_files()
    for name in tracked:  # a copy: setuptools leaves a folder beside the sources
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*command, tmp_path / "source"], check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        text = archive.extractfile(f"hvdlite-{hvdlite.__version__}/PKG-INFO").read().decode()
    assert [name for name in tracked if name not in names] == []
    assert not any(name.endswith((".pyc", "__pycache__")) for name in names)

    about = message_from_string(text)
    assert about["Author"] == "hvdlite contributors"
    # An index shows this text by itself: a relative link or picture leads nowhere there.
    assert "pip install 'hvdlite[" in about.get_payload()
    assert re.findall(r"\]\((?!https://|#)", about.get_payload()) == []


def test_all_places_that_name_the_version_agree():
    for name, pattern in (
        ("pyproject.toml", 'version = "(.+)"'),
        ("CITATION.cff", "version: (.+)"),
    ):
        found = re.search(f"^{pattern}$", (ROOT / name).read_text(), re.MULTILINE)
        assert (name, found[1]) == (name, hvdlite.__version__)


def test_the_readme_names_what_is_installed():
    project = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    names = re.findall(r'"([\w-]+)', block)
    assert "numpy" in names
    (line,) = re.findall(r"hvdlite needs (.*?)\.", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [name for name in names if name not in line] == []


@pytest.mark.parametrize("adapter", ["torch", "tensorflow", "keras"])
def test_adapter_is_found_in_the_repository(adapter):
    found = importlib.util.find_spec(f"hvdlite.{adapter}")
    assert Path(found.origin).resolve().parent == ROOT / "adapters" / adapter


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["torch", "tensorflow", "keras"])
def test_adapter_without_its_framework_says_what_to_install(adapter):
    code = (
        f"import sys; sys.modules[{adapter!r}] = None\n"
        f"try:\n    import hvdlite.{adapter}\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"hvdlite.{adapter} needs ")
    assert f"`pip install hvdlite[{adapter}]`" in done.stdout
    assert done.stdout.count("\n") == 1


def test_importing_the_core_loads_no_framework_no_mpi_and_nothing_beside_the_core():
    code = """if True:
        import sys
        for name in ("torch", "tensorflow", "keras"):
            sys.modules[name] = None
        import hvdlite
        beside = ["elastic", "virtual", "schedule", "launch", "tools", "horovod"]
        print({"mpi4py.MPI", *(f"hvdlite.{name}" for name in beside)} & {*sys.modules})
        assert {*hvdlite.__all__} <= {*dir(hvdlite)}
        for name in hvdlite.__all__:
            getattr(hvdlite, name)
        """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
