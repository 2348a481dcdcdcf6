import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    # Two test processes share two cores; threads of one would only wait for the other.
    torch.set_num_threads(1)
