"""The pages of this folder → HTML, without a network: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import torchopt_dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import pages
import pictures

project = "torchopt_dist"
release = torchopt_dist.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_reredirects",
]
if "without_sources" in globals()["tags"]:  # Sphinx has defined them
    extensions.remove("sphinx.ext.viewcode")
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

redirects = {
    "api/attribution": "inner_loops.html#attribution",
    "api/errors": "tools.html#errors",
    "api/modules": "inner_loops.html#module-state",
    "api/solvers": "inner_loops.html#todistdiffimplicit",
    "api/transform": "optimizers.html#todisttransform",
    "api/typing": "tools.html#todisttyping",
    "api/worlds": "calls.html#the-world",
    "buffers": "messages.html#buffers-and-batchnorm",
    "faq": "how_do_i.html",
    "faults": "losses.html#when-something-dies",
    "kubernetes": "launchers.html#kubernetes",
    "learned_optimizers": "hyperparameters.html#a-learned-optimizer",
    "lightning": "data.html#lightning",
    "linear_solve": "implicit.html#linear-solvers",
    "logging": "debugging.html#logging",
    "lora": "hyperparameters.html#adapt-a-large-model-by-lora",
    "many_workers": "put.html#large-models-on-many-workers",
    "meta_modules": "implicit.html#as-a-module",
    "mirror": "put.html#a-model-that-every-worker-steps",
    "mixed_precision": "gpus.html#mixed-precision",
    "module_state": "inner_loops.html#module-state",
    "paper": "evaluation.html#a-papers-experiment",
    "per_layer": "hyperparameters.html#hyper-parameters-for-each-layer-and-frozen-layers",
    "randomness": "gradients.html#randomness",
    "remat": "replaying.html#compute-a-part-again",
    "report": "debugging.html#report-a-problem",
    "schedules": "optimizers.html#schedules",
    "security": "transports.html#security",
    "slurm": "launchers.html#slurm",
    "terms": "api.html#terms",
    "three_levels": "inner_loops.html#loops-in-loops",
    "torch_optimizers": "optimizers.html#torchs-own-optimizers",
    "torchrunx": "coming_from.html#torchrunx",
    "transformers": "compile.html#transformers-and-attention",
    "trees": "transformations.html#trees-of-tensors",
    "uneven_tasks": "data.html#tasks-of-different-sizes",
    "unstable": "estimates.html#unstable-meta-gradients",
    "visual": "debugging.html#pictures-of-the-graph",
    "zero_order": "estimates.html#zeroth-order-gradients",
}
"""Addresses that pages had before they became sections → these sections."""
redirect_html_template_file = "redirect.html"

copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # what a program prints has none

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False

# torch's names have no page here, and finding theirs would need a network.
nitpick_ignore_regex = [("py:.*", r"(torch|collections)\..*")]

html_theme = "furo"
html_title = f"torchopt_dist {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_extra_path = ["llms.txt", "../SKILL.md"]  # for programs that read the site
html_css_files = ["site.css"]


def no_type_before_colon(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Our sentences hold no types, which are in the signatures: a colon in them is only a colon."""
    if what in {"attribute", "data", "property"} and lines:
        lines[0] = f": {lines[0]}"
    for index, line in enumerate(lines[:-1]):
        if line == "Returns:":
            lines[index + 1] = re.sub(r"^( +)", r"\1: ", lines[index + 1])


def from_any_module(app: Sphinx, env: Any, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """A name that a docstring gives without its module is found where it is; each has one place."""
    if node.get("refdomain") != "py" or not (isinstance(contnode, nodes.literal) or node["reftype"] == "exc"):
        return None
    node["refspecific"] = True
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], node["reftarget"], node, contnode
    )


