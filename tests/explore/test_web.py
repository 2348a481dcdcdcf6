"""The page's own tests and types, run by node, and what must hold of every file that is shipped."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REQUIRE_BROWSER

ROOT = Path(__file__).parents[2]
WEB = ROOT / "src/ropaws/explore/web"
CHECK = ROOT / "web-check"
FILES = sorted(WEB.iterdir())
MOST_BYTES = 500_000


def leave_out(reason):
    """As for the browser: a test that is left out must not pass unseen in CI."""
    if os.environ.get(REQUIRE_BROWSER):
        pytest.fail(f"{reason}, and {REQUIRE_BROWSER} is set")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def node():
    found = shutil.which("node")
    if found is None:
        leave_out("no node on this machine")
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(int(part) for part in re.findall(r"\d+", text)[:2]) < (20, 19):
        leave_out(f"node {text.strip()} is older than 20.19")
    return found


def checker(name):
    """From npm; `make web-tools` installs it, and .ci/run does so."""
    found = CHECK / "node_modules/.bin" / name
    if not found.exists():
        pytest.skip(f"no {name}: run `make web-tools`")
    return str(found)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_modules_pass_their_tests(node):
    shown = run(node, "--test", "--test-reporter=tap", "tests/explore/web/", cwd=ROOT)
    passed = re.search(r"^# pass (\d+)$", shown, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > 40


def test_the_types_are_right(node):
    run(node, checker("tsc"), "--project", str(CHECK))


def test_the_type_check_finds_a_wrong_type(node, tmp_path):
    """A configuration that checks nothing would pass the test above."""
    (tmp_path / "wrong.js").write_text('/** @type {number} */\nexport const wrong = "text";\n')
    done = subprocess.run(
        [node, checker("tsc"), "--noEmit", "--strict", "--checkJs", "--allowJs", str(tmp_path / "wrong.js")],
        capture_output=True,
        text=True,
    )
    assert "TS2322" in done.stdout
    assert '"strict": true' in (CHECK / "tsconfig.json").read_text()
    assert '"checkJs": true' in (CHECK / "tsconfig.json").read_text()


def test_the_format_is_even(node):
    options = ("--config", str(CHECK / ".prettierrc.json"), "--check")
    run(node, checker("prettier"), *options, str(WEB), str(ROOT / "tests/explore/web"))


def test_what_is_shipped_is_small():
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_file_is_plain_and_stays_on_this_machine(path):
    """No address of another machine, nothing that reads data as HTML or code or that the policy forbids."""
    text = path.read_text()
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function\(", text
    )
    assert not re.search(r"setAttribute\(\s*[\"']style|javascript:|@import url|srcdoc|DOMParser", text)
    if path.suffix == ".html":
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\ssrc=\"/web/)", text)


def test_every_part_that_a_script_asks_for_is_on_the_page():
    """`find` throws at an id that is missing; this says so before a browser does."""
    page = (WEB / "index.html").read_text()
    ids = re.findall(r"\sid=\"([\w-]+)\"", page)
    assert len(ids) == len(set(ids))
    scripts = "".join(path.read_text() for path in FILES if path.suffix == ".js")
    asked = set(re.findall(r"\bfind\(\s*\"([\w-]+)\"", scripts)) | set(
        re.findall(r"setText\(\s*\"([\w-]+)\"", scripts)
    )
    assert len(asked) > 40
    assert asked <= set(ids)


def test_every_file_is_used():
    texts = {path.name: path.read_text() for path in FILES}
    for name in texts:
        others = "".join(text for other, text in texts.items() if other != name)
        assert name == "index.html" or f"/{name}" in others
