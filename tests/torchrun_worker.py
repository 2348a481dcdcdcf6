"""What each process does in tests/test_distributed.py; started by torchrun or alone.

python tests/torchrun_worker.py FOLDER TASK ...    the first process writes FOLDER/TASK-PROCESSES.pt
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from ropaws.core import cores, distributed
from ropaws.core.distributed import Rank, synchronize_norms
from ropaws.core.hardware import threads_for
from ropaws.core.randomness import SupportConfig, support_share
from ropaws.core.records import Batch, Support
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.embedding.frozen_features import Embedding, embed_images
from ropaws.methods import PAWS, FineTune, RoPAWS, Supervised
from ropaws.pool.augment import AugmentConfig, Normalization
from ropaws.pool.corpus import ImageStack, no_watch
from ropaws.pool.sources import DataConfig, load_corpus
from ropaws.run.config import read_config
from ropaws.run.train import TrainInputs, resume, train
from ropaws.training.loaders import BatchStream, PoolPass, TrainingData
from ropaws.training.loop import Step
from tests import tiny
from tests.methods.foreign import MemoryMethod
from tests.methods.rivals import RIVALS

CLASSES = 5  # two processes do not divide them
POOL = 60
METHODS = {
    "paws": PAWS(),
    "ropaws": RoPAWS(),
    "ropaws-auto": RoPAWS(prior_temperature="auto", reweight_entropy=True, reweight_power=2.0),
    "ropaws-iterative": RoPAWS(solver="iterative", tolerance=1e-7),
    "paws-contrast": PAWS(contrast_weight=0.7, contrast_temperature=0.3, supervised_weight=0.6),
    "ropaws-contrast": RoPAWS(contrast_weight=0.7, contrast_temperature=0.3, supervised_weight=0.6),
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
    whole = replace(source, at=Rank())
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
    take = distributed.data_parallel(Step(method, model))
    losses = take(batch)
    losses.total.backward()
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


class LayerLeftOut(torch.nn.Module):
    """Norm layers in between; no process uses `aside`, and the last process not always `optional`.

    `aside` fills a message of gradients, so that `optional` has one of its own, which is sent first.
    """

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(8) for _ in range(3))
        self.aside = torch.nn.Linear(2600, 2600)
        self.optional = torch.nn.Linear(8, 8)

    def forward(self, x, *, whole):
        x = self.norms[0](self.first(x))
        x = self.optional(x) if whole else x
        x = self.last(self.norms[1](x))
        return self.norms[2](x).relu().square().mean()


def left_out():
    """Gradients of three steps, and the means of what each process finds without the others' gradients."""
    rank, size, _ = distributed.place()
    torch.manual_seed(0)
    net = LayerLeftOut()
    synchronize_norms(net, torch.device("cpu"))
    wrapped, found = distributed.data_parallel(net), []
    for step in range(3):
        rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        whole = rank < size - 1 or step == 2
        own = torch.autograd.grad(net(rows, whole=whole), net.parameters(), allow_unused=True)
        parts = zip(net.parameters(), own, strict=True)
        expected = [distributed.all_mean(torch.zeros_like(w) if g is None else g) for w, g in parts]
        wrapped(rows, whole=whole).backward()
        found.append({"expected": expected, "gradients": [weight.grad for weight in net.parameters()]})
        net.zero_grad()
    return {"steps": found, "names": [name for name, _ in net.named_parameters()]}


def other_data():
    """What training says in each process where the last one sees something else."""
    rank, size, _ = distributed.place()
    folder = Path(sys.argv[1]) / str(rank)  # each has a disk of its own, with the data at the same place
    folder.mkdir()
    os.chdir(folder)
    config = tiny.config(tiny.write_data("data.npz"), steps=2)
    corpus = load_corpus(config.data)
    corpus = corpus._replace(train_names=tuple(f"pool/{row}.jpg" for row in range(40)))
    names, labels, images = corpus.train_names, corpus.train_labels, corpus.train_images
    less = {"train_images": images[:-1], "train_labels": labels[:-1], "train_names": names[:-1]}
    pixel = images.clone()
    pixel[7, 0, 3, 3] += 1
    relabeled = labels.clone()
    relabeled[3] = 1
    others = {
        "missing": (config, corpus._replace(**less)),
        "renamed": (config, corpus._replace(train_names=("pool/new.jpg", *names[1:]))),
        "pixel": (config, corpus._replace(train_images=pixel)),
        "label": (config, corpus._replace(train_labels=relabeled)),
        "classes": (config, corpus._replace(class_names=("rows", "columns", "blocks"))),
        "seed": (replace(config, train=replace(config.train, seed=5)), corpus),
        "precision": (replace(config, train=replace(config.train, precision="bf16")), corpus),
        "same": (config, corpus),
    }
    keys = torch.arange(40)[:, None].expand(40, 16).to(torch.uint8).numpy()
    known = corpus._replace(train_keys=keys.copy())  # as of files that were decoded into memory
    keys[7] += 1
    others["replaced"] = (config, known._replace(train_keys=keys))
    said = {"streamed": streamed(rank)}
    for name, (settings, seen) in others.items():
        first = known if name == "replaced" else corpus
        own = (settings, seen) if rank == size - 1 else (config, first)
        said[name] = ""
        try:
            train(own[0], folder / name, inputs=TrainInputs(corpus=own[1]))
        except ValueError as error:
            said[name] = str(error)
        assert (folder / name / "config.json").exists() == (name == "same" and rank == 0)
    everyone = [None] * size
    torch.distributed.all_gather_object(everyone, said)
    return {name: [said[name] for said in everyone] for name in (*others, "streamed")}


