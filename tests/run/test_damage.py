"""Damaged run folders, file by file: a command succeeds or says in one line what is wrong.

Several hundred mutations of a trained run, many in one test. Each goes through commands that read the file.
"""

import itertools
import json
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import ropaws
from ropaws.cli.main import main
from tests import tiny

FIGURES = ("soft-nn", "reliability", "confusion", "pool", "labels", "suggestions")
COMMANDS = {
    "evaluate": ["evaluate", "RUN", "--only", *FIGURES],
    "gallery": ["evaluate", "RUN", "--only", "gallery", "propagation"],
    "finetune": ["finetune", "RUN", "--rates", "0.1", "--epochs", "1"],
    "predict": ["predict", "RUN", "IMAGE", "--out", "OUT.csv", "--propagate"],
    "suggest": ["suggest", "RUN", "--n", "3"],
    "report": ["report", "RUN"],
    "compare": ["compare", "RUN", "WHOLE", "--out", "OUT.html"],
    "resume": ["train", "--resume", "RUN", "--no-report"],
}
PARTS = 4  # of a table of mutations, a test each: two processes share them

GONE = object()
DEEP, DEEPER = "DEEP", "DEEPER"  # become a list in a list ..., 300 and 2,000 deep
NONSENSE = [None, True, "x", [], {}, -1, 99, 10**400, math.nan, math.inf, 1e308, DEEP, DEEPER, [[1]], GONE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was trained, evaluated and reported, with half of its steps left in checkpoint.pt."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny.config(tiny.write_data(folder / "data.npz"), steps=4, keep_every=2)
    config = replace(config, model=replace(config.model, backbone="small-8"))
    run = ropaws.train(config, folder / "run")
    main(["report", str(run)])
    (run / "checkpoint.previous.pt").replace(run / "checkpoint.pt")
    Image.fromarray(tiny.draw(0, np.random.default_rng(0))).save(folder / "image.png")
    return run


class Damage:
    """Applies mutations to copies of a run, runs commands on them, and collects what went wrong."""

    def __init__(self, whole, folder, capsys):
        self.whole, self.folder, self.capsys = whole, folder, capsys
        self.faults = []
        self.count = 0

    def check(self, what, name, mutate, commands):
        """mutate: called with the path of the file of that name in a copy of the run."""
        self.count += 1
        for command in commands:
            run = self.folder / f"run{self.count}"
            # Links are quick; the commands replace files and never change them in place.
            shutil.copytree(self.whole, run, copy_function=os.link)
            (run / name).unlink()
            shutil.copy(self.whole / name, run / name)
            mutate(run / name)
            reason = self.fault(COMMANDS[command], run)
            if reason:
                self.faults.append(f"{name}: {what}, {command}: {reason}")
            shutil.rmtree(run)

    def fault(self, command, run):
        words = {
            "RUN": run,
            "WHOLE": self.whole,
            "IMAGE": self.whole.parent / "image.png",
            "OUT.csv": self.folder / "out.csv",
            "OUT.html": self.folder / "out.html",
        }
        self.capsys.readouterr()
        code = 0
        try:
            main([str(words.get(word, word)) for word in command])
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        said = self.capsys.readouterr().err
        if code == 0:
            return "a traceback" if "Traceback" in said else ""
        lines = [line for line in said.splitlines() if line.startswith("ropaws: ")]
        good = code == 2 and len(lines) == 1 and said.endswith(f"{lines[0]}\n")
        return "" if good else f"exit code {code}: {said[:300]}"


@pytest.fixture
def damage(whole, tmp_path, capsys):
    return Damage(whole, tmp_path, capsys)


# JSON files


def places(value, depth):
    """Paths of all values inside, up to a depth; of a list the first and the last."""
    items = []
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = [(index, value[index]) for index in sorted({0, len(value) - 1}) if value]
    for name, item in items:
        yield (name,)
        if depth > 1:
            yield from ((name, *rest) for rest in places(item, depth - 1))


def changed(value, place, new):
    """A copy with another value at a place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if new is GONE and len(place) == 1:
        del copy[place[0]]
    else:
        copy[place[0]] = changed(value[place[0]], place[1:], new)
    return copy


def as_text(value):
    text = json.dumps(value)
    for word, depth in ((DEEP, 300), (DEEPER, 2000)):
        text = text.replace(f'"{word}"', "[" * depth + "]" * depth)
    return text


def json_mutations(value, depth, each):
    """Every place gets some of the nonsense, in turn."""
    kinds = itertools.cycle(NONSENSE)
    for place in places(value, depth):
        for new in itertools.islice(kinds, each):
            yield f"{'.'.join(map(str, place))} = {'GONE' if new is GONE else str(new)[:12]}", place, new


WHOLE_FILES = [b"", b"{", b"[]", b"{}", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 2000, b"1" * 5000, b"NaN"]
READERS = {  # file: commands, depth, mutations of each place
    "config.json": (("evaluate", "predict", "suggest", "report", "compare", "resume"), 3, 2),
    "data.json": (("evaluate", "predict", "suggest", "report", "resume"), 3, 6),
    "environment.json": (("resume", "report", "compare"), 2, 4),
    "evaluation.json": (("evaluate", "gallery", "suggest", "report", "compare"), 2, 2),
    "gallery.json": (("suggest", "report"), 3, 1),
}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", READERS)
def test_damaged_json(damage, whole, name, part):
    commands, depth, each = READERS[name]
    content = json.loads((whole / name).read_text())
    table = [
        (what, as_text(changed(content, place, new)).encode())
        for what, place, new in json_mutations(content, depth, each)
    ]
    table += [(text[:12].decode("latin-1"), text) for text in WHOLE_FILES]
    for number, ((what, text), command) in enumerate(zip(table, itertools.cycle(commands), strict=False)):
        if number % PARTS == part and "compile" not in what:  # a good setting, and a slow one
            damage.check(what, name, lambda path, text=text: path.write_bytes(text), [command])
    assert damage.faults == []


METRICS = [
    b"",
    b"\n\n",
    b"{",
    b"[1]\n",
    b"null\n",
    b"\xff\xfe\n",
    b'{"step": "x"}\n',
    b'{"step": null, "loss": []}\n',
    b'{"step": [], "seconds": {}}\n',
    b'{"step": 0, "seconds": ' + b"1" * 401 + b"}\n",
    b'{"step": ' + b"9" * 401 + b', "loss": 1, "seconds": 1}\n',
    b'{"step": ' + b"9" * 5000 + b"}\n",
    b'{"step": NaN, "loss": NaN, "seconds": NaN}\n',
    b'{"step": Infinity, "loss": -Infinity, "seconds": Infinity}\n',
    b'{"step": -5, "loss": true, "seconds": -1}\n',
    b"[" * 2000 + b"]" * 2000 + b"\n",
    b'{"step": ' + b"[" * 2000 + b"]" * 2000 + b"}\n",
]


def test_damaged_metrics(damage):
    for text in METRICS:
        damage.check(
            text[:30],
            "metrics.jsonl",
            lambda path, text=text: path.write_bytes(text),
            ("evaluate", "report", "resume"),
        )
    assert damage.faults == []


@pytest.mark.parametrize("part", ["supervised", "over_training", "accuracy", "seconds"])
def test_what_earlier_calls_have_found_may_be_nonsense(damage, whole, part):
    """A call for other parts keeps and shows it."""
    found = json.loads((whole / "evaluation.json").read_text())
    for nonsense in ("x", [], {"accuracy": "x"}, 10**400):
        text = json.dumps({**found, part: nonsense})
        damage.check(
            f"{part} = {str(nonsense)[:9]}",
            "evaluation.json",
            lambda path, text=text: path.write_text(text),
            ("gallery", "finetune"),
        )
    assert damage.faults == []


def test_missing_files(damage, whole):
    commands = ("evaluate", "predict", "suggest", "report", "compare", "resume")
    in_turn = itertools.cycle(commands)
    for name in sorted(path.name for path in whole.iterdir() if path.is_file()):
        damage.check("missing", name, os.unlink, commands)

        def become_folder(path):
            path.unlink()
            path.mkdir()

        damage.check("a folder", name, become_folder, [next(in_turn), next(in_turn)])
    assert damage.faults == []


# Tensors


def read_tensors(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def with_first(value, new):
    copy = value.clone()
    if copy.numel():
        copy.view(-1)[0] = new
    return copy


def tensor_mutations(value):
    """Wrong type, shape and values."""
    yield "as float16", value.to(torch.float16)
    yield "as float64", value.double()
    yield "as int64", value.long()
    yield "as int32", value.int()
    yield "as bool", value.bool()
    yield "empty", value.new_empty(0)
    yield "no rows", value[:0] if value.ndim else value.new_empty(0)
    yield "one dimension more", value[None].clone()
    yield "flat", value.reshape(-1).clone()
    yield "twice as long", torch.cat([value, value]) if value.ndim else value.repeat(2)
    yield "one row less", value[:-1].clone() if value.ndim else value.new_empty(0)
    if value.ndim > 1:
        yield "transposed", value.transpose(0, 1).contiguous()
        yield "one column less", value[:, :-1].contiguous()
    if value.dtype.is_floating_point:
        for new in (math.nan, math.inf, 1e30):
            yield f"first is {new}", with_first(value, new)
        yield "all 0", torch.zeros_like(value)
        yield "all 1e30", torch.full_like(value, 1e30)
    elif value.dtype != torch.bool:
        for new in (-1, -2, 99, 1 << 40):
            yield f"first is {new}", with_first(value, new if value.dtype == torch.int64 else new % 256)


def cut(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def resize_header(path, size):
    content = path.read_bytes()
    path.write_bytes(size.to_bytes(8, "little") + content[8:])


FILE_DAMAGE = {
    "empty file": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: cut(path, 0.5),
    "cut at the end": lambda path: cut(path, 0.99),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "text": lambda path: path.write_bytes(b"damaged\n" * 100),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "huge header": lambda path: resize_header(path, (1 << 63) - 1),
    "no metadata": lambda path: save_file(read_tensors(path)[0], path),
    "no tensors": lambda path: save_file({}, path, read_tensors(path)[1]),
    "a foreign tensor": lambda path: save_file(
        {**read_tensors(path)[0], "foreign": torch.ones(1)}, path, read_tensors(path)[1]
    ),
}
TENSOR_FILES = {  # file: commands, every so many tensors
    "support.safetensors": (("evaluate", "predict", "suggest"), 1),
    "embeddings.safetensors": (("evaluate", "suggest"), 1),
    "model.safetensors": (("evaluate", "predict", "suggest"), 5),
}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", TENSOR_FILES)
def test_damaged_tensors(damage, whole, name, part):
    commands, every = TENSOR_FILES[name]
    tensors, metadata = read_tensors(whole / name)
    table = []
    for number, (tensor, value) in enumerate(list(tensors.items())[::every]):
        others = {k: v for k, v in tensors.items() if k != tensor}
        table.append((f"no {tensor}", others))
        mutations = list(tensor_mutations(value))
        if len(tensors) > 2:  # every other one of many tensors
            mutations = mutations[number % 2 :: 2]
        table += [(f"{tensor} {what}", {**others, tensor: new}) for what, new in mutations]
    for number, ((what, content), command) in enumerate(zip(table, itertools.cycle(commands), strict=False)):
        if number % PARTS == part:
            damage.check(
                what, name, lambda path, content=content: save_file(content, path, metadata), [command]
            )
    if part == 0:
        for what, mutate in FILE_DAMAGE.items():
            damage.check(what, name, mutate, commands)
    assert damage.faults == []


# Checkpoints


def momentum(state):
    """The state of the first weight."""
    return next(iter(state["optimizer"]["state"].values()))


CHECKPOINTS = {
    "next_step x": lambda state: state.update(next_step="x"),
    "next_step -1": lambda state: state.update(next_step=-1),
    "next_step 10**9": lambda state: state.update(next_step=10**9),
    "next_step True": lambda state: state.update(next_step=True),
    "next_step None": lambda state: state.update(next_step=None),
    "next_step 1.5": lambda state: state.update(next_step=1.5),
    "next_step a tensor": lambda state: state.update(next_step=torch.tensor(2)),
    "seconds NaN": lambda state: state.update(seconds=math.nan),
    "seconds infinite": lambda state: state.update(seconds=math.inf),
    "seconds -1": lambda state: state.update(seconds=-1.0),
    "seconds None": lambda state: state.update(seconds=None),
    "seconds huge": lambda state: state.update(seconds=10**400),
    "made_by {}": lambda state: state.update(made_by={}),
    "made_by None": lambda state: state.update(made_by=None),
    "made_by []": lambda state: state.update(made_by=[]),
    "made_by config {}": lambda state: state["made_by"].update(config={}),
    "made_by config None": lambda state: state["made_by"].update(config=None),
    "made_by config nonsense": lambda state: state["made_by"].update(config={"train": {"steps": "x"}}),
    "made_by config of a foreign method": lambda state: state["made_by"]["config"].update(
        method={"name": "os:path"}
    ),
    "made_by digest 3": lambda state: state["made_by"].update(digest=3),
    "made_by digest of others": lambda state: state["made_by"].update(digest="x"),
    "made_by split []": lambda state: state["made_by"].update(split=[]),
    "made_by split None": lambda state: state["made_by"].update(split=None),
    "made_by without ropaws": lambda state: state["made_by"].pop("ropaws"),
    "model {}": lambda state: state.update(model={}),
    "model None": lambda state: state.update(model=None),
    "model []": lambda state: state.update(model=[]),
    "model of numbers": lambda state: state.update(model=dict.fromkeys(state["model"], 1.0)),
    "model with numbers as names": lambda state: state.update(model={1: torch.ones(1)}),
    "model with another shape": lambda state: state["model"].update({"backbone.stem.weight": torch.ones(2)}),
    "model with another type": lambda state: state["model"].update(
        {k: v.bool() for k, v in state["model"].items()}
    ),
    "model with NaN": lambda state: state["model"]["backbone.stem.weight"].fill_(math.nan),
    "model without a weight": lambda state: state["model"].pop("backbone.stem.weight"),
    "model with one more": lambda state: state["model"].update(extra=torch.ones(1)),
    "model with a sparse weight": lambda state: state["model"].update(
        {"backbone.stem.weight": state["model"]["backbone.stem.weight"].to_sparse()}
    ),
    "optimizer {}": lambda state: state.update(optimizer={}),
    "optimizer None": lambda state: state.update(optimizer=None),
    "optimizer without state": lambda state: state["optimizer"].pop("state"),
    "optimizer state []": lambda state: state["optimizer"].update(state=[]),
    "optimizer state None": lambda state: state["optimizer"].update(state=None),
    "optimizer state {}": lambda state: state["optimizer"].update(state={}),
    "optimizer state of one weight": lambda state: state["optimizer"].update(state={0: {}}),
    "optimizer state of numbers": lambda state: state["optimizer"].update(state={0: 3}),
    "optimizer state of unknown weights": lambda state: state["optimizer"].update(state={"x": {}}),
    "optimizer groups []": lambda state: state["optimizer"].update(param_groups=[]),
    "optimizer groups None": lambda state: state["optimizer"].update(param_groups=None),
    "optimizer groups of numbers": lambda state: state["optimizer"].update(param_groups=[3]),
    "optimizer group without weights": lambda state: state["optimizer"]["param_groups"][0].update(params=[]),
    "optimizer group with unknown weights": lambda state: state["optimizer"]["param_groups"][0].update(
        params="x"
    ),
    "optimizer with another momentum": lambda state: state["optimizer"]["param_groups"][0].update(
        momentum=0.5
    ),
    "optimizer with a momentum of text": lambda state: state["optimizer"]["param_groups"][0].update(
        momentum="x"
    ),
    "optimizer with a rate of text": lambda state: state["optimizer"]["param_groups"][0].update(lr="x"),
    "momentum of another shape": lambda state: momentum(state).update(momentum=torch.ones(3)),
    "momentum of another rank": lambda state: momentum(state).update(momentum=torch.ones(2, 2, 2, 2, 2)),
    "momentum a number": lambda state: momentum(state).update(momentum=1.0),
    "momentum text": lambda state: momentum(state).update(momentum="x"),
    "momentum None": lambda state: momentum(state).update(momentum=None),
    "momentum of whole numbers": lambda state: momentum(state).update(
        momentum=momentum(state)["momentum"].bool()
    ),
    "momentum NaN": lambda state: momentum(state)["momentum"].fill_(math.nan),
    "momentum by another name": lambda state: momentum(state).update(
        velocity=momentum(state).pop("momentum")
    ),
    "scaler None": lambda state: state.update(scaler=None),
    "scaler []": lambda state: state.update(scaler=[]),
    "scaler with nonsense": lambda state: state.update(scaler={"scale": "x"}),
    "without a part": lambda state: state.pop("scaler"),
    "with one part more": lambda state: state.update(extra=1),
}


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_checkpoints(damage, part):
    for number, (what, mutate) in enumerate(CHECKPOINTS.items()):
        if number % PARTS != part:
            continue

        def save(path, mutate=mutate):
            state = torch.load(path, weights_only=True)
            mutate(state)
            torch.save(state, path)

        damage.check(what, "checkpoint.pt", save, ["resume"])
    if part == 0:
        for what in ("empty file", "cut in half", "cut at the end", "text", "zeros"):
            damage.check(what, "checkpoint.pt", FILE_DAMAGE[what], ["resume"])
        for value in (None, 3, "x", [], {}, torch.ones(2)):
            damage.check(
                value, "checkpoint.pt", lambda path, value=value: torch.save(value, path), ["resume"]
            )
    assert damage.faults == []


def test_a_damaged_checkpoint_runs_nothing(damage, tmp_path):
    """A pickle that would call a function."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    damage.check("a pickle", "checkpoint.pt", lambda path: torch.save(Evil(), path), ["resume"])
    damage.check("a pickle", "model.safetensors", lambda path: torch.save(Evil(), path), ["evaluate"])
    assert damage.faults == []
    assert not (tmp_path / "evil").exists()
