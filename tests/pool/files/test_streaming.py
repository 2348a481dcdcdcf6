"""Images that are read while training, and the cache of decoded ones."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ropaws
import ropaws.run.train as runs
from ropaws.core.files import write_json
from ropaws.pool import decoding
from ropaws.pool.array_files import ArrayRow
from ropaws.pool.content import content_key
from ropaws.pool.corpus import ImageStack
from ropaws.pool.decoding import (
    SHARDS,
    SquareCache,
    UnreadableError,
    read_batch,
    read_image,
    read_square,
    read_squares,
)
from ropaws.pool.sources import DataConfig
from ropaws.run.config import read_config, to_json, with_absolute_paths
from ropaws.training import loaders
from tests import tiny

NAMES = ("rows", "columns", "block")


@pytest.fixture
def photos(tmp_path):
    random = np.random.default_rng(0)
    for label, name in enumerate(NAMES):
        for kind, count in (("labeled", 3), ("test", 2)):
            for i in range(count):
                save(tmp_path / kind / name / f"{i}.png", label, random)
    for i in range(24):
        save(tmp_path / "pool" / f"{i:02d}.png", i % 4 - 1, random)
    return tmp_path


def save(path, label, random):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(tiny.draw(label, random)).convert("RGB").save(path)


def config(photos, **data):
    base = tiny.config("unused.npz", steps=8, checkpoint_every=3)
    own = DataConfig(
        labeled=photos / "labeled",
        unlabeled=(photos / "pool",),
        test=photos / "test",
        image_size=12,
        labels_per_class=None,
        workers=1,
        **data,
    )
    return replace(base, data=own)


def weights(run):
    from safetensors.torch import load_file

    return load_file(run / "model.safetensors")


def same(one, other):
    return all(torch.equal(one[name], other[name]) or one[name].isnan().all() for name in one)


def test_reading_while_training_gives_the_weights_of_training_from_memory(photos, tmp_path):
    memory = ropaws.train(config(photos), tmp_path / "memory")
    disk = ropaws.train(config(photos, memory_gb=0.0), tmp_path / "disk")
    time.sleep(decoding.SETTLED)  # files that were changed just now are not kept
    cached = ropaws.train(config(photos, memory_gb=0.0, cache=tmp_path / "cache"), tmp_path / "cached")
    assert same(weights(memory), weights(disk))
    assert same(weights(memory), weights(cached))
    assert any((tmp_path / "cache").rglob("*"))
    results = [ropaws.evaluate(run) for run in (memory, disk)]
    for result in results:
        del result["seconds"], result["features"]["made_from"]  # files have another fingerprint than pixels
    assert results[0] == results[1]


def test_a_run_that_reads_while_training_can_be_resumed(photos, tmp_path, monkeypatch):
    whole = ropaws.train(config(photos, memory_gb=0.0), tmp_path / "whole")
    save = runs.save_checkpoint

    def save_and_fail(run, checkpoint):
        save(run, checkpoint)
        if checkpoint.next_step == 6:
            raise OSError("the power is gone")

    monkeypatch.setattr(runs, "save_checkpoint", save_and_fail)
    with pytest.raises(OSError, match="power"):
        ropaws.train(read_config(whole / "config.json"), tmp_path / "cut")
    monkeypatch.undo()
    resumed = ropaws.resume(tmp_path / "cut")
    assert same(weights(whole), weights(resumed))


def members(session):
    """All processes of a session; the workers are in process groups of their own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_still_ends_with_a_checkpoint(photos, tmp_path, number):
    """As a terminal does at Ctrl-C, and a scheduler with SIGTERM: the workers get it too."""
    settings = config(photos, memory_gb=0.0)
    settings = replace(settings, train=replace(settings.train, steps=100_000, checkpoint_every=50_000))
    write_json(tmp_path / "config.json", to_json(settings))
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "ropaws", "train", tmp_path / "config.json", "--out", run],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    tiny.wait_for_steps(process, run, 3)
    workers = [pid for pid in members(process.pid) if pid != process.pid]
    assert workers
    for pid in workers:
        os.kill(pid, number)
    tiny.wait_for_steps(process, run, 20)  # they go on
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"resume with `ropaws train --resume" in said
    assert b"Traceback" not in said
    steps = (run / "metrics.jsonl").read_text().count("\n")
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    assert checkpoint["next_step"] == steps
    assert not members(process.pid)