def streamed(rank):
    """What is said of files of the same names and sizes, one with other pixels in the last process."""
    for number in range(4):
        color = (200, 10 * number, 50 * rank * (number == 2))
        Image.new("RGB", (12, 12), color).save(f"{number}.bmp")
    encoder = build_encoder(ModelConfig(backbone="small-8", projection_dims=4), channels=3).eval()
    view = AugmentConfig(size=12, small_crops=0)
    embedding = Embedding(encoder, "small-8", view, 1, Normalization((0.5,) * 3, (0.25,) * 3), 12)
    stack = ImageStack([Path(f"{number}.bmp") for number in range(4)], 12, workers=1)
    data = DataConfig(feature_cache=Path("cache"), workers=1)
    try:
        embed_images(stack, embedding, data, watch=no_watch, warn=print, together=True)
    except ValueError as error:
        return str(error)
    return ""


def steady_config(folder, **train):
    """A tiny run that processes can share, whose last digits hardly move."""
    config = tiny.config(tiny.write_data(folder / "data.npz"), **{"steps": 6, "batch": 32, **train})
    # Without equalize and solarize: they jump, and would make much of the last digit of a pixel. In fp32 and
    # with small steps on every machine: large ones make much of rounding, which differs between CPUs.
    return replace(
        config,
        augment=replace(config.augment, solarize=0.0, equalize=0.0),
        support=replace(config.support, views=4),
        optim=replace(config.optim, start=config.optim.start / 8, peak=config.optim.peak / 8),
    )


def trained():
    """Losses of a tiny run in each precision, and what is said of a batch that cannot be shared out."""
    rank, size, _ = distributed.place()
    folder = Path(sys.argv[1]) / f"trained{rank}-{size}"  # the data; the first process writes the runs
    folder.mkdir()
    config = steady_config(folder, checkpoint_every=2)
    runs = Path(sys.argv[1]) / f"runs-{size}"
    found = {"runs": str(runs), "odd": ""}
    for precision in ("fp32", "bf16", "fp16"):
        run = runs / precision
        train(replace(config, train=replace(config.train, precision=precision)), run)
        distributed.wait_for_all()
        found[precision] = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]
    try:
        train(steady_config(folder, batch=9, steps=1), runs / "odd")  # the pool has 40 images
    except ValueError as error:
        found["odd"] = str(error)
    return found


def frozen():
    """Train a run on frozen features from FOLDER/config.json, and resume FOLDER/resumed of one process."""
    folder = Path(sys.argv[1])
    config = read_config(folder / "config.json")
    train(replace(config, data=replace(config.data, feature_cache=folder / "b")), folder / "two")
    resume(folder / "resumed")
    return {}


def threads():
    """As many as torchrun says, as are the process's share of eight cores, and as are asked for."""
    found = [torch.get_num_threads()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "available_cores", lambda: 8)
        for asked in (None, 3):
            with threads_for(asked):
                found.append(torch.get_num_threads())
    return {"threads": [*found, torch.get_num_threads()]}


def functions():
    """Each function, with rows that differ in number."""
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
    return {
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
    """A batch of which the first process has more rows; in double precision, and as autocast has it."""
    return {str(kind): normalized(kind) for kind in (torch.float64, torch.bfloat16, torch.float16)}


class NormWithActivation(torch.nn.BatchNorm2d):
    """As timm has it."""

    def __init__(self, *sizes, **settings):
        super().__init__(*sizes, **settings)
        self.act = torch.nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


def normalized(kind):
    torch.manual_seed(0)
    half = kind != torch.float64
    images = torch.randn(9, 3, 4, 4, dtype=kind) + 5
    net = torch.nn.Sequential(NormWithActivation(3, dtype=torch.float32 if half else kind))
    torch.nn.init.normal_(net[0].weight)
    synchronize_norms(net, torch.device("cpu"))
    mine = images[distributed.share(9)].clone().requires_grad_()
    with torch.autocast("cpu", kind, enabled=half):
        out = net(mine)
    (F.relu(out.to(net[0].weight.dtype)) ** 2).sum().backward()
    return {
        "out": distributed.gather_constants(out),
        "gradient": distributed.gather_constants(mine.grad),
        "weight": distributed.sum_constants(net[0].weight.grad),
        "running_mean": net[0].running_mean,
        "running_var": net[0].running_var,
    }


def main(folder, *names):
    with distributed.joined(torch.device("cpu")) as at:
        torch.set_num_threads(1)
        tasks = (steps, functions, synced_norm, left_out, other_data, threads, trained, frozen)
        for task in names:
            results = {function.__name__: function for function in tasks}[task]()
            if at.rank == 0:
                torch.save(results, Path(folder) / f"{task}-{at.size}.pt")
        distributed.wait_for_all()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread sometimes aborts while the interpreter shuts down, after all work is done


if __name__ == "__main__":
    main(*sys.argv[1:])
