import pytest
import torch

from tests.photos import make_photos, train_on_photos


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    # Two test processes share two cores; threads of one would only wait for the other.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, one_thread):
    """A trained tiny run that many tests share: a test that changes it works on tiny.copy of it."""
    import ropaws
    from tests import tiny

    folder = tmp_path_factory.mktemp("tiny")
    return ropaws.train(tiny.config(tiny.write_data(folder / "data.npz")), folder / "run")


@pytest.fixture
def photos(tmp_path):
    """A person's images, for a test that changes them."""
    return make_photos(tmp_path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, one_thread):
    """A run on such images, and their folder, shared by many tests: one that changes a file copies it."""
    return train_on_photos(tmp_path_factory.mktemp("own"))
