"""The package can be installed elsewhere: everything that it reads goes with it."""

import tomllib
from pathlib import Path

HOUSE = Path(__file__).parent.parent


def test_every_data_file_is_packed():
    """Each file of the package that is no Python, such as weights, is covered by package-data."""
    settings = tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = HOUSE / "minidflash"
    globs = settings["package-data"]["minidflash"]
    packed = {p for glob in globs for end in ("", "/*") for p in package.glob(glob + end)}
    there = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert there - packed == set(), "add them to [tool.setuptools.package-data]"
    assert package / "kit/weights/target/model.safetensors" in packed


def test_every_folder_with_code_is_a_package():
    """Each folder that holds Python has an __init__.py, without which it would stay behind."""
    folders = {p.parent for p in (HOUSE / "minidflash").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
