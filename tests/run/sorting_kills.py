"""Kill a call that moves images at every file operation, and look at what is left. Loads no torch.

python sorting_kills.py FOLDER  prints the number of operations, or ends with an AssertionError
"""

import errno
import os
import shutil
import sys
from pathlib import Path

from ropaws.run.sorting import Sorter

COUNT, SIZE = 3, 5000
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "shutil.copyfile", "shutil.copystat"}
WRITE = "a write"  # of a part of an image
KILLED = 9


def on_another_device(source, place, rename=os.rename):
    if os.path.dirname(source) != os.path.dirname(place):
        raise OSError(errno.EXDEV, "another device")
    rename(source, place)


def in_pieces(out, source, offset, count, sendfile=os.sendfile):
    """As shutil copies on Linux, but a fifth of an image at a time."""
    sys.audit(WRITE)
    return sendfile(out, source, offset, min(count, SIZE // 5))


def content(number):
    return bytes([number]) * SIZE


def make(pool):
    for number in range(COUNT):
        (pool / str(number)).mkdir(parents=True)
        (pool / str(number) / "same.png").write_bytes(content(number))
    os.symlink("../0/../hidden/real.bin", pool / "1" / "link.png")
    (pool / "hidden").mkdir()
    (pool / "hidden" / "real.bin").write_bytes(content(COUNT))


def sort(pool, target):
    sources = sorted(pool.rglob("*.png"))
    sorter = Sorter(target, ["cat"], sources, move=True)
    for source in sources:
        sorter.plan(source, "cat")
    sorter.carry_out()


def killed_at(operation, pool, target):
    """In a process of its own. Returns whether it got that far."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event, arguments):
            nonlocal seen
            if event == WRITE or (event in EVENTS and str(pool.parent) in str(arguments)):
                seen += 1
                if seen == operation:
                    os._exit(KILLED)

        sys.addaudithook(count)
        sort(pool, target)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


def images(folder):
    """The content of every image below."""
    return sorted(path.read_bytes() for path in folder.rglob("*.png"))


def main(folder):
    os.rename, os.sendfile = on_another_device, in_pieces
    operation, killed = 0, True
    while killed:
        operation += 1
        base = folder / str(operation)
        pool, target = base / "pool", base / "sorted"
        make(pool)
        everything = images(pool)
        killed = killed_at(operation, pool, target)
        there = images(target) if target.exists() else []
        assert set(there) <= set(everything), f"{operation}: half an image under its final name"
        assert set(there + images(pool)) == set(everything), f"{operation}: an image is lost"
        assert len(there) + len(images(pool)) <= len(everything) + 1, f"{operation}: many are in both places"
        sort(pool, target)
        assert images(target) == everything, f"{operation}: not each image once"
        assert images(pool) == [], f"{operation}: images are left"
        names = sorted(path.name for path in target.rglob("*") if path.is_file())
        assert names == ["link.png", "same (2).png", "same (3).png", "same.png"], f"{operation}: {names}"
        shutil.rmtree(base)
    print(operation)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
