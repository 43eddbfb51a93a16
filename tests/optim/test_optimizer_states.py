"""States and groups that an ``Optimizer`` is given: those of torch, of another ``lr``, of another optimizer."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch

import torchopt_dist as todist
from tests.optim.table import ROWS
from tests.rows import each_row
from torchopt_dist.optim import optimizer as optimizer_file
from torchopt_dist.schedule import linear_schedule
from torchopt_dist.transform.masked import masked

COUNTING = {
    "SGD": {"momentum": 0.9, "dampening": 0.1},
    "Adam": {},
    "AdamW": {},
    "Adamax": {},
    "RAdam": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adan": {},
}


def leaf(dtype=torch.float64, size=2):
    return torch.ones(size, dtype=dtype, requires_grad=True)


def go(optimizer, w, slopes):
    for slope in slopes:
        w.grad = torch.full_like(w, slope)
        optimizer.step()


def tenth(count):
    return 0.1 + 0 * count


def handed_over(first, second):
    """Eight steps, of which the second optimizer makes four; ``lr`` is its own."""
    w = leaf()
    one = first([w])
    go(one, w, range(1, 5))
    saved = copy.deepcopy(one.state_dict())
    for group in saved["param_groups"]:
        group.pop("lr", None)
    two = second([w])
    two.load_state_dict(saved)
    go(two, w, range(5, 9))
    return w, two


@each_row(("before", "after"), [(0.1, tenth), (tenth, 0.1), (tenth, tenth), (0.1, 0.1)])
@each_row("name", COUNTING)
def test_a_schedule_and_a_number_as_lr_have_the_same_state(name, before, after):
    made = getattr(todist, name)
    w, optimizer = handed_over(
        lambda params: made(params, lr=before, **COUNTING[name]),
        lambda params: made(params, lr=after, **COUNTING[name]),
    )
    unbroken = leaf()
    go(made([unbroken], lr=0.1, **COUNTING[name]), unbroken, range(1, 9))
    torch.testing.assert_close(w, unbroken)
    assert [(key, value.item()) for key, value in optimizer.state[w].items() if "step" in key] == [
        ("step", 8)
    ]


@each_row("name", ["Adam", "AdamW", "Adamax", "RAdam", "Adagrad"])
def test_the_count_of_the_twin_goes_on_under_a_schedule(name):
    ours, theirs = getattr(todist, name), getattr(torch.optim, name)
    w, _ = handed_over(
        lambda params: theirs(params, lr=0.1, **COUNTING[name]),
        lambda params: ours(params, lr=tenth, **COUNTING[name]),
    )
    unbroken = leaf()
    go(theirs([unbroken], lr=0.1, **COUNTING[name]), unbroken, range(1, 9))
    torch.testing.assert_close(w, unbroken)


def test_half_precision_counts_beyond_256_whatever_the_keys_are():
    """A chain of two that count has keys of more than one part, which torch casts to bfloat16."""
    inner = todist.adam(tenth)
    impl = todist.chain(inner, masked(inner, [True]))
    w = leaf(torch.bfloat16)
    optimizer = todist.Optimizer([w], impl)
    go(optimizer, w, [1.0])
    counts = [key for key in optimizer.state[w] if key.endswith("/step")]
    assert len(counts) == 2
    for key in counts:
        optimizer.state[w][key].fill_(300.0)
    other = todist.Optimizer([w], impl)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    go(other, w, [1.0])
    for key in counts:
        count = other.state[w][key]
        assert (count.dtype, count.item(), count.device.type) == (torch.float32, 301.0, "cpu")


def test_counts_stay_on_the_cpu_where_torch_moves_them():
    w = leaf()
    optimizer = torch.optim.Adam([w])
    go(optimizer, w, [1.0])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["capturable"] = True
    elsewhere = torch.nn.Parameter(torch.ones(2, device="meta"))
    other = todist.Adam([elsewhere])
    other.load_state_dict(saved)
    step = other.state[elsewhere]["step"]
    assert (step.device.type, step.item()) == ("cpu", 1)
    assert other.state[elsewhere]["exp_avg"].is_meta


def test_hooks_stand_on_either_side_of_the_counts():
    w, v = leaf(), leaf()
    optimizer = todist.Adam([w, v])
    go(optimizer, w, [1.0] * 3)
    w.grad = None
    go(optimizer, v, [1.0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["decoupled_weight_decay"] = True

    def swap(_, given):
        (group,) = given["param_groups"]
        return {
            "state": {0: given["state"][1], 1: given["state"][0]},
            "param_groups": [{**group, "decoupled_weight_decay": False}],
        }

    seen = []
    other = todist.Adam([w, v])
    other.register_load_state_dict_pre_hook(swap)
    other.register_load_state_dict_post_hook(lambda one: one.state[w]["step"].fill_(7))
    other.register_load_state_dict_post_hook(lambda one: seen.append(one.state[v]["step"].item()))
    for _ in range(2):  # nothing of the first load stays behind
        other.load_state_dict(copy.deepcopy(saved))
    assert (seen, other.state[w]["step"].item(), other.state[v]["step"].item()) == ([3, 3], 7, 3)


REFUSED = [
    ("Adam", "Adam", "decoupled_weight_decay"),
    ("RAdam", "RAdam", "decoupled_weight_decay"),
    ("AdamW", "Adam", "decoupled_weight_decay"),  # is always on in torch's AdamW
]


@each_row(("theirs", "ours", "option"), REFUSED)
def test_what_only_torch_has_is_refused(theirs, ours, option):
    w = leaf()
    given = {} if theirs != ours else {option: True}
    twin = getattr(torch.optim, theirs)([w], **given)
    go(twin, w, [1.0])
    made = getattr(todist, ours)

    class Descendant(made):
        pass

    for kind in (made, Descendant):
        optimizer = kind([w], lr=0.25)
        with pytest.raises(ValueError, match=f"`{option}` must be off, as this {kind.__name__} has no such"):
            optimizer.load_state_dict(twin.state_dict())
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 0.25
        with pytest.raises(ValueError, match=f"`{option}` must be off"):
            optimizer.add_param_group({"params": [leaf()], option: True})
        assert len(optimizer.param_groups) == 1
        with pytest.raises(ValueError, match=f"`{option}` must be off"):
            kind([{"params": [w], option: True}])
    assert not twin.state_dict()["param_groups"][0].get("shared_state")


@each_row("name", [*COUNTING, "RMSprop", "Adadelta"])
def test_what_changes_no_number_is_taken(name):
    made = getattr(todist, name)
    harmless = {"foreach": True, "capturable": True, "differentiable": True, "name": "a"}
    optimizer = made([{"params": [leaf()], **harmless}], lr=0.1, **COUNTING.get(name, {}))
    assert optimizer.param_groups[0]["foreach"] is True
    twin = getattr(torch.optim, name, None)
    if twin is not None:
        w = leaf()
        theirs = twin([w], foreach=True, maximize=True)
        go(theirs, w, [1.0])
        ours = made([w], lr=0.1)
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["maximize"] is True


@each_row("event", ["an option makes a state", "a parameter starts anew"])
def test_a_schedule_goes_on_where_a_parameter_lacks_its_state(event):
    a, b = leaf(size=1), leaf(size=1)
    made = todist.SGD if event == "an option makes a state" else todist.Adam
    optimizer = made([a, b], lr=linear_schedule(1.0, 0.0, 4))
    moved = []
    for step in range(4):
        before = a.item()
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        if step == 2 and made is todist.SGD:
            optimizer.param_groups[0]["momentum"] = 1e-12
        elif step == 2:
            del optimizer.state[b]
        optimizer.step()
        moved.append(before - a.item())
    assert moved == pytest.approx([1.0, 0.75, 0.5, 0.25], rel=1e-6)
    assert optimizer.param_groups[0]["lr_step"].item() == 4


def test_a_group_that_gets_a_schedule_later_starts_it_at_0():
    w = leaf()
    optimizer = todist.SGD([w], lr=0.1, momentum=0.9)
    go(optimizer, w, [1.0])
    optimizer.param_groups[0]["lr"] = tenth
    go(optimizer, w, [1.0])
    assert optimizer.param_groups[0]["lr_step"].item() == 1


def test_a_schedule_waits_while_there_is_a_number(monkeypatch):
    w = leaf()
    optimizer = todist.Adam([w], lr=tenth)
    go(optimizer, w, [1.0, 1.0])
    optimizer.param_groups[0]["lr"] = 0.2
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_file, "begin", None)  # or each step would make a state to throw away
        go(optimizer, w, [1.0])
    optimizer.param_groups[0]["lr"] = tenth
    go(optimizer, w, [1.0])
    assert optimizer.param_groups[0]["lr_step"].item() == 3
    assert optimizer.state[w]["step"].item() == 4


@each_row(
    ("theirs", "ours", "lacking"),
    [
        ("SGD", "Adam", "'exp_avg', 'exp_avg_sq'"),
        ("Adam", "Adamax", "'exp_inf'"),
        ("SGD", "Adagrad", "'sum'"),
    ],
)
@each_row("home", [torch.optim, todist])
def test_the_state_of_another_optimizer_is_refused_at_the_step(home, theirs, ours, lacking):
    w = leaf()
    one = getattr(home, theirs)([w], **({"lr": 0.1, "momentum": 0.9} if theirs == "SGD" else {}))
    go(one, w, [1.0])
    other = getattr(todist, ours)([w], **COUNTING[ours])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    before, kept = w.detach().clone(), sorted(other.state[w])
    with pytest.raises(
        ValueError, match=rf"`state` of a parameter must have all .* lacks \[{lacking}\], got"
    ):
        other.step()
    assert torch.equal(w, before)
    assert sorted(other.state[w]) == kept


def test_a_count_is_made_up_where_torch_has_none():
    """Torch's SGD does not count; with dampening, ours does."""
    w = leaf()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}
    twin = torch.optim.SGD([w], **options)
    go(twin, w, [1.0, 2.0])
    v = w.detach().clone().requires_grad_()
    ours = todist.SGD([v], **options)
    ours.load_state_dict(copy.deepcopy(twin.state_dict()))
    go(twin, w, [3.0])
    go(ours, v, [3.0])
    torch.testing.assert_close(v, w)