def plain_annotation(app: Sphinx, env: Any, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """A type in a signature is text where it has no page here; what a person wrote as a link must be one."""
    return None if isinstance(contnode, nodes.literal) else contnode


def make_pictures_and_pages(app: Sphinx) -> None:
    """What is made of programs, tables and files outside of this folder."""
    pictures.make()
    pages.make()


def one_signature(app: Sphinx) -> None:
    """The overloads of a call are for type checkers: its page shows one signature, with all options."""
    for name in ("parallelize", "map"):
        analyzer = ModuleAnalyzer.for_module(f"torchopt_dist.distributed.{name}")
        analyzer.analyze()
        analyzer.overloads.clear()


HOW_TO_RUN = {
    "python torchrun": ("python", "torchrun, 2 workers"),
    "python": ("python", "python"),
    "py": ("python", "another library, not run here"),
    "text output": ("text", "output"),
}
"""What stands behind the first fence of a block → its language, and the caption that the reader sees."""


def caption_blocks(app: Sphinx, page: str, text: list[str]) -> None:
    """Each block of code says how it is run; ``tests/docs/test_examples.py`` runs it so."""

    def captioned(match: re.Match[str]) -> str:
        _, has_library, library = match[1].partition("python with ")
        if match[1] not in HOW_TO_RUN and not has_library:
            return match[0]
        language, caption = HOW_TO_RUN.get(match[1], ("python", f"python, with {library}"))
        return f"```{{code-block}} {language}\n:caption: {caption}\n\n"

    def drawn(match: re.Match[str]) -> str:
        return match[0] if (Path(app.srcdir) / match[1]).exists() else ""

    text[0] = re.sub(r"^```(\w.*)\n", captioned, text[0], flags=re.MULTILINE)
    if page == "gallery":
        text[0] = pages.with_times(text[0])
    for of_make_gallery in (r"^:img-top: (.*)\n", r"^!\[.*\]\((_pictures/.*\.png)\)\n"):
        text[0] = re.sub(of_make_gallery, drawn, text[0], flags=re.MULTILINE)


SYNONYMS = {
    "checkpoints": "save, resume, restore",
    "coming_from": "higher, learn2learn, betty, jaxopt, optax, torchrunx, launcher",
    "compile": "inductor, dynamo, jit, fullgraph, attention, gpt",
    "data": "omniglot, episode, dataloader, lightning, padding, mask, ragged, variable length",
    "debugging": "nan, breakpoint, pdb, tensorboard, wandb, tqdm, graphviz",
    "estimates": "nes, openai-es, black-box, reinforce, zeroth-order, evolution, finite difference",
    "evaluation": "inference, no_grad, validation, test, reproduce, confidence",
    "gpus": "cuda, nccl, amp, autocast, bfloat16, fp16",
    "gradients": "seed, rng, reproducible, reproducibility, deterministic, autograd, backward, dist_autograd",
    "hyperparameters": "hyperparameter, hypergradient, hpo, fine-tune, finetune, fine, tune, l2o, peft, adapter",
    "implicit": "deq, equilibrium, imaml, bilevel, argmin, kkt, conjugate gradients, cg, gmres, neumann",
    "inner_loops": "unroll, unrolled, maml, meta-learning, metalearning, bilevel, functional, clone, three, nested",
    "launch": "jupyter, notebook, spawn, ssh, multiprocessing",
    "launchers": "mpi, mpirun, srun, sbatch, slurm, cluster, hpc, ray, dask, k8s, kubernetes, submitit",
    "losses": "fault, crash, sigkill, preemption, oom",
    "one_loop": "ddp, fsdp, zero, data-parallel",
    "optimizers": "differentiable optimizer, scheduler, warmup, cosine",
    "profiling": "slow, speed, bottleneck, load balancing, straggler",
    "put": "broadcast, parameter server, shared memory",
    "replaying": "checkpointing, rematerialization, recompute, memory",
    "transformations": "pytree, optree, jax tree, gradient clipping, ema, swa",
}
"""What people type into the search → pages that have no such word, or not in a heading."""


def add_synonyms(app: Sphinx, page: str, text: list[str]) -> None:
    """Sphinx searches the keywords of a page, too."""
    if page in SYNONYMS:
        text[0] = f"---\nmyst:\n  html_meta:\n    keywords: {SYNONYMS[page]}\n---\n{text[0]}"


def caption_included_blocks(app: Sphinx, path: Any, page: str, text: list[str]) -> None:
    """The same for the parts of README.md that the first page includes; files without a page are no links there."""
    caption_blocks(app, page, text)

    def on_the_site(match: re.Match[str]) -> str:
        name = match[2].removesuffix(".md").lower()
        return f"[{match[1]}](docs/_site/{name}.md{match[3] or ''})" if match[2].endswith(".md") else match[1]

    text[0] = re.sub(r"\[([^]]+)\]\(((?:examples/)?[\w.]+)(#[\w-]+)?\)", on_the_site, text[0])


def setup(app: Sphinx) -> None:
    """Register the functions above."""
    app.connect("builder-inited", make_pictures_and_pages)
    app.connect("builder-inited", one_signature)
    app.connect("source-read", caption_blocks)
    app.connect("source-read", add_synonyms)
    app.connect("include-read", caption_included_blocks)
    app.connect("autodoc-process-docstring", no_type_before_colon, priority=400)
    app.connect("missing-reference", from_any_module, priority=400)
    app.connect("missing-reference", plain_annotation)
