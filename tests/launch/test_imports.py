"""What a script imports, read without running it."""

from __future__ import annotations

from pathlib import Path

from evenstep.launch.imports import is_foreign, scan_module, scan_script
from tests.launch.launching import write_script


def installed(folder: Path, text: str) -> tuple[str, ...]:
    return scan_script(write_script(folder, text)).installed


def test_installed_packages_with_their_modules(tmp_path: Path) -> None:
    text = """
        import os, json
        import numpy as np, click
        from sklearn.datasets import load_digits
        import torch.nn.functional as F
    """
    assert installed(tmp_path, text) == (
        "numpy",
        "click",
        "sklearn.datasets",
        "sklearn.datasets.load_digits",
        "torch.nn.functional",
    )


def test_only_what_is_imported_whenever_the_script_runs(tmp_path: Path) -> None:
    text = """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import torch
        try:
            import rich
        except ImportError:
            import click
        def later():
            import sklearn
        class Inside:
            import numpy
        with open("x") as file:
            import safetensors
        import no_such_package
        match 1:
            case 1:
                import accelerate
    """
    assert installed(tmp_path, text) == ("rich", "click", "numpy", "safetensors", "accelerate")


def test_through_modules_beside_the_script(tmp_path: Path) -> None:
    write_script(tmp_path, "import torch\nfrom pack import part", "near.py")
    write_script(tmp_path, "from . import deep", "pack/__init__.py")
    write_script(tmp_path, "from .deep.er import thing\nfrom ..x import y", "pack/part.py")
    write_script(tmp_path, "import rich.table", "pack/deep/__init__.py")
    write_script(tmp_path, "import numpy.fft\nimport near", "pack/deep/er.py")
    write_script(tmp_path, "import accelerate", "pack/unrelated.py")
    assert set(installed(tmp_path, "import near")) == {"torch", "rich.table", "numpy.fft"}


def test_a_module_beside_the_script_hides_an_installed_or_standard_one(tmp_path: Path) -> None:
    write_script(tmp_path, "import rich", "torch.py")
    write_script(tmp_path, "import click", "random.py")
    assert set(installed(tmp_path, "import torch, random")) == {"rich", "click"}


def test_uses_evenstep_anywhere(tmp_path: Path) -> None:
    write_script(tmp_path, "def f():\n    from evenstep import start", "near.py")
    for text, uses in [
        ("import evenstep", True),
        ("def f():\n    import evenstep.errors", True),
        ("import near", True),
        ("def f():\n    import near", True),
        ("import torch", False),
        ("text = 'import evenstep'", False),
        ("from . import evenstep", True),
    ]:
        assert scan_script(write_script(tmp_path, text)).uses_evenstep is uses, text


def test_a_file_that_is_not_python_is_not_said_to_be_foreign(tmp_path: Path) -> None:
    write_script(tmp_path, "def f(:", "near.py")
    for text, foreign in [("def f(:", False), ("import near", False), ("import torch", True)]:
        assert is_foreign(scan_script(write_script(tmp_path, text))) is foreign, text


def test_module_and_directory(tmp_path: Path) -> None:
    write_script(tmp_path, "import rich", "pack/__init__.py")
    write_script(tmp_path, "import click", "pack/tool.py")
    write_script(tmp_path, "import numpy", "pack/__main__.py")
    assert scan_module("pack.tool", tmp_path).installed == ("rich", "click")
    assert set(scan_module("pack", tmp_path).installed) == {"rich", "numpy"}
    assert scan_script(tmp_path / "pack").installed == ("numpy",)
    assert scan_module("no.such", tmp_path).installed == ()


def test_what_cannot_be_read_is_left_to_the_run(tmp_path: Path) -> None:
    assert installed(tmp_path, "import rich\nx = = 1") == ()
    script = tmp_path / "odd.py"
    script.write_bytes(b"\xff\xfe\0")
    assert scan_script(script).installed == ()
    write_script(tmp_path, "def broken(:", "near.py")
    assert installed(tmp_path, "import near, rich") == ("rich",)