@each_row("option", ["dampening", "momentum"])
def test_options_may_be_switched_off_and_on(option):
    """A gradient that comes meanwhile is the first one of its parameter if there is a momentum, to torch and here."""
    columns = []
    for home in (torch.optim, todist):
        a, b = leaf(), leaf()
        optimizer = home.SGD([a, b], lr=0.1, momentum=0.9, dampening=0.3)
        go(optimizer, a, [1.0])
        value = optimizer.param_groups[0][option]
        optimizer.param_groups[0][option] = 0.0
        go(optimizer, b, [1.0])
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0][option] = value
        go(optimizer, b, [2.0])
        go(optimizer, a, [3.0])
        columns.append([a, b])
    torch.testing.assert_close(columns[1], columns[0])


@each_row("option", [{"momentum": 0.5}, {"momentum": 0}, {"max_norm": 1.0}])
def test_an_optimizer_of_a_transformation_refuses_options_of_a_group(option):
    impl, (name, value) = todist.sgd(1.0), *option.items()
    message = f"`{name}` must not be set for a group, as `impl` has its options already, got {value}"
    with pytest.raises(ValueError, match=message):
        todist.Optimizer([{"params": [leaf()], **option}], impl)
    optimizer = todist.Optimizer([{"params": [leaf()], "name": "first"}], impl)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [leaf()], **option})
    optimizer.add_param_group({"params": [leaf()], "foreach": None})
    assert [group.get("name") for group in optimizer.param_groups] == ["first", None]


