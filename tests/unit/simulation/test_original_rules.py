"""The original's rules, as its controller had them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from simulation.original_rules import ClusterTotals, Trainers, original_plan


def trainers(name: str, least: int, most: int, wanted: int, **asks: int) -> Trainers:
    """Return a job's trainers, of one GPU each unless told otherwise."""
    return Trainers(name=name, min=least, max=most, wanted=wanted, **(asks or {"gpu": 1}))


def of_gpus(gpus: int, *jobs: Trainers, max_load: float = 1.0) -> dict[str, int]:
    """Return how many each job is to have in a cluster in which nobody else asks for GPUs."""
    survey = ClusterTotals(
        gpu=gpus, gpu_asked=sum(job.gpu * job.wanted for job in jobs), memory=1, nodes={"node": (0, 1)}
    )
    return dict(original_plan(jobs, survey, max_load=max_load).wanted)


def test_it_does_not_end_with_gpus_at_its_own_maximum_load() -> None:
    """10 GPUs, 9 of them used, load 0.97: one is given because it is free, and taken because 10 are more than 9.7."""
    survey = ClusterTotals(gpu=10, gpu_asked=9, memory=1, nodes={"node": (0, 1)})
    found = original_plan([trainers("trains", 1, 10, 9)], survey, max_load=0.97)
    assert not found.ends
    assert found.wanted == {"trains": 9}
    assert original_plan([trainers("trains", 1, 10, 9)], survey, max_load=1.0).ends


def test_the_least_fulfilled_grows_first() -> None:
    """Fulfillment is what a job has beyond its minimum, as a part of what it could have."""
    assert of_gpus(7, trainers("a", 2, 6, 4), trainers("b", 0, 8, 2)) == {"a": 4, "b": 3}


def test_all_shrink_in_turn_down_to_their_minimums() -> None:
    """As far as it takes and no further, the most fulfilled first; never below a minimum."""
    assert of_gpus(6, trainers("a", 2, 8, 8), trainers("b", 2, 4, 3)) == {"a": 4, "b": 2}
    assert of_gpus(3, trainers("a", 2, 8, 8), trainers("b", 2, 4, 3)) == {"a": 2, "b": 2}


def test_cpus_leave_what_the_maximum_load_leaves() -> None:
    """With CPUs both directions have the same limit, so they end: the jobs of its tutorial at a load of 0.9."""
    jobs = [
        trainers("example", 2, 10, 10, cpu=36),
        trainers("example1", 2, 8, 8, cpu=40),
        trainers("example2", 4, 4, 4, cpu=108),
    ]
    asked = 184 + sum(job.cpu * job.wanted for job in jobs)
    found = original_plan(
        jobs, ClusterTotals(cpu=1000, cpu_asked=asked, memory=1, nodes={"node": (1000 - asked, 0)}), max_load=0.9
    )
    assert found.ends
    assert found.wanted == {"example": 5, "example1": 2, "example2": 4}


def test_a_trainer_needs_one_node_with_its_cpus_idle() -> None:
    """A cluster that has enough in sum is not enough."""
    jobs = [trainers("a", 1, 2, 1, cpu=500)]
    spread = ClusterTotals(cpu=2000, cpu_asked=500, memory=1, nodes={"one": (400, 0), "two": (400, 0)})
    assert original_plan(jobs, spread).wanted == {"a": 1}
    assert original_plan(jobs, ClusterTotals(cpu=2000, cpu_asked=500, memory=1, nodes={"one": (500, 0)})).wanted == {
        "a": 2
    }


def test_some_memory_has_to_be_left_free() -> None:
    """A trainer that would take all that is left does not come."""
    jobs = [trainers("a", 1, 4, 1, memory=100)]
    assert original_plan(
        jobs, ClusterTotals(memory=300, memory_asked=100, nodes={"node": (0, 200)}), max_load=1
    ).wanted == {"a": 2}
    assert original_plan(
        jobs, ClusterTotals(memory=301, memory_asked=100, nodes={"node": (0, 201)}), max_load=1
    ).wanted == {"a": 3}


def test_a_trainer_that_does_not_come_takes_nothing_of_a_node() -> None:
    """One that the load keeps away leaves the node's CPUs to a smaller one after it."""
    jobs = [trainers("large", 1, 9, 1, cpu=500), trainers("small", 0, 2, 1, cpu=100)]
    survey = ClusterTotals(cpu=1000, cpu_asked=600, memory=1, nodes={"node": (500, 0)})
    assert original_plan(jobs, survey, max_load=0.9).wanted == {"large": 1, "small": 2}


def test_it_ends_once_a_node_has_no_cpu_left_for_what_it_gives_and_takes() -> None:
    """What it takes from a node in its dry run it does not give back."""
    survey = ClusterTotals(gpu=10, gpu_asked=9, cpu=9000, cpu_asked=900, memory=1, nodes={"node": (250, 0)})
    found = original_plan([trainers("trains", 1, 10, 9, gpu=1, cpu=100)], survey, max_load=0.97)
    assert found.ends
    assert (found.wanted, found.rounds) == ({"trains": 9}, 3)


JOBS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(0, 12)), max_size=5)


@given(JOBS, st.integers(0, 30), st.sampled_from([0.5, 0.9, 0.97, 1.0]))
def test_it_is_kept_from_going_on_for_ever(jobs: list[tuple[int, int, int]], gpus: int, load: float) -> None:
    """On any input it ends here, and says whether it would have in the original."""
    asked = [trainers(f"job-{n}", least, least + more, wanted) for n, (least, more, wanted) in enumerate(jobs)]
    survey = ClusterTotals(gpu=gpus, gpu_asked=sum(job.wanted for job in asked), memory=1, nodes={"node": (0, 1)})
    found = original_plan(asked, survey, max_load=load)
    assert found.ends or load < 1.0
    for job in asked:
        if job.min < job.max:
            assert min(job.min, job.wanted) <= found.wanted[job.name] <= max(job.max, job.wanted)
