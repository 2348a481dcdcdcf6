"""What each process does in tests/test_distributed.py; started by torchrun or alone.

python tests/torchrun_worker.py TASK FOLDER    the first process writes FOLDER/TASK.pt
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from ropaws import distributed
from ropaws.batch import Batch, Support
from ropaws.data.augment import AugmentConfig, Normalization
from ropaws.data.loaders import BatchStream, PoolPass, TrainingData
from ropaws.data.samplers import SupportConfig, support_share
from ropaws.distributed import Place
from ropaws.methods import PAWS, FineTune, RoPAWS, Supervised
from ropaws.models import ModelConfig, build_encoder
from ropaws.models.synced_norm import synchronize_norms
from tests.methods.foreign import MemoryMethod
from tests.methods.rivals import RIVALS

CLASSES = 5  # two processes do not divide them
POOL = 60
METHODS = {
    "paws": PAWS(),
    "ropaws": RoPAWS(),
    "ropaws-auto": RoPAWS(prior_temperature="auto", reweight_entropy=True, reweight_power=2.0),
    "ropaws-iterative": RoPAWS(solver="iterative", tolerance=1e-7),
    "ropaws-plain-density": RoPAWS(semi_supervised_density=False),
    "supervised": Supervised(),
    "fine-tune": FineTune(),
    "memory": MemoryMethod(sure=0.2),
}


def stream(method, *, unique=False, crops=2, views=2):
    random = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (POOL, 3, 24, 24), dtype=torch.uint8, generator=random)
    labeled = torch.arange(20)
    data = TrainingData(images, labeled, labeled % CLASSES, Normalization((0.5,) * 3, (0.25,) * 3))
    # Without equalize and solarize: they jump, and would make much of the last digit of a pixel.
    steady = {"solarize": 0.0, "equalize": 0.0, "grayscale": 0.3, "blur": 0.3}
    augment = AugmentConfig(size=24, small_crops=crops, small_size=16, **steady)
    support = SupportConfig(images_per_class=3, views=views, unique_classes_per_process=unique)
    return BatchStream(
        data, method.views(augment), method.labeled_view(augment), support, batch=24, seed=0, size=24
    )


def model_of(method, prediction):
    torch.manual_seed(0)
    config = ModelConfig(
        backbone="small-8",
        projection_hidden=8,
        projection_dims=8,
        prediction_hidden=6 if prediction else None,
    )
    model = method.build(build_encoder(config, channels=3), classes=CLASSES, pool=POOL)
    if isinstance(method, FineTune):
        torch.nn.init.normal_(model.linear.weight)  # from zeros no gradient would reach the network
    return model


@dataclass(frozen=True)
class DoublePass(PoolPass):
    """A pass over the pool with views in float64."""

    def _views(self, rows):
        return super()._views(rows).double()


def own_rows(source, step, dtype):
    """This process's rows of the batch of a step, all of which every process makes.

    So the network sees the same numbers however many processes there are, to the last bit; that each
    process can make its own rows alone is the matter of test_samplers.
    """
    whole = replace(source, at=Place())
    pixels = whole.pixels(step)
    mine = distributed.share(source.batch)
    views = whole.unlabeled_views(step, pixels.unlabeled)
    labeled = whole.support_batch(step, pixels.labeled)
    count = len(labeled.images) // source.support.views
    chosen = support_share(count, source.support, source.at)
    rows = torch.cat([view * count + chosen for view in range(source.support.views)])
    images, labels, identity, classes = (value[rows] for value in labeled)
    return Batch(
        step,
        steps=10,
        views={role: view[mine].to(dtype) for role, view in views.items()},
        pool_index=whole.chosen(step).unlabeled[mine],
        labeled=Support(images.to(dtype), labels.to(dtype), identity, classes),
    )


def one_step(method, source, prediction=True, dtype=torch.float64):
    """Loss, gradients, batch-norm statistics and other state of a step, as the optimizer sees them."""
    model = model_of(method, prediction).to(dtype)
    synchronize_norms(model, torch.device("cpu"))
    if dtype == torch.float64:
        pool = source.whole_pool(0)
        with torch.no_grad():
            method.before_epoch(model.eval(), DoublePass(pool.data, pool.size, 0, pool.device))
    model.train()
    batch = own_rows(source, 3, dtype)
    losses = method.step(model, batch)
    losses.total.backward()
    distributed.mean_gradients(model.parameters())
    with torch.no_grad():
        method.after_step(model, batch)
    return {
        "loss": distributed.all_mean(losses.total.detach()),
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "buffers": {name: value for name, value in model.named_buffers() if "num_batches" not in name},
    }


def steps():
    results = {}
    for unique in (False, True):
        for name, method in METHODS.items():
            source = stream(method, unique=unique)
            results[f"{name}, {'unique' if unique else 'all'} classes"] = one_step(method, source)
    for name, rival in RIVALS.items():
        results[f"rival {name}"] = one_step(rival.method, stream(rival.method))
    plain = stream(RoPAWS(), crops=0, views=1)
    results["one view, no crops"] = one_step(RoPAWS(), plain, prediction=False)
    for name in ("paws", "ropaws"):
        method = METHODS[name]
        results[f"{name}, float32"] = one_step(method, stream(method, unique=True), dtype=torch.float32)
    shuffled = SupportConfig(images_per_step=15, views=1)  # 8 rows and 7
    results["fine-tune, shuffled"] = one_step(FineTune(), replace(stream(FineTune()), support=shuffled))
    return results


def functions():
    """Each function with rows that differ in number."""
    rank, size, _ = distributed.place()
    whole = torch.arange(10.0).view(5, 2)
    mine = whole[distributed.share(5)].clone().requires_grad_()
    weights = torch.linspace(1, 2, 10).view(5, 2)
    gathered = distributed.all_gather(mine)
    # Every process has the same function of all rows, so the mean of their gradients is its gradient.
    (gathered * weights).square().sum().backward()
    gradient = distributed.gather_constants(mine.grad) / size
    value = torch.tensor([1.0 + rank], requires_grad=True)
    mean = distributed.all_mean(value)
    (mean**3).backward()
    everywhere, once, nowhere, frozen = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    frozen.requires_grad_(False)
    everywhere.grad = torch.full((2,), 1.0 + rank)
    if rank == size - 1:
        once.grad = torch.ones(2)
    distributed.mean_gradients([everywhere, once, nowhere, frozen])
    return {
        "mean_gradients": [weight.grad for weight in (everywhere, once, nowhere, frozen)],
        "gathered": gathered.detach(),
        "gradient": gradient,
        "mean": mean.detach(),
        "mean_gradient": value.grad,
        "sum": distributed.all_sum(torch.tensor(2.0)),
        "any": distributed.any_process(rank == size - 1, torch.device("cpu")),
        "none": distributed.any_process(False, torch.device("cpu")),
        "size": size,
    }


def synced_norm():
    """A batch of which the first process has more rows."""
    torch.manual_seed(0)
    images = torch.randn(9, 3, 4, 4, dtype=torch.float64) + 5
    norm = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    net = torch.nn.Sequential(norm)
    synchronize_norms(net, torch.device("cpu"))
    mine = images[distributed.share(9)].clone().requires_grad_()
    out = net(mine)
    (F.relu(out) ** 2).sum().backward()
    return {
        "out": distributed.gather_constants(out),
        "gradient": distributed.gather_constants(mine.grad),
        "running_var": net[0].running_var,
    }


def main(task, folder):
    with distributed.joined(torch.device("cpu")) as at:
        torch.set_num_threads(1)
        results = {"steps": steps, "functions": functions, "synced_norm": synced_norm}[task]()
        if at.rank == 0:
            torch.save(results, Path(folder) / f"{task}-{at.size}.pt")
        distributed.wait_for_all()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread sometimes aborts while the interpreter shuts down, after all work is done


if __name__ == "__main__":
    main(*sys.argv[1:])