def test_clipping_is_by_group():
    """As the docs say, and one group for all parameters is ``clip_grad_norm_``."""
    impl = todist.chain(todist.transform.clip_grad_norm(1.0), todist.sgd(1.0))
    for grouped, expected in ((False, [-0.6, -0.8]), (True, [-1.0, -1.0])):
        params = [torch.zeros(1, requires_grad=True) for _ in range(2)]
        optimizer = todist.Optimizer([{"params": [p]} for p in params] if grouped else params, impl)
        for p, slope in zip(params, (3.0, 4.0), strict=True):
            p.grad = torch.tensor([slope])
        optimizer.step()
        assert [p.item() for p in params] == pytest.approx(expected, abs=1e-5)


IN_TORCH = [name for name, row in ROWS.items() if row.twin is getattr(torch.optim, name, None)]
TWINS = [(name, options) for name in IN_TORCH for options in ROWS[name].options.values()]


@each_row(("name", "options"), TWINS)
def test_states_go_to_torch_and_back(name, options):
    """Three steps here, three in torch, three here again are nine in torch."""
    options = {key: value for key, value in options.items() if key != "fused"}
    made = {todist: getattr(todist, name), torch.optim: getattr(torch.optim, name)}
    w, unbroken, saved = leaf(), leaf(), None
    for number, home in enumerate((todist, torch.optim, todist)):
        optimizer = made[home]([w], **({"lr": 0.5} if name == "SGD" else {}))
        if saved is not None:
            optimizer.load_state_dict(saved)
        else:
            optimizer.param_groups[0].update(options)
        go(optimizer, w, range(1 + 3 * number, 4 + 3 * number))
        saved = copy.deepcopy(optimizer.state_dict())
    go(made[torch.optim]([unbroken], **options), unbroken, range(1, 10))
    torch.testing.assert_close(w, unbroken)
    if name != "SGD":  # torch's does not count
        assert [state["step"].item() for state in saved["state"].values()] == [9]