def test_bad_images_are_replaced_listed_and_too_many_end_the_run(photos, tmp_path, monkeypatch):
    (photos / "pool" / "05.png").write_bytes(b"broken")
    (photos / "labeled" / "rows" / "1.png").write_bytes(b"broken")
    settings = config(photos, memory_gb=0.0)
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"1 of 9 images cannot be read, first: .*rows/1\.png"):
        ropaws.train(settings, run)
    (photos / "labeled" / "rows" / "1.png").unlink()
    ropaws.train(settings, run)
    listed = (run / "unreadable.txt").read_text().splitlines()
    assert len(listed) == 1
    assert "05.png" in listed[0]
    monkeypatch.setattr(loaders, "FEW", 8)
    for i in range(6, 14):
        (photos / "pool" / f"{i:02d}.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"\d of \d+ images cannot be read, first: .*pool"):
        ropaws.train(settings, tmp_path / "worse")


def test_a_bad_test_image_is_left_out_as_it_is_in_memory(photos, tmp_path):
    (photos / "test" / "rows" / "9.png").write_bytes(b"broken")
    for i in range(2, 8):
        save(photos / "test" / "rows" / f"{i}.png", 0, np.random.default_rng(i))
    results = []
    for name, data in (("memory", {}), ("disk", {"memory_gb": 0.0})):
        run = ropaws.train(config(photos, **data), tmp_path / name)
        results.append(ropaws.evaluate(run) | {"seconds": 0})
        results[-1]["features"].pop("made_from")  # files have another fingerprint than pixels
    assert results[0] == results[1]


def test_a_bad_image_gives_way_to_the_next_good_one(photos):
    paths = sorted((photos / "pool").iterdir())
    for bad in (paths[5], paths[6], paths[23]):
        bad.write_bytes(b"broken")
    stack = ImageStack(paths, 12, workers=1)
    images, failures = stack.read(torch.tensor([4, 5, 6, 7, 23]))
    good = [torch.tensor(read_square(paths[i], 12)).permute(2, 0, 1) for i in (4, 7, 7, 7, 0)]
    assert torch.equal(images, torch.stack(good))
    assert set(failures) == {str(paths[i]) for i in (5, 6, 23)}
    assert set(stack.unreadable(torch.tensor([4, 5, 23]))) == {5, 23}
    with pytest.raises(ValueError, match=r"05\.png cannot be read any more"):
        stack[torch.tensor([5])]
    rows = torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"05\.png cannot be read any more"):
        stack.complete(rows, read_batch(stack.request(rows)), strict_from=1)
    completed = stack.complete(rows, read_batch(stack.request(rows)), strict_from=2)
    assert completed.positions.tolist() == [4, 7]  # a memory bank must not take 7 for 5
    for path in paths:
        path.write_bytes(b"broken")
    with pytest.raises(ValueError, match="100 images in a row cannot be read"):
        stack.read(torch.tensor([0]))


def test_changed_images_are_another_data_set(photos):
    paths = sorted((photos / "pool").iterdir())
    before = ImageStack(paths, 12).digest()
    assert ImageStack(paths, 12).digest() == before
    assert ImageStack(paths[::-1], 12).digest() != before
    assert ImageStack(paths, 16).digest() != before
    Image.new("RGB", (50, 50), "red").save(paths[3])
    assert ImageStack(paths, 12).digest() != before


# The cache


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    return path


def cache_in(folder, limit=10**9):
    """Keeps files that were made just now, too."""
    return SquareCache(folder, limit, settled=0)


