"""What tests/test_second_device.py runs in a process of its own: torch keeps a device for good.

python tests/second_device_worker.py FOLDER    writes FOLDER/said.json: what went wrong in each task
"""

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import ropaws
from ropaws.embedding.backbones import ModelConfig, build_encoder
from ropaws.methods import PAWS, RoPAWS, Supervised
from ropaws.pool.sources import DataConfig
from ropaws.run.config import with_method
from ropaws.run.run import Run
from tests import second_device, tiny
from tests.methods.rivals import RIVALS
from tests.photos import make_photos
from tests.training.test_frozen import frozen

OWN = {
    "paws": PAWS(contrast_weight=0.5),
    "ropaws": RoPAWS(),
    "ropaws-iterative": RoPAWS(solver="iterative"),
    "supervised": Supervised(),
}


def refusals():
    """What the device must refuse, or it could find nothing."""
    rows = torch.ones(3, 2, device=second_device.NAME)
    numbers = torch.Generator()
    mistakes = {
        "sum of two devices": lambda: rows + torch.ones(3, 2),
        "product of two devices": lambda: torch.ones(2, 3) @ rows,
        "number beside rows": lambda: torch.stack([rows.sum(), torch.tensor(1.0)]),
        "index of the other": lambda: torch.ones(3)[torch.tensor([0], device=second_device.NAME)],
        "generator": lambda: torch.rand(3, generator=numbers, device=second_device.NAME),
        "numpy": lambda: np.asarray(rows),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError(f"not refused: {name}")
    assert float((rows * torch.tensor(2.0)).sum()) == 12  # single numbers may come from the CPU


def use(config, run, *, evaluate=False):
    """Train and predict; the answers are those of the same run on the CPU."""
    ropaws.train(config, run)
    with np.load(config.data.source) as data:
        images = list(data["test_images"][:4])
    here, there = (Run(run, device=device).predict(images) for device in (None, "cpu"))
    for mine, theirs in zip(here, there, strict=True):
        assert mine.nearest_class == theirs.nearest_class
        assert max(abs(a - b) for a, b in zip(mine.probabilities, theirs.probabilities, strict=True)) < 1e-4
    if evaluate:
        assert "accuracy" in ropaws.evaluate(run)
        assert len(ropaws.suggest(run, n=2)) == 2
        ropaws.predict(run, images, propagate=True)
        ropaws.finetune(run, rates=(0.05,), epochs=(1,))
        (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
        ropaws.resume(run)


def with_teacher(rival, base, folder):
    """Its settings, after the run that it starts from."""
    config = with_method(base, rival.method)
    if rival.teacher is None:
        return config
    first = ropaws.train(with_method(base, rival.teacher), folder / f"before-{type(rival.method).__name__}")
    return replace(config, model=replace(config.model, init=first / "model.safetensors"))


def frozen_features(base, folder):
    weights = build_encoder(ModelConfig(backbone="small-8"), channels=1).backbone.state_dict()
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "weights.safetensors")
    data = replace(base.data, feature_cache=folder / "cache")
    return replace(frozen(base, init=folder / "weights.safetensors"), data=data)


def streamed(base, folder):
    """Images that are read from disk while training."""
    photos = make_photos(folder)
    places = {"labeled": photos / "labeled", "unlabeled": (photos / "pool",)}
    data = DataConfig(**places, labels_per_class=3, image_size=12, memory_gb=1e-6, workers=1)
    return replace(base, data=data)


def main(folder):
    second_device.register()
    base = tiny.config(tiny.write_data(folder / "data.npz"), device=second_device.NAME, steps=2)
    base = replace(base, train=replace(base.train, checkpoint_every=1))
    tasks = {"refusals": refusals}
    for name, method in OWN.items():
        config = with_method(base, method)
        tasks[name] = lambda run=folder / name, config=config: use(config, run, evaluate=run.name == "ropaws")
    for name, rival in RIVALS.items():
        tasks[name] = lambda run=folder / name, rival=rival: use(with_teacher(rival, base, folder), run)
    tasks["frozen"] = lambda: use(frozen_features(base, folder), folder / "frozen", evaluate=True)
    tasks["streamed"] = lambda: ropaws.train(streamed(base, folder), folder / "streamed")
    said = {}
    for name, task in tasks.items():
        said[name] = ""
        try:
            task()
        except Exception:
            said[name] = traceback.format_exc()
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
