"""report.html: its first paragraph on handed figures, every section, and a page that is whole, escaped and alone."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from samples import SPECS, comparison, header, ppl_row, task_row

from hf_posenc.evaluate.results import CompareRow, Comparison, TaskRow
from hf_posenc.report import summary
from hf_posenc.report.html import page_html, repeat

VOID = {"meta", "link", "br", "img", "input", "hr"}
ATTACK = '<script>alert(1)</script>$x$ & "quoted"'


class Reader(HTMLParser):
    """Tags that must close in order, all ids, all that would be loaded, and the text of every table by its caption."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.loads: list[tuple[str, str]] = []
        self.anchors: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.headings: dict[str, str] = {}
        self.section = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [given["id"] or ""] if "id" in given else []
        if tag == "a":
            self.anchors.append(given.get("href") or "")
        else:
            self.loads += [(tag, given[key] or "") for key in ("src", "href", "data", "srcset") if key in given]
        assert not any(key.startswith("on") for key in given)
        if tag == "svg":
            assert given.get("role") == "img" and given.get("aria-label")
        if tag == "section":
            self.section = given["aria-labelledby"] or ""
        if tag == "caption":
            self.rows: list[list[str]] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "caption":
            self.tables[data] = self.rows
        if inside in ("td", "th"):
            self.rows[-1][-1] += data
        if inside == "h2":
            self.headings[self.section] = data


@pytest.fixture(scope="module")
def text() -> str:
    return page_html(comparison(ATTACK))


@pytest.fixture(scope="module")
def page(text: str) -> Reader:
    return Reader(text)


def test_the_page_is_whole(text: str, page: Reader) -> None:
    assert page.open == []
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert len(page.ids) == len(set(page.ids)) and page.tags.count("svg") > 8
    assert len(text.encode()) < 1_000_000


def test_nothing_is_loaded_and_nothing_runs(text: str, page: Reader) -> None:
    assert not {"script", "img", "iframe", "image", "object", "style-sheet"} & set(page.tags)
    outside = [(tag, address) for tag, address in page.loads if not address.startswith(("#", "data:"))]
    assert outside == []
    assert all(anchor[1:] in page.ids for anchor in page.anchors if anchor.startswith("#"))
    inner = re.findall(r'(?:href="|url\()#([^")]+)', text)
    assert inner and set(inner) <= set(page.ids)
    assert "@import" not in text and "http" not in re.sub(r"http-equiv", "", text)


def test_a_models_name_is_text(text: str, page: Reader) -> None:
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    conditions = dict(row for row in page.tables["Conditions"] if len(row) == 2)
    assert conditions["model"] == ATTACK


def test_every_section_is_there_in_order(page: Reader) -> None:
    wanted = ["perplexity", "positions", "tasks", "effective-length", "anatomy", "settings", "failures"]
    assert list(page.headings) == wanted


def test_the_tables_hold_the_figures(page: Reader) -> None:
    tail = page.tables["Perplexity, last 8 tokens"]
    assert tail[0] == ["encoding", "16", "32", "64", "128"]
    assert tail[1] == ["none", "2.50", "5.50", "8.50", "11.5"]
    assert tail[2] == ["yarn (factor=4)", "3.50", "3.75", "4.00", "4.25"]
    assert tail[5] == ["nope", "6.50", "6.75", "7.00", "failed"]
    assert page.tables["passkey: mean score of 20 documents"][1] == ["none", "1.00", "0.75", "0.50", "0.25"]
    assert page.tables["copy_distance (loglikelihood): nll of the right answer (nats a token)"][1][1] == "0.500"
    depths = page.tables["passkey: mean score by depth"]
    assert depths[1:3] == [
        ["none, depth 0%", "1.00", "0.75", "0.50", "0.25"],
        ["none, depth 25%", "1.00", "0.80", "0.55", "0.30"],
    ]
    assert page.tables["Nll (nats a token) of the bin that ends at each position"][0][-1] == "128"
    waves = page.tables["Wavelengths in tokens"]
    assert [row[0] for row in waves[1:]] == ["none", "yarn (factor=4)", *["dynamic_yarn"] * 3]
    assert waves[1][1:] == ["rope (the host’s own)", "all positions", "6.28", "19869", "6 of 8", "1"]


def test_a_failed_cell_says_why_where_one_points_at_it(text: str) -> None:
    assert '<td class="failed" title="out of memory at 128 tokens">failed</td>' in text


