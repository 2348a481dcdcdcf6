"""What is in the sdist and in the wheel: all of the package, the version of its one place, and nothing else.

python scripts/check_dist.py dist
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a person who builds from the sdist needs or reads; neither tests nor results of benchmarks.
BESIDE = {
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "constraints.txt", "examples",
    "pyproject.toml", "src", ".gitignore",
}  # fmt: skip
MOST_BYTES = 5 << 20  # the embedded images are most of it


def package_files() -> set[str]:
    """Of the package, as git knows them."""
    listed = subprocess.run(
        ["git", "ls-files", "src/ropaws"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split("\n")) - {""}


def check(folder: Path) -> None:
    (sdist,), (wheel,) = sorted(folder.glob("*.tar.gz")), sorted(folder.glob("*.whl"))
    version = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "src/ropaws/__init__.py").read_text(), re.MULTILINE
    )
    assert version is not None
    assert sdist.name == f"ropaws-{version[1]}.tar.gz", f"{sdist.name} is not of version {version[1]}"
    assert wheel.name.startswith(f"ropaws-{version[1]}-"), f"{wheel.name} is not of version {version[1]}"
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == version[1], f"CITATION.cff is not of version {version[1]}"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()} - {""}
    strangers = {name.partition("/")[0] for name in inside} - BESIDE
    assert not strangers, (
        f"{sdist.name} has {', '.join(sorted(strangers))}; see [tool.hatch] in pyproject.toml"
    )
    expected = package_files()
    assert expected <= inside, f"{sdist.name} lacks {', '.join(sorted(expected - inside)[:5])}"
    with zipfile.ZipFile(wheel) as archive:
        packed = {f"src/{name}" for name in archive.namelist() if name.startswith("ropaws/")}
    assert packed == expected, f"{wheel.name} differs in {', '.join(sorted(packed ^ expected)[:5])}"
    for path in (sdist, wheel):
        assert path.stat().st_size <= MOST_BYTES, f"{path.name} has {path.stat().st_size:,} bytes"
    print(f"{sdist.name} and {wheel.name}: {len(expected)} files of the package, nothing else")


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]))
    except AssertionError as error:
        sys.exit(str(error))
