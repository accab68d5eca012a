"""The layout: the adapters lie beside the core and are imported as parts of it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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
    for package in packages_in_tree():
        assert package.replace(".", "/") + "/__init__.py" in names
    assert "hvdlite/py.typed" in names
    assert f"hvdlite/horovod/bootstrap/horovod-{VERSION}.dist-info/METADATA" in names
    assert not any(name.startswith(("adapters", "tests", "examples")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["torch", "tensorflow", "keras"])
def test_adapter_is_importable_from_the_repository_root(adapter):
    pytest.importorskip(adapter)
    code = f"import hvdlite.{adapter} as hvd; print(hvd.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).resolve().parent == ROOT / "adapters" / adapter


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
    assert f"pip install hvdlite[{adapter}]" in done.stdout
    assert done.stdout.count("\n") == 1


def test_importing_the_core_loads_neither_mpi_nor_a_framework():
    code = (
        "import sys\n"
        "for name in ('torch', 'tensorflow', 'keras'): sys.modules[name] = None\n"
        "import hvdlite\n"
        "print('mpi4py.MPI' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