def test_the_effective_length_says_what_it_is_a_mean_of(text: str, page: Reader) -> None:
    rows = {row[0]: row[1] for row in page.tables["Effective length and mean scores"]}
    assert rows["none"] == "below 16"  # vt is half of the others
    assert "the 3 of this report, not RULER&#39;s 13" in text and "0.856" in text


def test_one_colour_an_encoding_in_every_figure(text: str) -> None:
    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]
    # at the longest length, which the bins are of, the last encoding failed
    figures = {"Perplexity, last": 5, "Perplexity, all": 5, "Negative log-likelihood by position": 4}
    for name, lines in figures.items():
        figure = text[text.index(f'aria-label="{name}') :]
        figure = figure[: figure.index("</svg>")]
        order = [figure.index(colour) for colour in colours[:lines]]
        assert order == sorted(order)


def test_failures_are_listed_with_their_reasons(text: str) -> None:
    listed = text[text.index('<h2 id="failures"') :]
    for line in ("nope at 128: out of memory at 128 tokens", "passkey, nope at 128: out of memory", "qa_1 was not run"):
        assert line in listed
    none = page_html(Comparison({"model": "m", "tail": 4}, [ppl_row("none", 8, 2.0)], complete=True))
    assert "None: every cell that was tried has a figure." in none and "Incomplete" not in none


def test_an_unfinished_run_says_so_first(text: str) -> None:
    assert "Incomplete" not in text
    stopped = page_html(comparison(complete=False))
    assert stopped.index("Incomplete") < stopped.index('class="summary"')


def test_sections_without_figures_say_why() -> None:
    bare = page_html(Comparison({"model": "m", "tail": 4}, [ppl_row("none", 8, 2.0)], complete=True))
    page = Reader(bare)
    assert bare.count("Left out: ") == 4 and "no task was run" in bare and page.open == []
    tasks_only = page_html(Comparison({"model": "m", "tail": None, "text": None}, [], [task_row("none", 8, 0.5)], True))
    assert "no text was given" in tasks_only and "No map of passkey" in tasks_only


def test_a_page_of_nothing_but_failures() -> None:
    made = Comparison(
        header(), [ppl_row("none", 8, None, "past the end")], [task_row("none", 8, None, error="x")], True
    )
    page = Reader(page_html(made))
    assert page.open == [] and "svg" not in page.tags


def test_how_to_repeat_it() -> None:
    command = repeat(comparison("my model"))
    assert command.splitlines()[0] == "hf-posenc compare 'my model' \\"
    assert "--encodings none,yarn:factor=4,dynamic_yarn,alibi,nope" in command
    assert "--lengths 16,32,64,128" in command and "--text book.txt --tail 8" in command
    assert "--tasks passkey,vt,copy_distance" in command
    assert repeat(Comparison({"model": "m", "command": "make demo"})) == "make demo"


def both(rows: list[CompareRow], tasks: list[TaskRow] | None = None) -> list[str]:
    return summary(Comparison(header(), rows, tasks or [], True))


NONE = [ppl_row("none", 32, 2.0), ppl_row("none", 128, 20.0)]
YARN = [ppl_row("yarn", 32, 2.5, factor=4), ppl_row("yarn", 128, 3.0, factor=4)]
NTK = [ppl_row("ntk", 32, 2.1, factor=4), ppl_row("ntk", 128, 3.02, factor=4)]


def test_a_clear_winner_with_its_cost() -> None:
    said = both([*NONE, *YARN])
    assert said[0] == (
        "Choose yarn (factor=4) for texts past the trained length; within it none (the unpatched model) is better."
    )
    assert said[1] == (
        "At 128 tokens (4 times the trained length) it has the lowest tail perplexity, 3.00 (unpatched 20.0). The cost "
        "at 32 tokens, within the trained length: 2.50, against 2.00 of the unpatched model: 25% more."
    )
    assert (
        said[2] == "Lowest tail perplexity by length (“or”: within 1 %): 32: none (2.00); 128: yarn (factor=4) (3.00)."
    )
    assert said[3].startswith("No task was run") and len(said) == 4


def test_a_tie_goes_to_the_one_that_costs_less() -> None:
    said = both([*NONE, *YARN, *NTK])
    assert said[0] == "Too close to call between yarn (factor=4) and ntk (factor=4); ntk (factor=4) will do."
    assert "a tail perplexity within 1 % of the lowest, 3.02" in said[1] and "2.10, against 2.00" in said[1]