@each_row(
    ("name", "options"),
    [
        *((name, {}) for name in IN_TORCH),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ],
)
def test_a_state_goes_to_torch_if_a_parameter_has_had_no_gradient(name, options):
    a, b = leaf(), leaf()
    options = {"lr": 0.1, **options}
    ours = getattr(todist, name)([a, b], **options)
    go(ours, a, [1.0])
    theirs = getattr(torch.optim, name)([a, b], **options)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    go(theirs, b, [1.0])
    x, y = leaf(), leaf()
    unbroken = getattr(torch.optim, name)([x, y], **options)
    unbroken.load_state_dict({**theirs.state_dict(), "state": {}})
    go(unbroken, x, [1.0])
    go(unbroken, y, [1.0])
    torch.testing.assert_close([a, b], [x, y])
    again = getattr(todist, name)([a, b], **options)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    with torch.no_grad():
        b.copy_(leaf())
    go(again, b, [1.0])
    torch.testing.assert_close(b, y)


def test_steps_are_counted_by_parameter_where_torch_wants_that():
    a, b = leaf(), leaf()
    optimizer = todist.RMSprop([a, b])
    go(optimizer, a, [1.0, 1.0])
    go(optimizer, b, [1.0])
    assert [optimizer.state[p]["step"].item() for p in (a, b)] == [3, 1]


def test_adamw_is_not_taken_for_adam():
    w = leaf()
    for home in (todist, torch.optim):
        saved = home.AdamW([w]).state_dict()
        assert saved["param_groups"][0]["decoupled_weight_decay"] is True
        with pytest.raises(
            ValueError, match=r"`decoupled_weight_decay` must be off, as this Adam .* got True"
        ):
            todist.Adam([w]).load_state_dict(saved)
        todist.AdamW([w]).load_state_dict(saved)
        saved = home.Adam([w]).state_dict()
        assert saved["param_groups"][0]["decoupled_weight_decay"] is False
        with pytest.raises(
            ValueError, match=r"`decoupled_weight_decay` must be on, as this AdamW .* got False"
        ):
            todist.AdamW([w]).load_state_dict(saved)
        todist.Adam([w]).load_state_dict(saved)


@each_row("name", IN_TORCH)
def test_what_only_torch_s_constructor_has_is_taken_where_it_changes_no_number(name):
    ours, theirs = getattr(todist, name), getattr(torch.optim, name)
    only = {
        key: parameter.default
        for key, parameter in inspect.signature(theirs).parameters.items()
        if key not in inspect.signature(ours).parameters
    }
    group = ours([leaf()], lr=0.1, **only).param_groups[0]
    assert {key: group[key] for key in only} == only
    assert "foreach" in only
    ours([leaf()], lr=0.1, foreach=True)
    for option in {"decoupled_weight_decay"} & only.keys():
        with pytest.raises(ValueError, match=f"`{option}` must be off, as this {name} has no such option"):
            ours([leaf()], lr=0.1, **{option: True})
    with pytest.raises(ValueError, match=f"`differentiable` must be off, got True: Meta{name} makes steps"):
        ours([leaf()], lr=0.1, differentiable=True)
    with pytest.raises(TypeError, match=f"{name}: got an unexpected keyword argument 'forech'"):
        ours([leaf()], lr=0.1, forech=True)