def entries(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def test_a_cached_square_is_the_decoded_one(image, tmp_path, monkeypatch):
    cache = cache_in(tmp_path / "cache")
    plain = read_square(image, 16)
    assert cache.get(image, 16, "center") is None
    np.testing.assert_array_equal(read_image(image, 16, "center", cache).square, plain)
    monkeypatch.setattr("ropaws.pool.decoding.decode_content", None)  # a second decoding would fail
    np.testing.assert_array_equal(read_image(image, 16, "center", cache).square, plain)
    assert cache.get(image, 24, "center") is None  # another size is another entry


def test_a_changed_file_is_decoded_again(image, tmp_path):
    cache = cache_in(tmp_path / "cache")
    read_image(image, 16, "center", cache)
    Image.new("RGB", (40, 40), "blue").save(image)
    assert read_image(image, 16, "center", cache).square[0, 0].tolist() == [0, 0, 255]
    os.utime(image, ns=(0, 0))  # only the time has changed
    assert cache.get(image, 16, "center") is None


def test_a_file_that_is_replaced_while_it_is_read_is_not_taken_for_the_new_one(image, tmp_path, monkeypatch):
    cache = cache_in(tmp_path / "cache")
    real = decoding.decode_content

    def decoded_then_replaced(*args):
        found = real(*args)
        Image.new("RGB", (40, 40), "blue").save(tmp_path / "new.png")
        (tmp_path / "new.png").replace(image)
        return found

    monkeypatch.setattr(decoding, "decode_content", decoded_then_replaced)
    read_image(image, 16, "both", cache)
    monkeypatch.undo()
    assert cache.get(image, 16, "both") is None
    assert read_image(image, 16, "both", cache).square[0, 0].tolist() == [0, 0, 255]


def test_another_file_of_the_same_length_and_time_is_decoded_again(tmp_path):
    """As a copy that keeps the time of its original."""
    cache = cache_in(tmp_path / "cache")
    image, other = tmp_path / "a.bmp", tmp_path / "b.bmp"
    Image.new("RGB", (40, 40), "red").save(image)
    Image.new("RGB", (40, 40), "blue").save(other)
    for path in (image, other):
        os.utime(path, ns=(10**18, 10**18))
    assert image.stat().st_size == other.stat().st_size
    read_image(image, 16, "center", cache)
    image.write_bytes(other.read_bytes())
    os.utime(image, ns=(10**18, 10**18))
    assert read_image(image, 16, "center", cache).square[0, 0].tolist() == [0, 0, 255]


def test_a_file_that_was_changed_just_now_is_not_kept(image, tmp_path):
    """It could be changed again within a tick of the clock of its disk, and have the same time."""
    read_image(image, 16, "center", SquareCache(tmp_path / "cache", 10**9))
    assert entries(tmp_path / "cache") == []
    read_image(image, 16, "center", cache_in(tmp_path / "cache"))
    assert len(entries(tmp_path / "cache")) == 1


def test_what_is_kept_has_the_key_of_what_it_was_decoded_from(image, tmp_path):
    cache = cache_in(tmp_path / "cache")
    for wanted in ("center", "whole", "both"):
        assert read_image(image, 16, wanted, cache).key == content_key(image)
        assert cache.get(image, 16, wanted).key == content_key(image)


def test_parts_of_different_contents_are_not_joined(image, tmp_path):
    cache = cache_in(tmp_path / "cache")
    found = read_image(image, 16, "both", cache)
    assert cache.get(image, 16, "both") is not None
    cache.put(image, image.stat(), 16, "center", found._replace(key=bytes(16)))
    assert cache.get(image, 16, "both") is None


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_torn_entry_is_not_believed(image, tmp_path, damage):
    cache = cache_in(tmp_path / "cache")
    plain = read_image(image, 16, "center", cache).square
    (entry,) = entries(tmp_path / "cache")
    content = bytearray(entry.read_bytes())
    content[7] ^= 1
    entry.write_bytes(content if damage is None else damage)
    assert cache.get(image, 16, "center") is None
    np.testing.assert_array_equal(read_image(image, 16, "center", cache).square, plain)


def test_the_cache_keeps_its_limit_and_lets_the_unused_go(image, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "RECOUNT", 1)
    found = read_image(image, 16, "center")
    room = 3  # squares a shard
    limit = SHARDS * room * (found.square.nbytes + decoding.TAIL.size + 4)
    cache = cache_in(tmp_path / "cache", limit)

    def put(name):
        cache.put(tmp_path / name, image.stat(), 16, "center", found)

    for i in range(40 * SHARDS // 8):
        put(f"{i}.png")
    full = entries(tmp_path / "cache")
    assert len(full) > SHARDS
    assert sum(path.stat().st_size for path in full) <= limit
    names = {path.name for path in full}
    for i in range(1000, 1000 + 4 * SHARDS):  # nothing was unused for long: nothing is dropped
        put(f"{i}.png")
    assert names <= {path.name for path in entries(tmp_path / "cache")}
    for path in entries(tmp_path / "cache"):
        os.utime(path, (0, 0))
    image.rename(tmp_path / "new.png")
    facts = (tmp_path / "new.png").stat()
    cache.put(tmp_path / "new.png", facts, 16, "center", found)
    assert cache.get(tmp_path / "new.png", 16, "center") is not None
    assert sum(path.stat().st_size for path in entries(tmp_path / "cache")) <= limit


def test_a_cache_that_cannot_be_written_costs_nothing_else(image, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    cache = cache_in(tmp_path / "cache")
    np.testing.assert_array_equal(read_image(image, 16, "center", cache).square, read_square(image, 16))
    tiny_cache = cache_in(tmp_path / "small", 0)
    read_image(image, 16, "center", tiny_cache)
    assert entries(tmp_path / "small") == []


def test_a_planted_link_is_not_written_through(image, tmp_path, monkeypatch):
    cache, victim = cache_in(tmp_path / "cache"), tmp_path / "victim"
    victim.write_text("mine")
    square = read_image(image, 16, "center", cache).square
    (entry,) = entries(tmp_path / "cache")
    entry.unlink()
    monkeypatch.setattr("secrets.token_hex", lambda _bytes: "guessed")
    for name in (f"{entry.name}.{os.getpid()}.part", f".{entry.name}.guessed.part"):
        entry.with_name(name).symlink_to(victim)
    read_image(image, 16, "center", cache)
    assert victim.read_text() == "mine"
    assert not entry.exists()  # nothing was kept
    monkeypatch.undo()
    read_image(image, 16, "center", cache)
    assert not entry.is_symlink()
    np.testing.assert_array_equal(cache.get(image, 16, "center").square, square)


def test_processes_share_a_cache(photos, tmp_path):
    paths = sorted((photos / "pool").iterdir()) * 4  # more than a chunk: really in workers
    cache = cache_in(tmp_path / "cache")
    first = list(read_squares(paths, 16, cache=cache, workers=2))
    again = list(read_squares(paths, 16, cache=cache, workers=2))
    plain = list(read_squares(paths, 16, workers=1))
    for one, two, three in zip(first, again, plain, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)
    assert len(entries(tmp_path / "cache")) == 24


def test_arrays_stay_in_this_process(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (100, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images)
    rows = [ArrayRow(tmp_path / "a.npz", "images", i) for i in range(100)]
    monkeypatch.setattr("ropaws.pool.decoding.in_workers", None)
    for image, square in zip(images, read_squares(rows, 16), strict=True):
        assert not isinstance(square, UnreadableError)
        np.testing.assert_array_equal(square[:, :, 1], image)


def test_the_config_of_a_run_says_how_images_are_read(photos, tmp_path):
    settings = config(photos, memory_gb=0.5, cache=tmp_path / "cache", cache_gb=2.0)
    run = ropaws.train(replace(settings, train=replace(settings.train, steps=1)), tmp_path / "run")
    assert read_config(run / "config.json").data == with_absolute_paths(settings).data
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"data\.cache: .* cannot be a folder"):
        replace(settings.data, cache=tmp_path / "file").decoding()
    for wrong, words in (({"memory_gb": -1.0}, "memory_gb"), ({"workers": 0}, "data.workers must be")):
        with pytest.raises(ValueError, match=words):
            replace(settings.data, **wrong)