def test_a_winner_without_a_cost_is_simply_chosen() -> None:
    said = both([*NONE, ppl_row("dynamic_yarn", 32, 2.0), ppl_row("dynamic_yarn", 128, 3.0)])
    assert (
        said[0] == "Choose dynamic_yarn."
        and "2.00, against 2.00 of the unpatched model: the same within 1 %" in said[1]
    )
    said = both([*NONE, ppl_row("linear", 32, 9.0), ppl_row("linear", 128, 10.0)])
    assert "9.00, against 2.00 of the unpatched model: 4.5 times as much." in said[1]


def test_the_unpatched_model_may_win() -> None:
    said = both([ppl_row("none", 32, 2.0), ppl_row("yarn", 32, 2.5)])
    assert said[0] == "Choose none (the unpatched model)." and "(within the trained length)" in said[1]


def test_tasks_that_agree_and_tasks_that_do_not() -> None:
    more = {"options": {"factor": 4}}
    rows = [*NONE, *YARN, ppl_row("ntk", 128, 4.0, factor=4)]
    agree = both(rows, [task_row("none", 128, 0.0), task_row("yarn", 128, 0.8, **more)])
    assert (
        agree[0].startswith("Choose yarn (factor=4) for texts past")
        and "; there it has the best mean task score, 0.80." in agree[1]
    )
    assert agree[-1] == "Best by task: passkey at 128: yarn (factor=4) (0.80)."
    tasks = [task_row("ntk", 128, 0.9, **more), task_row("yarn", 128, 0.5, **more)]
    against = both(rows, tasks)
    assert against[0] == "No single choice: perplexity and tasks disagree."
    assert "yarn (factor=4) has the lowest tail perplexity (3.00; mean task score 0.50)" in against[1]
    assert "ntk (factor=4) has the best mean task score (0.90; tail perplexity 4.00)" in against[1]
    assert (
        "at 32 tokens, within the trained length: yarn (factor=4) 2.50, none (the unpatched model) 2.00." in against[1]
    )


def test_scores_one_document_apart_are_no_difference() -> None:
    tasks = [task_row("none", 128, 0.45), task_row("yarn", 128, 0.5)]
    assert both([], tasks)[0] == "Too close to call between yarn and none; yarn will do."
    tasks = [task_row("none", 128, 0.40), task_row("yarn", 128, 0.5)]
    assert both([], tasks)[0] == "Choose yarn."


def test_no_scores_above_zero_are_no_argument() -> None:
    tasks = [task_row("none", 128, 0.0), task_row("yarn", 128, 0.0, options={"factor": 4})]
    said = both([*NONE, *YARN], tasks)
    assert said[0].startswith("Choose yarn (factor=4) for") and "no encoding scores above 0 on the tasks" in said[1]
    assert both([], tasks)[0] == "No choice: at 128 tokens no encoding scores above 0 on the tasks."


def test_nothing_measured_one_encoding_one_cell() -> None:
    failed = [ppl_row("none", 32, None, "past the end"), ppl_row("yarn", 32, None, "out of memory")]
    assert both(failed) == ["No cell could be measured; the reasons are at the end."]
    assert both([]) == ["No cell could be measured; the reasons are at the end."]
    said = both([ppl_row("yarn", 32, 2.0)])
    assert said[0] == "Only yarn was measured: there is nothing to choose between." and "32: yarn (2.00)" in said[1]
    half = both([*NONE, failed[1]])
    assert half[-1] == "Not measured: 1 of 3 cells, listed at the end with the reasons."


def test_a_model_without_a_trained_length_has_no_cost() -> None:
    made = Comparison({"model": "bloom", "trained_length": None, "tail": 8}, [*NONE, *YARN], complete=True)
    assert summary(made)[1] == "At 128 tokens it has the lowest tail perplexity, 3.00 (unpatched 20.0)."


def test_a_name_of_hundreds_of_characters_is_cut_in_sentences() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rows = [ppl_row("none", 128, 20.0), ppl_row("longrope", 128, 2.0, **lists)]
    assert all(len(sentence) < 250 for sentence in both(rows))
    assert len(page_html(replace(comparison(), rows=rows, task_rows=[]))) > 0 and len(SPECS) == 5