@each_row("dtype", [torch.float64, torch.bfloat16])
@each_row("name", ROWS)
def test_the_state_follows_a_module_that_is_converted(name, dtype):
    """As if the state had been saved, and loaded into an optimizer of the converted module."""
    row = ROWS[name]
    options = list(row.options.values())[-1]
    nets = [torch.nn.Linear(3, 2, bias=False) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [row.plain(net.parameters(), **options) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        go(optimizer, net.weight, [0.5, -1.0])
        net.to(dtype)
    saved, optimizers[1] = optimizers[1].state_dict(), row.plain(nets[1].parameters(), **options)
    optimizers[1].load_state_dict(saved)
    for net, optimizer in zip(nets, optimizers, strict=True):
        go(optimizer, net.weight, [2.0, 1.0])
    assert torch.equal(nets[0].weight, nets[1].weight)
    for key, value in optimizers[0].state[nets[0].weight].items():
        assert value.dtype is (torch.float32 if key == "step" else dtype), key


def test_a_parameter_stays_real_or_complex():
    w = leaf(torch.float32)
    optimizer = todist.Adam([w])
    go(optimizer, w, [1.0])
    w.grad = None
    w.data = w.data.to(torch.complex64)
    message = r"'exp_avg' of parameter 0 of its group has torch\.float32, .* needs torch\.complex64 now"
    with pytest.raises(ValueError, match=message):
        go(optimizer, w, [1.0])


@each_row("name", ROWS)
def test_shared_states_are_overwritten(name):
    """Where a step made new tensors, other processes would look at old ones."""
    row = ROWS[name]
    options = list(row.options.values())[-1]
    (w, shared), (v, plain) = ((p, row.plain([p], **options)) for p in (leaf(), leaf()))
    shared.share_memory()
    held = dict(shared.state[w])
    for optimizer, p in ((shared, w), (plain, v)):
        go(optimizer, p, [1.0, -0.5, 2.0])
    assert torch.equal(w, v)
    assert held.keys() == plain.state[v].keys()
    for key, tensor in held.items():
        assert tensor.is_shared()
        assert shared.state[w][key] is tensor
        assert torch.equal(tensor, plain.state[v][key])


def _three_steps(optimizer, w):
    go(optimizer, w, [1.0, -0.5, 2.0])


def test_a_process_that_is_forked_moves_the_shared_state():
    w, v = leaf().detach().share_memory_().requires_grad_(), leaf()
    shared, plain = todist.Adamax([w]), todist.Adamax([v])
    shared.share_memory()
    process = torch.multiprocessing.get_context("fork").Process(target=_three_steps, args=(shared, w))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    _three_steps(plain, v)
    assert torch.equal(w, v)
    for key, value in shared.state[w].items():
        assert torch.equal(value, plain.state[v][key]), key


SHAPES = [(3, 2), (3,), (), (2, 3, 2), (1, 1), (1,), (2, 1, 2, 2)]
MIXED = [*TWINS, ("Adafactor", {}), ("Adafactor", {"weight_decay": 0.1, "eps": (1e-3, 1e-2)}), ("Muon", {})]


def two_groups(name):
    """Parameters of many shapes in two groups, from the same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (2, 4), (1, 1)] if name == "Muon" else SHAPES
    params = [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]
    return params, [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]


def some_steps(optimizer, params, slopes):
    for slope in slopes:
        for p in params:
            p.grad = torch.full_like(p, slope) + 0.1 * p.detach()
        optimizer.step()


@each_row("first", [torch.optim, todist])
@each_row(("name", "options"), MIXED)
def test_states_of_many_shapes_and_groups_go_both_ways(name, options, first):
    """Each parameter keeps what torch keeps of one of its shape, under torch's names."""
    options = {"lr": 0.1, **{key: value for key, value in options.items() if key != "fused"}}
    params, groups = two_groups(name)
    homes = (first, todist if first is torch.optim else torch.optim, first)
    saved = None
    for number, home in enumerate(homes):
        optimizer = getattr(home, name)(groups, **options)
        if saved is not None:
            optimizer.load_state_dict(saved)
            if home is todist:
                before = [set(group) for group in saved["param_groups"]]
                ours = [set(group) for group in getattr(todist, name)(groups, **options).param_groups]
                after = [set(group) for group in optimizer.state_dict()["param_groups"]]
                assert [a - b for a, b in zip(after, before, strict=True)] == [
                    a - b for a, b in zip(ours, before, strict=True)
                ]
        some_steps(optimizer, params, [1.0 + number, -0.5, 0.25 * number])
        saved = copy.deepcopy(optimizer.state_dict())
        groups = [{"params": group["params"]} for group in groups]
    unbroken, groups = two_groups(name)
    twin = getattr(torch.optim, name)(groups, **options)
    for number in range(3):
        some_steps(twin, unbroken, [1.0 + number, -0.5, 0.25 * number])
    close = {"rtol": 0.03, "atol": 0.03} if name == "Muon" else {}  # torch's orthogonalizes in bfloat16
    torch.testing.assert_close(params, unbroken, **close)
    for index, theirs in twin.state_dict()["state"].items():
        mine = saved["state"][index]
        assert theirs.keys() <= mine.keys() <= theirs.keys() | {"step"}
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, **close)


@each_row("name", [*IN_TORCH, "Adafactor", "Muon"])
def test_a_count_that_was_saved_as_a_number_goes_on(name):
    """Torch did so before 1.12, and its classes still load it."""
    ends = []
    for home in (torch.optim, todist):
        w = leaf(size=(2, 2))
        optimizer = getattr(home, name)([w], lr=0.1)
        go(optimizer, w, [1.0, 2.0])
        saved = copy.deepcopy(optimizer.state_dict())
        for held in saved["state"].values():
            if "step" in held:
                held["step"] = int(held["step"])
        optimizer = getattr(home, name)([w], lr=0.1)
        optimizer.load_state_dict(saved)
        go(optimizer, w, [3.0])
        ends.append(w)
    torch.testing.assert_close(*ends, **({"rtol": 0.03, "atol": 0.03} if name == "Muon" else {}))


@each_row("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.1}])
def test_entries_of_the_users_stay_as_they_are(options):
    ends = []
    for home in (torch.optim, todist):
        w = leaf()
        optimizer = home.SGD([w], **options)
        optimizer.state["epoch"] = 3
        optimizer.state[w]["mark"] = 5
        go(optimizer, w, [1.0, 2.0])
        saved = copy.deepcopy(optimizer.state_dict())
        assert (saved["state"]["epoch"], saved["state"][0]["mark"]) == (3, 5)
        again = home.SGD([w], **options)
        again.load_state_dict(saved)
        go(again, w, [3.0])
        assert (again.state["epoch"], again.state[w]["mark"]) == (3, 5)
        again.load_state_dict(again.state_dict())
        if home is todist:
            again.share_memory()
        ends.append(w.detach())
    torch.testing.assert_close(*ends)


@each_row("name", [*IN_TORCH, "Adafactor", "Muon"])
def test_defaults_are_torchs(name):
    """Whatever both have, so that a program of torch's computes the same here."""
    ours, theirs = (inspect.signature(getattr(home, name)).parameters for home in (todist, torch.optim))
    same = (ours.keys() & theirs.keys()) - {"params", "foreach", "fused"}
    assert "lr" in same
    assert {key: ours[key].default for key in same} == {key: theirs[key].default for key in same}


@each_row("by", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@each_row("name", ROWS)
def test_a_group_gains_no_option_by_being_saved_and_loaded(name, by):
    optimizer = ROWS[name].plain([leaf()], lr=0.1)
    before = [set(group) for group in optimizer.param_groups]
    other = by(optimizer)
    other.load_state_dict(other.state_dict())
    assert [set(group) for group in other.param_groups] == before
    other.add_param_group({"params": [leaf()]})
    assert set(other.param_groups[1]) == before[0]
