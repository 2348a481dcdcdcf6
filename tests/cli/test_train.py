"""`ropaws train` on a person's images: everything is read once."""

from collections import Counter

import tyro

from ropaws.cli import analyze
from ropaws.cli.main import main
from ropaws.data.files import decoding, listing, reading


def counted(monkeypatch, place, name, calls):
    """Count the calls of a function by the first argument."""
    real = getattr(place, name)

    def count(first, *args, **kwargs):
        calls[str(first)] += 1
        return real(first, *args, **kwargs)

    monkeypatch.setattr(place, name, count)


def test_images_are_listed_and_decoded_once_for_training_and_report(photos, monkeypatch, capsys):
    lists, walks, decoded = Counter(), Counter(), Counter()
    for name in ("list_labeled", "list_unlabeled"):
        counted(monkeypatch, reading, name, lists)
        counted(monkeypatch, listing, name, lists)
    counted(monkeypatch, listing, "walk_images", walks)
    counted(monkeypatch, decoding, "_decode", decoded)
    main(["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
          "--test", str(photos / "test"), "--out", str(photos / "run"), "--train.steps", "2",
          "--data.workers", "1"])  # fmt: skip
    assert "Written" in capsys.readouterr().out
    assert (photos / "run" / "report.html").exists()
    assert set(lists.values()) == {1}, lists
    assert set(walks.values()) == {1}, walks
    images = sorted(map(str, photos.glob("[lpt]*/**/*.png")))
    assert len(images) == 9 + 36 + 18
    assert decoded == dict.fromkeys(images, 1)


def test_the_report_of_a_training_parses_no_arguments(photos, monkeypatch, capsys):
    """Once for what to do and once for the settings; the report after it is a function call."""
    parsed = []
    real = tyro.cli
    monkeypatch.setattr(tyro, "cli", lambda *args, **kwargs: parsed.append(args[0]) or real(*args, **kwargs))
    monkeypatch.setattr(analyze, "report", None)
    monkeypatch.setattr(analyze, "evaluate", None)
    arguments = ["train", "--labeled", str(photos / "labeled"), "--unlabeled", str(photos / "pool"),
                 "--train.steps", "1"]  # fmt: skip
    main([*arguments, "--out", str(photos / "shown")])
    captured = capsys.readouterr()
    assert "No report" not in captured.err
    assert (photos / "shown" / "report.html").exists()
    assert [kind.__name__ for kind in parsed] == ["TrainOptions", "Train"]
    parsed.clear()
    main(["train", "--resume", str(photos / "shown")])
    assert [kind.__name__ for kind in parsed] == ["TrainOptions"]
    parsed.clear()
    main([*arguments, "--no-report", "--out", str(photos / "bare")])
    assert [kind.__name__ for kind in parsed] == ["TrainOptions", "Train"]
    assert not (photos / "bare" / "report.html").exists()
