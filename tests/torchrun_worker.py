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
from ropaws.processes import cores, gradient_exchange
from ropaws.processes.gradient_exchange import GradientExchange, MemoryLane
from ropaws.training.hardware import threads_for
from tests.methods.foreign import MemoryMethod
from tests.methods.rivals import RIVALS

CLASSES = 5  # two processes do not divide them
POOL = 60
METHODS = {
    "paws": PAWS(),
    "ropaws": RoPAWS(),
    "ropaws-auto": RoPAWS(prior_temperature="auto", reweight_entropy=True, reweight_power=2.0),
    "ropaws-iterative": RoPAWS(solver="iterative", tolerance=1e-7),
    "paws-contrast": PAWS(contrast_weight=0.7, contrast_temperature=0.3),
    "ropaws-contrast": RoPAWS(contrast_weight=0.7, contrast_temperature=0.3),
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


def started(method, source, prediction=True, dtype=torch.float64):
    """A model before its first step."""
    model = model_of(method, prediction).to(dtype)
    synchronize_norms(model, torch.device("cpu"))
    if dtype == torch.float64:
        pool = source.whole_pool(0)
        with torch.no_grad():
            method.before_epoch(model.eval(), DoublePass(pool.data, pool.size, 0, pool.device))
    return model.train()


def one_step(method, source, prediction=True, dtype=torch.float64):
    """Loss, gradients, batch-norm statistics and other state of a step, as the optimizer sees them."""
    model = started(method, source, prediction, dtype)
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


def exchange():
    """Gradients of three steps: exchanged after the backward pass, and while it runs."""
    results = {}
    several = {name: METHODS[name] for name in ("paws", "ropaws", "fine-tune", "memory")}
    several |= {name: RIVALS[name].method for name in ("mpl", "ds3l", "moco-v2", "fixmatch")}
    for name, method in several.items():
        source = stream(method)
        found = []
        for during in (False, True):
            model = started(method, source)
            exchange = GradientExchange(model.parameters())
            assert len(exchange._buckets) >= 3  # so that there is an order to keep
            gradients = []
            for step in range(3):
                losses = method.step(model, own_rows(source, step, torch.float64))
                if during:
                    exchange.backward(losses.total)
                else:
                    losses.total.backward()
                    distributed.mean_gradients(model.parameters())
                gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
                model.zero_grad()
            found.append(gradients)
        results[name] = {"after": found[0], "during": found[1]}
    return results


def overlap():
    """What happens when: buckets sent, gradients of layers; the last process leaves a middle layer out."""
    rank, size, _ = distributed.place()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(8))
    aside = torch.nn.Linear(32, 32)  # no process uses it
    net = torch.nn.ModuleList([layers, aside])
    exchange = GradientExchange(net.parameters())
    events = []
    send, wait = exchange._lane.send, exchange.finish
    exchange._lane.send = lambda number, parts: (events.append(f"bucket {number}"), send(number, parts))
    exchange.finish = lambda: (events.append("pass over"), wait())
    found = []
    for step in range(3):
        events.append(f"step {step}")
        x = torch.full((4, 32), 1.0 + rank + step, requires_grad=True)
        for number, layer in enumerate(layers):
            if (number, rank) != (3, size - 1) or step == 2:
                x = F.relu(layer(x)) + x
            x.register_hook(lambda _, number=number: events.append(f"layer {number}"))
        exchange.backward(x.square().mean())
        found.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
        net.zero_grad()
    return {"events": events, "gradients": found, "buckets": [len(b) for b in exchange._buckets]}


def threads():
    """As many as torchrun says, as are the process's share of eight cores, and as are asked for."""
    cores.available_cores = lambda: 8
    found = [torch.get_num_threads()]
    for asked in (None, 3):
        with threads_for(asked):
            found.append(torch.get_num_threads())
    return {"threads": [*found, torch.get_num_threads()]}


def functions():
    """Each function, through sockets and memory, and through gloo."""
    here = each_function()
    lane = GradientExchange([torch.nn.Parameter(torch.zeros(2))])._lane
    ways = {"sockets": distributed._local is not None, "memory": isinstance(lane, MemoryLane)}
    distributed._local = gradient_exchange._exchange = None
    return {**here, **ways, "by_gloo": each_function()}


def each_function():
    """With rows that differ in number."""
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
        "together": distributed.gather_together(mine, rows := torch.arange(len(mine)) + 10 * rank, rows > 0),
        "known": distributed.gather_constants(mine, of=5),
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
        tasks = (steps, functions, synced_norm, exchange, overlap, threads)
        results = {function.__name__: function for function in tasks}[task]()
        if at.rank == 0:
            torch.save(results, Path(folder) / f"{task}-{at.size}.pt")
        distributed.wait_for_all()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread sometimes aborts while the interpreter shuts down, after all work is done


if __name__ == "__main__":
    main(*sys.argv[1:])
