"""The gallery names every program; those without a file of tests of their own, in a small setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.examples.running import imported, run_python
from tests.processes import torchrun

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "gallery.md").read_text("utf-8")
NUMBER = r"-?\d+\.\d+"


def run(name: str, folder: Path, *arguments: object) -> str:
    picture = folder / f"{name}.png"
    printed = run_python(EXAMPLES / f"{name}.py", "--output", picture, *arguments)
    assert picture.read_bytes().startswith(b"\x89PNG")
    return printed


def test_every_program_is_in_the_gallery_or_among_the_reproductions() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    cards = set(re.findall(r"^:link: _site/example_(\w+)$", PAGE, re.MULTILINE))
    page = (ROOT / "docs" / "reproductions.md").read_text("utf-8")
    assert programs == cards | set(re.findall(r"^<!-- bench: (\w+) -->$", page, re.MULTILINE))


def test_the_program_that_compiles_learns_without_the_compiler(tmp_path: Path) -> None:
    printed = run("compiled_maml", tmp_path, "--meta-steps", 40, "--inner-steps", 1, "--no-compile")
    ((before, after),) = re.findall(rf"not compiled loss ({NUMBER}) -> ({NUMBER});", printed)
    assert float(after) < float(before)


def test_a_transformer_adapts_alike_on_one_and_two_workers(tmp_path: Path) -> None:
    short = ("--meta-steps", 2, "--inner-steps", 1, "--tasks", 2, "--test-tasks", 2)
    printed = [run("transformer_meta", tmp_path, *short)]
    name = EXAMPLES / "transformer_meta.py"
    words = ("--standalone", "--nproc_per_node=2", name, *short, "--output", tmp_path / "pair.png")
    printed.append(torchrun(*words))
    lines = ["".join(line for line in text.splitlines() if "bits" in line) for text in printed]
    bits = [[float(value) for value in re.findall(NUMBER, line)] for line in lines]
    assert len(bits[0]) == 4
    assert bits[0] == pytest.approx(bits[1], abs=0.02)


def test_the_network_predicts_no_character_from_itself() -> None:
    example = imported(EXAMPLES / "transformer_meta.py")
    torch.manual_seed(0)
    model = example.GPT()
    text = torch.randint(97, (1, example.LENGTH + 1))
    hidden = []
    model.blocks[-1].register_forward_hook(lambda block, inputs, output: hidden.append(output))
    model(text)
    text[0, 20] = (text[0, 20] + 1) % 97
    model(text)
    same = (hidden[0] - hidden[1]).abs().amax(dim=-1)[0] < 1e-6
    assert same[:20].all()
    assert not same[20:].any()


def test_the_module_of_lightning_adapts_where_gradients_are_off() -> None:
    example = imported(EXAMPLES / "lightning_module.py")
    torch.manual_seed(0)
    module = example.Sines(lr=0.02, epochs=1)
    optimizer = module.configure_optimizers()["optimizer"]
    batches = list(example.sines(160, seed=0))
    with torch.inference_mode():
        before = module.validation_step(batches[0], 0)
    for _ in range(2):
        for index, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, index).backward()
            optimizer.step()
    with torch.inference_mode():
        module.validation_step(batches[0], 0)
    module.on_validation_epoch_end()
    assert module.validation_losses[0] < before  # their mean


WITHOUT_LIGHTNING = """
import runpy, sys
sys.modules["lightning"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_lightning_the_program_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="this example needs Lightning: pip install lightning"):
        run_python("-c", WITHOUT_LIGHTNING, EXAMPLES / "lightning_module.py", "--output", tmp_path / "x.png")
