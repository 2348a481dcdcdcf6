"""The examples in docstrings run, and every public function has one."""

import doctest
import importlib
import inspect

import pytest

from tests.photos import train_on_photos

# Module, and which of its functions need an example.
PUBLIC = {
    "ropaws.equations": None,
    "ropaws.run.run": ("Run.evaluate", "Run.predict", "Run.suggest", "Run.report", "Run.export"),
    "ropaws.classify.estimator": ("RoPAWSClassifier",),
    "ropaws.pool.listing": ("Pool",),
    "ropaws.embedding.embedder": ("Embedder",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """photos/ and a run on them, as the examples name them."""
    place = tmp_path_factory.mktemp("examples")
    run, _ = train_on_photos(place)
    (place / "runs").mkdir()
    run.rename(place / "runs/mine")
    return place


@pytest.mark.parametrize("module", PUBLIC)
def test_examples_run(module, folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_every_public_function_has_an_example(module, names):
    code = importlib.import_module(module)
    if names is None:
        names = [
            name
            for name, value in vars(code).items()
            if inspect.isfunction(value) and value.__module__ == module and not name.startswith("_")
        ]
        assert len(names) > 15
    with_example = {test.name for test in doctest.DocTestFinder().find(code) if test.examples}
    assert {f"{module}.{name}" for name in names} <= with_example
