"""Lists in sentences of the documentation → what the code says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
import yaml

import torchopt_dist as todist
from tests.optim.table import ROWS
from tests.rows import each_row

DOCS = Path(__file__).resolve().parents[2] / "docs"


def listed(page: str, sentence: str) -> set[str]:
    """The names in the group of a regular expression that a page has once."""
    (found,) = re.findall(sentence, (DOCS / page).read_text("utf-8").replace("\n", " "))
    return set(re.findall(r"\w+", found)) - {"and"}


def test_torch_s_optimizers_that_can_be_made_differentiable() -> None:
    page = "optimizers.md"
    work = listed(page, r"It works for ([\w, ]+), and for subclasses of them")
    refused = listed(page, r"([A-Z][\w, ]+) do not; such a class is refused")
    for name in work | refused:
        if not hasattr(torch.optim, name):  # Muon is younger than the oldest torch
            continue
        net = torch.nn.Linear(1, 1)
        try:
            todist.differentiable(getattr(torch.optim, name), net, lr=0.1).step(net(torch.ones(1)).sum())
        except TypeError:
            assert name in refused
        else:
            assert name in work
    offered = [c for c in vars(torch.optim).values() if inspect.isclass(c) and c is not torch.optim.Optimizer]
    known = {c.__name__ for c in offered if issubclass(c, torch.optim.Optimizer)}
    if torch.__version__.startswith("2.13."):  # the version that the pages are written with
        assert work | refused == known


def test_every_number_may_be_a_tensor_but_those_that_are_named() -> None:
    """``tests/optim/test_derivatives.py`` checks the gradient of each tensor of a row."""
    page = (DOCS / "optimizers.md").read_text("utf-8").replace("\n", " ")
    (excepted,) = re.findall(r"may be such a tensor, except (.*?), from which averages start", page)
    numbers = set()
    for row in ROWS.values():
        for name, parameter in inspect.signature(row.function).parameters.items():
            is_number = re.search("float|HyperParameter|ScalarOrSchedule", parameter.annotation)
            if is_number and name not in row.tensors:
                numbers |= {(name, row.function.__name__)}
    assert numbers == set(re.findall(r"`(\w+)` of `(\w+)`", excepted))


@each_row(
    ("word", "page"),
    [("Checkpoint", "checkpoints"), ("Freeze", "hyperparameters"), ("GPU", "gpus"), ("SLURM", "launchers")],
)
def test_a_word_that_is_searched_for_is_in_the_heading_of_one_page(word: str, page: str) -> None:
    headings = {
        path.stem: re.findall(r"^#{1,3} (.*)", path.read_text("utf-8"), re.M)
        for path in DOCS.glob("*.md")
        if path.stem != "api"
    }
    assert page in {name for name, texts in headings.items() if any(word in text for text in texts)}
    assert {name for name, texts in headings.items() if texts and word in texts[0]} <= {page}


def test_each_page_is_linked_from_the_readme_and_the_index() -> None:
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", (DOCS.parent / "README.md").read_text("utf-8"))
    assert pages == {Path(link).name for link in links if link.startswith("docs/") and link.endswith(".md")}
    assert not [link for link in links if not (DOCS.parent / link).exists()]
    assert pages == {
        f"{line}.md" for line in re.findall(r"^(\w+)$", (DOCS / "index.md").read_text("utf-8"), re.M)
    }


def test_the_readme_is_read_in_minutes() -> None:
    assert len((DOCS.parent / "README.md").read_text("utf-8").splitlines()) <= 120


def test_there_are_forty_questions_each_with_a_block() -> None:
    page = (DOCS / "how_do_i.md").read_text("utf-8")
    before, _, _ = page.partition("## In a sentence")
    sections = re.findall(r"^\*\*… (.+?)\?\*\*((?:(?!^\*\*… |^## ).*\n)*)", before, re.MULTILINE)
    assert len(sections) == 40
    assert [question for question, text in sections if "```python\n" not in text] == []


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == todist.__version__
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
