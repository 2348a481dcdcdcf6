"""The documentation says what the code does: links, commands, options, code blocks, pages of the site."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from ropaws.cli.main import COMMANDS, main
from ropaws.core import run_layout as layout
from ropaws.methods import METHODS, Method
from ropaws.run.config import RunConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page, language):
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page):
    """The arguments of every `ropaws` line of a shell block."""
    for block in blocks(page, "sh") + blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition("&&")[0], comments=True)
            if "ropaws" in words and words[0] in ("ropaws", "srun", "torchrun"):
                yield words[words.index("ropaws") + 1 :]


@functools.cache
def help_text(*command):
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as end:
        main([*command, "--help-all"])
    assert not end.value.code
    return printed.getvalue()


@each_page
def test_links_and_their_anchors_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), target
        if anchor and place.suffix == ".md" and place.name != "cli.md":  # whose headings are made by a hook
            assert anchor in anchors(place), target


def anchors(page):
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@each_page
def test_commands_exist_with_their_options(page):
    for command, *arguments in commands(page):
        assert command in COMMANDS
        foreign = any(":" in word for word in arguments if not word.startswith(("timm:", "-")))
        method = (
            arguments[arguments.index("--method") + 1] if "--method" in arguments and not foreign else None
        )
        text = help_text(command, *(["--method", method] if command == "train" and method else []))
        for word in arguments:
            if word.startswith("--"):
                assert word.partition("=")[0] in text, (command, word)


@each_page
def test_code_is_python(page):
    for block in blocks(page, "python"):
        if "--8<--" not in block:
            ast.parse(block)


@each_page
def test_names_of_ropaws_in_code_exist(page):
    """`ropaws.x` and `from ropaws... import x` of the Python blocks."""
    for block in blocks(page, "python"):
        for name in re.findall(r"\bropaws\.(\w+)\(", block):
            assert hasattr(importlib.import_module("ropaws"), name), name
        for module, names in re.findall(r"^from (ropaws[\w.]*) import ([\w, ]+)", block, re.MULTILINE):
            for name in names.split(","):
                assert hasattr(importlib.import_module(module), name.split()[0].strip()), (module, name)


@each_page
def test_files_of_the_repository_that_are_named_exist(page):
    named = r"`(?:python )?((?:src|tests|benchmarks|examples|scripts|docs)/[\w./-]+\.\w+)"
    for path in re.findall(named, page.read_text()):
        assert (ROOT / path).exists() or page.name == "CHANGELOG.md", path


def test_every_page_is_in_the_navigation_and_the_other_way_round():
    nav = re.search(r"^nav:\n(.*?)^\w", (ROOT / "mkdocs.yml").read_text(), re.DOTALL | re.MULTILINE)
    listed = re.findall(r": ([\w/-]+\.md)$", nav[1], re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_included_files_exist():
    included = [
        path for page in PAGES for path in re.findall(r'^--8<-- "(.+)"$', page.read_text(), re.MULTILINE)
    ]
    assert "examples/own_method.py" in included
    assert all((ROOT / path).is_file() for path in included)


@each_page
def test_objects_of_the_reference_exist(page):
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        try:
            assert hasattr(importlib.import_module(module), attribute), name
        except ModuleNotFoundError:
            pytest.fail(name)


def test_the_reference_has_all_settings_public_names_and_methods():
    listed = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    for field in dataclasses.fields(RunConfig):
        kind = field.default_factory
        assert f"::: {kind.__module__}.{kind.__qualname__}" in listed, field.name
    for kind in METHODS.values():  # alone, or with the text of its file, which names paper and deviations
        alone = f"::: {kind.__module__}.{kind.__qualname__}" in listed
        assert alone or re.search(rf"::: {kind.__module__}\n.*members: \[{kind.__qualname__}\]", listed)
    ropaws = importlib.import_module("ropaws")
    for name in ropaws.__all__:
        value = getattr(ropaws, name)
        where = value.__name__ if hasattr(value, "__spec__") else f"{getattr(value, '__module__', '')}.{name}"
        assert name == "__version__" or f"::: {where}" in listed, name


def test_the_page_on_methods_has_every_hook():
    text = (DOCS / "add-a-method.md").read_text()
    hooks = [name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")]
    assert len(hooks) > 10
    for hook in hooks:
        assert f"| `{hook}(" in text, hook
    for attribute in ("optim", "init", "needs_init", "uses_labels"):
        assert f"| `{attribute}` |" in text


def test_the_page_on_experiments_has_every_file_of_a_run_folder():
    text = (DOCS / "runs.md").read_text()
    names = [name for name in vars(layout) if name.isupper()]
    files = [value for name in names if isinstance(value := getattr(layout, name), str)]
    assert len(files) > 15
    for file in files:
        assert f"`{file}`" in text or f"`{file}/`" in text, file


def test_the_page_on_reports_has_every_part_and_section():
    from ropaws.report.run_page import SECTIONS
    from ropaws.run.evaluate import PARTS

    text = (DOCS / "analysis.md").read_text()
    assert all(f"| `{part}` |" in text for part in PARTS)
    assert all(section in text for section in SECTIONS)


@pytest.fixture(scope="module")
def cli_reference():
    spec = importlib.util.spec_from_file_location("cli_reference", ROOT / "scripts/cli_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cli_reference"] = module
    spec.loader.exec_module(module)
    return module


def test_the_command_line_reference_has_every_command_and_option(cli_reference):
    text = cli_reference.reference()
    for name in COMMANDS:
        assert f"## ropaws {name}\n" in text
        for option in re.findall(r"^[│ ] (--\w[\w.-]*)", help_text(name), re.MULTILINE):
            assert f"`{option}" in text, (name, option)
    for name, kind in METHODS.items():
        assert f"### --method {name}\n" in text
        for field in dataclasses.fields(kind):
            assert f"`--method.{field.name.replace('_', '-')}" in text
    assert cli_reference.MARK in (DOCS / cli_reference.PAGE).read_text()


def test_the_scripts_of_the_tutorial_work(tmp_path):
    """They write the embedded images into folders, and play the annotator."""
    make, answer = blocks(DOCS / "tutorial.md", "python")
    run = functools.partial(subprocess.run, cwd=tmp_path, check=True)
    run([sys.executable, "-c", make])
    labeled = tmp_path / "garments/labeled"
    assert [len(list(folder.iterdir())) for folder in sorted(labeled.iterdir())] == [4] * 5
    pool = sorted((tmp_path / "garments/pool").iterdir())
    assert len(pool) == 4980
    rows = "".join(f"{image}\n" for image in pool[-20:])
    (tmp_path / "next.csv").write_text(f"name\n{rows}")
    run([sys.executable, "-c", answer])
    moved = [image for image in pool[-20:] if not image.exists()]
    assert 0 < len(moved) == len(list(labeled.rglob("*.png"))) - 20 < 20
