"""The templates: whatever a value holds is text, and no value may be left out."""

import importlib.resources

import jinja2
import pytest

from ropaws.report.page import fill, section


def test_values_are_shown_as_text():
    shown = section("key_figures", cards=[(0.5, "<script>alert(1)</script> & more")])
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in shown
    assert "<script>" not in shown


def test_data_of_a_script_cannot_end_it():
    tips = {"thumbnails": [None], "lines": [["</script><b>"]]}
    shown = section("projection", of="test", classes=[], map="", tips=tips)
    assert shown.count("</script>") == 1


def test_a_value_that_nobody_has_given_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'about' is undefined"):
        fill("run.html", name="mine", verdict="", key_figures="", sections={}, missing={})
    with pytest.raises(jinja2.UndefinedError, match="'cards'"):
        section("key_figures")


def test_styles_and_scripts_hold_nothing_that_a_template_would_change():
    """They are included as they are, so that an editor knows them as CSS and JavaScript."""
    for name in ("style.css", "map.js"):
        text = (importlib.resources.files("ropaws.report") / "templates" / name).read_text()
        assert jinja2.Template(text, keep_trailing_newline=True).render() == text
