import os
import shutil

import pytest
import torch

from tests.photos import make_photos, train_on_photos

NO_BROWSER = "no chromium on this machine"
REQUIRE_BROWSER = "ROPAWS_REQUIRE_BROWSER"  # set in CI, where a test that is left out must not pass unseen


@pytest.fixture(scope="session")
def chromium():
    """A browser for the tests that look at pages; without one they are left out, and counted at the end."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None and os.environ.get(REQUIRE_BROWSER):
        pytest.fail(f"{NO_BROWSER}, and {REQUIRE_BROWSER} is set")
    if found is None:
        pytest.skip(NO_BROWSER)
    return found


@pytest.fixture(scope="session")
def browser(chromium):
    """It, driven by Playwright: one for all tests, as a thread can drive no second one."""
    if os.environ.get(REQUIRE_BROWSER):
        import playwright.sync_api as playwright
    else:
        playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


def pytest_terminal_summary(terminalreporter):
    left_out = [r for r in terminalreporter.stats.get("skipped", ()) if NO_BROWSER in str(r.longrepr)]
    if left_out:
        terminalreporter.write_line(
            f"{len(left_out)} browser tests were left out: {NO_BROWSER} (apt-get install chromium)"
        )


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_feature_cache(tmp_path_factory):
    """Features of tests are not kept among those of the person who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """A file of a small network that knows nothing, so that tests take no time."""
    from ropaws.embedding.convnets import SmallConvNet

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "small.pth"
    torch.save(SmallConvNet().state_dict(), path)
    return path
