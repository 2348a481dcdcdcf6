"""The README says what the results say, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ropaws.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_figures_come_from_the_result_files():
    script = [sys.executable, str(ROOT / "scripts/readme_tables.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page, capsys):
    """Every `ropaws` line of a shell block, up to the point where it would do something."""
    commands = [
        line.split("#")[0].split("&&")[0].split()[1:]
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("ropaws ")
    ]
    for command in commands:
        flags = [word for word in command if word.startswith("--")]
        with pytest.raises(SystemExit) as end:
            main([command[0], "--help-all"])
        assert end.value.code in (0, None)
        help_text = capsys.readouterr().out
        assert all(flag in help_text for flag in flags), command


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"`make ([\w-]+)`", page.read_text())) <= targets
    assert {"venv", "demo", "test", "lint", "bench", "clean"} <= targets
