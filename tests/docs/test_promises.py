"""What each line of ``docs/api`` says of a name is what a program of that name finds."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.promises.register import CHECKS

for _module in ("functions", "loops", "transform", "workers"):
    importlib.import_module(f"tests.docs.promises.{_module}")

ROOT = Path(__file__).resolve().parents[2]
ON_WORKERS = ("calls", "worlds", "trees on workers")
ELSEWHERE = {
    ("tests/test_names.py", ""): {"TodistError"},
    (
        "tests/launch/test_what_workers_raise.py",
        "test_what_cannot_be_rebuilt_is_a_remote_error_with_the_whole_text",
    ): {"RemoteError"},
    ("tests/distributed/calls/test_waiting_and_giving_up.py", "test_a_time_out_bounds_the_own_share"): {
        "CallTimeoutError"
    },
    (
        "tests/distributed/life/test_deaths.py",
        "test_a_worker_that_dies_in_a_call_is_an_error_that_can_be_caught",
    ): {"WorkerLostError"},
    ("tests/launch/test_ends.py", "test_a_worker_that_dies_is_named_with_its_last_lines"): {
        "WorkerFailedError"
    },
    ("tests/distributed/life/test_deaths.py", "test_when_rank_zero_dies_the_others_end"): {"PeerFailedError"},
    ("tests/launch/test_ends.py", "test_an_agent_that_gives_no_sign_of_life_is_killed_and_named"): {
        "AgentFailedError"
    },
    ("tests/checkpoint/test_checkpointer.py", "test_where_none_is_whole_nothing_begins_anew_by_itself"): {
        "CheckpointError"
    },
    ("tests/diff/test_data_parallel.py", "test_a_rank_that_dies_is_an_error_within_seconds"): {
        "CollectiveError"
    },
    ("tests/distributed/test_world.py", "test_a_wrong_environment_keeps_main_from_running"): {
        "InitializationError"
    },
    ("tests/distributed/test_world.py", "test_a_call_before_init_says_how_to_init"): {"NotInitializedError"},
    ("tests/distributed/test_put.py", ""): {"ResidentError"},
    (
        "tests/distributed/serialization/test_unsendable.py",
        "test_what_cannot_be_sent_is_an_error_of_its_own_and_no_lost_worker",
    ): {"SerializationError"},
    ("tests/attribution/test_scores.py", "test_exact_scores_are_differences_of_trainings"): {
        "attribute",
        "Training",
    },
    ("tests/attribution/test_result.py", "test_what_helps_and_what_harms"): {"Attribution"},
    ("tests/attribution/test_validation.py", "test_exact_scores_put_trainings_into_their_order"): {
        "validate",
        "Validation",
    },
    ("tests/attribution/test_validation.py", "test_a_training_without_what_helps_is_worse"): {
        "counterfactual"
    },
    ("tests/attribution/test_validation.py", "test_a_smooth_training_is_told_from_a_rough_one"): {
        "metasmoothness"
    },
    ("tests/diff/test_data_parallel.py", "test_ranks_give_what_one_gives"): {"DataParallel"},
    ("tests/diff/test_data_parallel.py", "test_mean_over_and_vary_over_have_every_derivative"): {
        "vary_over",
        "mean_over",
    },
    ("tests/diff/test_data_parallel.py", "test_sums_of_rows_are_each_ranks_own_and_waits_for_them_end"): {
        "sum_over"
    },
    ("tests/distributed/test_teams.py", "test_tasks_go_to_teams"): {"team", "typing.Team"},
    ("tests/diff/test_estimate.py", "test_the_whole_loop_takes_what_was_estimated"): {
        "estimate",
        "typing.Estimate",
        "typing.Estimates",
    },
    ("tests/distributed/test_barrier.py", "test_a_barrier_waits_for_all"): {"barrier"},
    ("tests/launch/test_on_loss.py", "test_the_others_go_on_without_one_that_is_stopped_which_is_killed"): {
        "Liveness"
    },
    ("tests/launch/test_launcher.py", "test_results_by_rank_by_host_and_local_rank"): {
        "launch",
        "launching.LaunchResult",
    },
}
"""File and test → the names whose line it checks, which mostly needs more than two workers, or one that dies."""


def lines() -> set[str]:
    """Every name that a table has, but for the kinds of arguments, which end a page."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    pages = [page.partition("\n## `todist.typing`\n")[0] for page in pages]
    cells = re.findall(r"^\| (`[^|]*) \|", "\n".join(pages), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def check(page: str) -> None:
    """Run each check of a page once; the error of one says which line is not kept."""
    for program in {check: name for name, check in CHECKS[page].items()}:
        try:
            program()
        except Exception as error:
            error.add_note(f"by {program.__name__} of tests/docs/promises, for docs/api, {page}")
            raise


@pytest.mark.parametrize("page", sorted(CHECKS.keys() - ON_WORKERS))
def test_what_the_page_says_is_so(page: str) -> None:
    check(page)


def test_what_the_pages_say_of_workers_is_so(world) -> None:
    def body() -> None:
        for page in ON_WORKERS:
            check(page)

    world(2).on_zero(body)


def test_every_line_has_its_test() -> None:
    here = {name for checks in CHECKS.values() for name in checks}
    elsewhere = set().union(*ELSEWHERE.values())
    assert not here & elsewhere
    assert lines() == here | elsewhere
    for file, test in ELSEWHERE:
        assert f"def {test}" in (ROOT / file).read_text("utf-8")
