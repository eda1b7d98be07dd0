"""A search closes by itself, for every arm by one rule, and takes nothing that strayed."""

import math

import pytest

from oelm.study.search import Axis, Closing, choose_from_grid, explore


def closing(start=4e-3, tie=0.0, **bounds):
    return Closing(over={"train.lr": Axis(start=start, factor=2, **bounds)}, tie=tie)


def walk(search, loss):
    """Measures whatever the search asks for, round by round: (choice, points in the order in which they came up)."""
    results, order = {}, []
    while True:
        wanted, choice = explore(search, results)
        new = [point for point in wanted if point not in results]
        if not new:
            return choice, order
        assert choice is None
        order += new
        results |= {point: loss(*point) for point in new}


def bowl(best, width=0.05):
    """Two seeds, 0.01 apart, with the lowest loss at `best`."""
    return lambda lr: [3 + width * math.log2(lr / best) ** 2 + seed for seed in (0.0, 0.01)]


@pytest.mark.parametrize("best", [2.5e-4, 1e-3, 4e-3, 3.2e-2])
def test_the_search_goes_where_the_optimum_is_and_stops_when_it_is_enclosed(best):
    choice, tried = walk(closing(), bowl(best))
    assert choice.best == (best,)
    assert choice.edge is None
    rates = sorted(lr for (lr,) in tried)
    assert rates.index(best) not in (0, len(rates) - 1)
    assert tried[:3] == [(4e-3,), (2e-3,), (8e-3,)]  # the start and its neighbours, for every arm
    assert len(rates) <= 3 + abs(math.log2(best / 4e-3))  # no more than it takes


def test_a_stated_bound_ends_the_search_and_is_said():
    choice, tried = walk(closing(high=1.6e-2), bowl(1.0))
    assert (choice.best, choice.edge) == ((1.6e-2,), "highest")
    assert max(tried) == (1.6e-2,)
    choice, tried = walk(closing(), bowl(1e-9))
    assert (choice.best, choice.edge, len(tried)) == ((4e-3 / 2**6,), "lowest", 8)


def test_a_rate_that_diverges_or_at_which_a_seed_strays_is_out_and_encloses_the_optimum():
    def wild(lr):
        return [2.0, None] if lr > 1.7e-2 else [2.0, 2.5] if lr > 9e-3 else bowl(1.0)(lr)

    choice, _ = walk(closing(), wild)
    assert (choice.best, choice.edge) == ((8e-3,), None)
    assert choice.out == {(1.6e-2,): "a seed strays"}
    choice, _ = walk(closing(start=3.2e-2), wild)
    assert choice.best == (8e-3,)
    assert choice.out == {(1.6e-2,): "a seed strays", (3.2e-2,): "diverged", (6.4e-2,): "diverged"}


def test_where_everything_diverges_nothing_is_chosen():
    choice, tried = walk(closing(low=1e-3), lambda lr: [None, 2.0])
    assert choice is None
    assert min(tried) == (1e-3,)


def test_near_ties_go_to_the_lower_rate_whose_neighbours_are_then_tried():
    losses = {1e-3: 3.1, 2e-3: 3.006, 4e-3: 3.004, 8e-3: 3.0, 1.6e-2: 3.1}
    choice, tried = walk(closing(tie=0.005), lambda lr: [losses[lr], losses[lr]])
    assert choice.best == (4e-3,)  # 2e-3 is further from the best than a tie
    choice, tried = walk(closing(tie=0.01), lambda lr: [losses[lr], losses[lr]])
    assert choice.best == (2e-3,)
    assert (1e-3,) in tried


def test_a_tie_at_the_end_of_what_was_tried_is_not_closed():
    losses = {2e-3: 3.1, 4e-3: 3.004, 8e-3: 3.0, 1.6e-2: 2.9, 3.2e-2: 3.2}
    choice, tried = walk(closing(tie=0.005), lambda lr: [losses[lr], losses[lr]])
    assert choice.best == (1.6e-2,)  # the lower of the two that tied would have hidden it
    assert (3.2e-2,) in tried
    choice, _ = walk(closing(tie=0.005, high=8e-3), lambda lr: [losses[lr], losses[lr]])
    assert (choice.best, choice.edge) == ((4e-3,), "highest")  # the best one lies at the bound, and that is said


def test_several_keys_are_searched_together():
    search = Closing(over={"train.lr": Axis(start=4e-3), "model.init_std": Axis(start=0.02, factor=1.5)}, tie=0.0)

    def valley(lr, std):  # the best rate depends on the start: one key after the other would miss it
        a, b = math.log2(lr / 1.6e-2), math.log(std / 0.045) / math.log(1.5)
        return [a * a + b * b - 1.2 * a * b] * 2

    choice, _ = walk(search, valley)
    assert choice.best == (1.6e-2, 0.045)
    assert str(choice) == "lr 0.016, init_std 0.045"


@pytest.mark.parametrize("keys", [("train.lr", "model.init_std"), ("model.init_std", "train.lr")])
def test_near_ties_go_to_the_lower_rate_whichever_key_is_named_first(keys):
    search = Closing(over={key: Axis(start=1.0) for key in keys}, tie=0.01)
    rate = keys.index("train.lr")

    def slope(*point):  # a higher start is as good as a lower rate, but for less than the tie
        lr, std = math.log2(point[rate]), math.log2(point[1 - rate])
        return [(lr + std) ** 2 + 0.5 * (lr - std - 1) ** 2] * 2

    choice, _ = walk(search, slope)
    assert choice.best[rate] == 1.0
    assert choice.best[1 - rate] == 1.0


@pytest.mark.parametrize(
    ("table", "best", "edge"),
    [
        ({3e-3: [2.0, 2.2], 1e-3: [1.0, 1.1], 3e-4: [1.5, 1.4]}, 1e-3, None),
        ({3e-3: [2.0], 1e-3: [1.6], 3e-4: [1.5]}, 3e-4, "lowest"),
        ({3e-3: [1.0], 1e-3: [1.6], 3e-4: [1.5]}, 3e-3, "highest"),
        ({1e-3: [1.6]}, 1e-3, "only"),
        ({3e-3: [1.0], 1e-3: [1.0], 3e-4: [1.5]}, 1e-3, None),  # a tie goes to the lower learning rate
        ({3e-3: [None], 1e-3: [1.0], 3e-4: [1.5]}, 1e-3, None),  # what failed beyond it encloses it
        ({1e-3: [1.0], 3e-4: [None]}, 1e-3, "highest"),  # nothing above was tried
    ],
)
def test_a_grid_gives_its_best_rate_and_says_when_it_is_an_end(table, best, edge):
    choice = choose_from_grid({(lr,): values for lr, values in table.items()})
    assert (choice.best, choice.edge) == ((best,), edge)
    assert list(choice.sound) == sorted((lr,) for lr, values in table.items() if None not in values)
