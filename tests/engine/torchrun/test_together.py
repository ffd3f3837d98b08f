"""The torch engine in several processes: the same numbers as in the threads engine, on every process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import processes
import pytest

pytestmark = pytest.mark.dist

TOGETHER = """
import copy, io, json, os, warnings
import plain, torch
from torch import nn
import pipelab
from pipelab import Pipeline

mse = nn.functional.mse_loss
rank = int(os.environ["RANK"])
ROWS = 13  # which the micro-batches do not divide


NORMS = (2.0, "inf", 0.0, -1.0, 3.5)


def say(**facts):
    print(json.dumps(facts))


def train(pipe, optimizer, numbers):
    losses = []
    for number in numbers:
        x, y = plain.batch(ROWS, seed=number)
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, y).loss))
        losses.append(float(pipe.clip_grad_norm_(0.5, NORMS[number])))
        optimizer.step()
    return losses


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def close(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in ours)


# [1] five steps of Adam, with a break: saved after three, and taken up again by another pipeline
for schedule in (pipelab.OneFOneB(4, 5), pipelab.ZBV(4, 8)):
    plan = schedule.plan()
    model = plain.mlp(2 * plan.stages)
    twin = copy.deepcopy(model)
    with Pipeline(twin, plan, mse) as pipe:
        expected = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(5))
    with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        losses = train(pipe, optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": pipe.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = plain.mlp(2 * plan.stages, seed=7)
    again.load_state_dict(saved["model"])
    with Pipeline(again, plan, mse, engine="torch", timeout=60) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        optimizer.load_state_dict(saved["optimizer"])
        losses += train(pipe, optimizer, [3, 4])
        state = pipe.state_dict()
    say(case="adam", plan=plan.name, losses=losses, expected=expected, parameters=same(state, twin.state_dict()))

# [2] what else is the same bit for bit
plan = pipelab.Interleaved1F1B(4, 8).plan()
model = plain.mlp(2 * plan.stages)
twin = copy.deepcopy(model)
x, y = plain.batch(ROWS)
with Pipeline(twin, plan, mse) as pipe:
    theirs = pipe.step(x, y)
gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    ours = pipe.step(x, y)
    here = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    try:
        outputs = "same" if torch.equal(ours.outputs, theirs.outputs) else "others"
    except pipelab.EngineError as error:
        outputs = str(error)
    forward = pipe.forward(x)
    proof = pipe.verify(x, y)
    say(
        case="bits",
        held=list(pipe.engine.local_stages),
        parameters=sum(1 for _ in pipe.parameters()),
        loss=torch.equal(ours.loss, theirs.loss),
        gradients=all(torch.equal(gradient, gradients[name]) for name, gradient in here.items()),
        names=sorted(here),
        outputs=outputs,
        forward=torch.equal(forward, theirs.outputs),
        exact=proof.exact,
        compared=proof.parameters,
        whole=proof.whole_batch_difference < 1e-6,
    )
    trace = ours.trace
    transfers = {(str(each.giver), str(each.needer)): each for each in trace.transfers}
    say(
        case="trace",
        rows=[" ".join(str(event.action) for event in trace.events_of(rank)) for rank in range(4)],
        after=all(event.start < event.end for event in trace.events),
        note=trace.note,
        lanes=trace.lanes,
        transfers=len(transfers),
        takes_time=min(each.end - each.start for each in trace.transfers),
        before_its_needer=all(
            each.end <= next(event.start for event in trace.events if event.action == each.needer) + 1e-9
            for each in trace.transfers
        ),
        makespan=trace.makespan,
    )

# [3] stages that give several tensors, of several types, over the wire
def same(ours, theirs):
    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)


class Two(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.linear, self.aside, self.sometimes, self.first = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), first

    def forward(self, given):
        x, seen = (given, torch.zeros(len(given), dtype=torch.int64)) if self.first else (given["x"], given["seen"])
        if not self.first and x.sum() > 0:
            x = x + given["sometimes"]
        more = {"aside": self.aside(x), "sometimes": self.sometimes(x)}  # the next stage uses it never, and not always
        return {"x": self.linear(x), "seen": seen + 1, "skip": x, **more}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        assert bool((given["seen"] == 3).all())
        return self.linear(given["x"]) + given["skip"]


torch.manual_seed(0)
stages = [Two(True), Two(False), Two(False), Last()]
twins = copy.deepcopy(stages)
plan = pipelab.ZBH1(4, 4).plan()
with Pipeline(twins, plan, mse) as pipe:
    theirs = pipe.step(x, y)
with Pipeline(stages, plan, mse, engine="torch", timeout=60) as pipe:
    ours = pipe.step(x, y)
    state = pipe.state_dict()
here = dict(stages[rank].named_parameters())
there = dict(twins[rank].named_parameters())
say(
    case="trees",
    loss=torch.equal(ours.loss, theirs.loss),
    gradients=all(same(here[name].grad, there[name].grad) for name in here),
    none=[name for name in here if here[name].grad is None],
    keys=list(state)[:2],
)

# tensors of any type
class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 48)

    def forward(self, x):
        made = self.linear(x)
        first, *rest = (piece.contiguous() for piece in made.chunk(3, dim=-1))
        small, whole = made.detach().to(torch.float8_e4m3fn), (made.detach().abs() * 10).to(torch.uint16)
        return first, rest, made[:, :1].repeat(1, 16), torch.complex(made, made), small, whole


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 6)

    def forward(self, given):
        first, (second, third), same, phases, small, whole = given
        scores = torch.softmax(first @ second.t(), dim=-1) @ third + same.sum(-1, keepdim=True) / 100
        made = self.linear(scores + phases.imag.sum(-1, keepdim=True) + small.float().sum(-1, keepdim=True) / 1e3)
        return made + whole.float().mean(), small


plan, found = pipelab.replicate(pipelab.OneFOneB(2, 3), 2).plan(), []
for engine in ("threads", "torch"):
    torch.manual_seed(0)
    stages = [Gives(), Takes()]
    with Pipeline(stages, plan, lambda made, y: mse(made[0], y), engine=engine, timeout=60) as pipe:
        pipe.step(x, y)
        made = pipe.forward(x)
    found.append(([p.grad for p in stages[rank % 2].parameters()], made))
say(
    case="kinds",
    gradients=[torch.equal(*both) for both in zip(found[0][0], found[1][0])],
    made=[torch.equal(one.float(), other.float()) for one, other in zip(found[0][1], found[1][1])],
    dtype=str(found[1][1][1].dtype),
)

# no gradient comes back through a stage that cuts it off: what is before has none, rather than zeros
class Cut(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


class CutsOne(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x.detach() if self.calls == 2 else x)


class UsesInOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.other, self.calls = nn.Linear(6, 6), nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        return self.other(x) if self.calls == 2 else self.linear(x)


some = [nn.Linear(6, 6), nn.Linear(6, 6), Cut(6, 6), nn.Linear(6, 6)]
for schedule in (pipelab.ZBH1(4, 4), pipelab.Interleaved1F1B(4, 4), pipelab.replicate(pipelab.GPipe(2, 4), 2)):
    found = []
    cut = schedule.plan()
    for engine in ("threads", "torch"):
        stages = [copy.deepcopy(each) for each in (some[1:3] if cut.stages == 2 else some * (cut.stages // 4))]
        with Pipeline(stages, cut, mse, engine=engine, timeout=60) as pipe:
            for _ in range(2):  # the second step finds gradients of the first
                pipe.step(x, y)
            held = {stage for stage, ranks in cut.replicas.items() if rank in ranks}
        found.append({f"{stage} {n}": p.grad for stage in held for n, p in stages[stage].named_parameters()})
    say(
        case="cut",
        none=sorted(name for name, gradient in found[1].items() if gradient is None),
        expected=sorted(name for name, gradient in found[0].items() if gradient is None),
        gradients=all(g is found[0][name] or torch.allclose(g, found[0][name]) for name, g in found[1].items()),
    )

# nor through one that cuts off a micro-batch
found = []
for engine in ("threads", "torch"):
    torch.manual_seed(0)
    stages, steps = [nn.Linear(6, 6), UsesInOne(), CutsOne(6, 6), nn.Linear(6, 6)], []
    stages[0].weight.register_post_accumulate_grad_hook(lambda weight: steps.append(1))
    with Pipeline(stages, pipelab.GPipe(4, 4), mse, engine=engine, timeout=60) as pipe:
        pipe.forward(x)
        for stage in stages:
            stage.calls = -2 if engine == "torch" else 0  # two sizes: their shapes are learnt by a forward each
        pipe.step(x, y)
    found.append(([p.grad for p in stages[rank].parameters()], len(steps)))
say(
    case="cut one",
    gradients=[ours is theirs or torch.equal(ours, theirs) for theirs, ours in zip(found[0][0], found[1][0])],
    none=[gradient is None for gradient in found[1][0]],
    steps=[found[0][1], found[1][1]],
)

# values lie in memory as they do in the threads engine, and the backwards of a frozen stage keep their place
class Turns(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.linear = nn.Linear(48, 48).requires_grad_(not frozen)

    def forward(self, x):
        return self.linear(x).transpose(1, 2)


plan = pipelab.OneFOneB(4, 4).plan()
squares = torch.randn(2, 8, 48, 48, generator=torch.Generator().manual_seed(0))
found = []
for engine in ("threads", "torch"):
    torch.manual_seed(0)
    stages = [Turns(frozen=stage == 0) for stage in range(4)]
    with Pipeline(stages, plan, mse, engine=engine, timeout=60) as pipe:
        trace = pipe.step(*squares).trace
    found.append(stages[rank].linear)
ended = {(event.rank, str(event.action)): event.end for event in trace.events}
begun = {(event.rank, str(event.action)): event.start for event in trace.events}
say(
    case="layout",
    same=rank == 0 or all(torch.equal(*both) for both in zip(*([p.grad for p in each.parameters()] for each in found))),
    frozen=all(parameter.grad is None for parameter in stages[0].parameters()),
    early=[f"0B{m}" for m in range(4) if begun[0, f"0B{m}"] < ended[1, f"1B{m}"] - 1e-6],
)
plan = pipelab.ZBH1(4, 4).plan()

# what a stage keeps beside its parameters comes along, whatever it is
class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.calls = nn.Embedding(9, 6, sparse=True), 0
        self.register_buffer("small", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(1, 6).expand(4, 6))
        self.register_buffer("mean", None)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, calls):
        self.calls = calls

    def forward(self, x):
        self.calls += 1
        self.small += 1
        self.phases += 1j
        self.mean = x.detach().mean(0) if self.mean is None else self.mean + 1
        return x + self.table((x[:, 0] > 0).long()) * self.mask[0]


stages = [Keeps(), Keeps(), Keeps(), Keeps()]
with Pipeline(stages, plan, mse, engine="torch", timeout=60) as pipe:
    pipe.step(x, y)
    own = {name: value.clone() for name, value in stages[rank].named_buffers()}
    state = pipe.state_dict()
    say(
        case="state",
        small=[state[f"{stage}.small"].tolist() for stage in range(4)],
        phases=[state[f"{stage}.phases"][0].imag.item() for stage in range(4)],
        own=all(torch.equal(value, state[f"{rank}.{name}"]) for name, value in own.items()),
        calls=[state[f"{stage}._extra_state"] for stage in range(4)],
        exact=pipe.verify(x, y).exact,
    )

# [4] two replicas of two ranks: a mesh
plan = pipelab.replicate(pipelab.OneFOneB(2, 4), 2).plan()
try:
    Pipeline([nn.BatchNorm1d(6), nn.Linear(6, 6)], plan, mse, engine="torch")
except pipelab.EngineError as error:
    refused = str(error)
model = plain.mlp(4, seed=10 + rank)  # replicas begin alike all the same
warnings.filterwarnings("ignore", ".* other weights than rank 0")
with Pipeline(model, plan, mse, engine="torch", timeout=60) as pipe:
    began = pipe.state_dict()
    twin = plain.mlp(4)
    twin.load_state_dict(began)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    losses = train(pipe, optimizer, range(3))
    pipe.step(x, y)
    pipe.step(x, y)
    twice = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    proof = pipe.verify(x, y)
    trace = pipe.step(x, y).trace
    state = pipe.state_dict()
    forward = pipe.forward(x)
with Pipeline(twin, plan, mse) as pipe:
    expected = train(pipe, torch.optim.Adam(pipe.parameters(), lr=0.01), range(3))
    pipe.step(x, y)
    pipe.step(x, y)
say(
    case="replicas",
    losses=losses,
    expected=expected,
    parameters=close(state, twin.state_dict()),
    gradients=max(
        float((gradient - twin.get_parameter(name).grad).norm() / twin.get_parameter(name).grad.norm())
        for name, gradient in twice.items()
    ),
    largest_difference=proof.largest_difference,
    forward=torch.allclose(forward, twin(x), atol=1e-6),
    refused=refused,
    reduces=[str(event.action) for event in trace.events if event.action.kind == "R"],
)

# [5] what only its own process can see: a stage's state from earlier micro-batches, in no buffer
stages = [nn.Linear(6, 6), plain.Counts(), *plain.mlp(3)[::2]]
with Pipeline(stages, pipelab.GPipe(4, 4), mse, engine="torch", timeout=30) as pipe:
    try:
        told = str(pipe.verify(x, y))
    except pipelab.VerificationError as error:
        told = str(error)
    say(case="stateful", told=told, goes_on=bool(pipe.step(x, y).loss > 0))

# [6] a loss that is another one in one process, and of the whole batch only; and one that fails there
def loss_fn(output, target):
    here = rank == 2 and len(target) == ROWS
    if here and failing:
        raise MemoryError("too much")
    return mse(output, target) * (2 if here else 1)


with Pipeline(plain.mlp(4), pipelab.GPipe(4, 4), loss_fn, engine="torch", timeout=30) as pipe:
    for failing in (False, True):
        try:
            told = str(pipe.verify(x, y))
        except (pipelab.VerificationError, MemoryError) as error:
            told = f"{type(error).__name__}: {error}"
        say(case="whole", told=told, goes_on=bool(pipe.step(x, y).loss > 0))
"""


@pytest.fixture(scope="module")
def said():
    """What each of four processes said, by case."""
    ended = processes.run_in(4, TOGETHER)
    assert [each.code for each in ended] == [0] * 4, processes.shown(ended)
    assert [each.err for each in ended] == [""] * 4  # no warning either
    facts = [[json.loads(line) for line in each.out.splitlines()] for each in ended]
    return lambda case: [[fact for fact in each if fact["case"] == case] for each in facts]


def test_five_steps_of_adam_saved_and_reloaded_on_the_way_are_those_of_the_threads_engine(said):
    for facts in said("adam"):
        assert [fact["plan"].partition("(")[0] for fact in facts] == ["OneFOneB", "ZBV"]
        for fact in facts:
            assert fact["losses"] == fact["expected"]
            assert fact["parameters"]


def test_loss_and_gradients_are_the_threads_engines_bit_for_bit(said):
    for rank, (fact,) in enumerate(said("bits")):
        assert fact["held"] == [rank, rank + 4]
        assert fact["parameters"] == 4
        assert fact["names"] == sorted(f"{2 * stage}.{kind}" for stage in fact["held"] for kind in ("weight", "bias"))
        assert fact["loss"]
        assert fact["gradients"]


def test_outputs_of_a_step_stay_on_the_last_stages_process_and_those_of_a_forward_go_to_all(said):
    for rank, (fact,) in enumerate(said("bits")):
        refusal = "the outputs of a step stay on rank 3, where the last stage is\n  try: pipe.forward(x)"
        assert fact["outputs"].startswith("same" if rank == 3 else refusal)
        assert fact["forward"]


def test_every_process_verifies_all_parameters(said):
    for (fact,) in said("bits"):
        assert (fact["exact"], fact["compared"], fact["whole"]) == (True, 16, True)


def test_a_difference_that_one_process_sees_is_told_alike_on_all_and_the_pipeline_goes_on(said):
    facts = [fact for each in said("stateful") for fact in each]
    assert len({fact["told"] for fact in facts}) == 1
    assert re.match(r"the gradient of 0\.weight \(stage 0\) differs .*\nmicro-batch 0 is the first", facts[0]["told"])
    assert all(fact["goes_on"] for fact in facts)


def test_a_difference_from_the_whole_batch_that_one_process_sees_is_told_alike_on_all(said):
    different, failed = zip(*said("whole"), strict=True)
    assert len({fact["told"] for fact in different}) == 1
    assert "their sum is not the whole batch's" in different[0]["told"]
    others = "VerificationError: MemoryError on another process: too much"
    assert [fact["told"] for fact in failed] == [others, others, "MemoryError: too much", others]
    assert all(fact["goes_on"] for fact in (*different, *failed))


def test_every_process_has_the_trace_of_all_with_the_error_of_its_clock(said):
    (first,), *others = said("trace")
    assert all(fact["rows"] == first["rows"] and fact["makespan"] == first["makespan"] for (fact,) in others)
    assert [row.split()[0] for row in first["rows"]] == ["0F0", "1F0", "2F0", "3F0"]
    assert first["after"]
    assert re.fullmatch(r"4 processes, clocks within [\d.e-]+ ms of rank 0's", first["note"])
    assert [lane.partition(",")[0] for lane in first["lanes"]] == ["cpu"] * 4
    assert len({*first["lanes"]}) == 4


def test_transfers_are_measured_and_end_before_they_are_needed(said):
    (fact,) = said("trace")[0]
    assert fact["transfers"] == 8 * 7 * 2  # every stage's border, forward and backward
    assert fact["takes_time"] >= 0
    assert fact["before_its_needer"]


def test_dictionaries_of_tensors_travel_with_what_learns_and_what_does_not(said):
    for rank, (fact,) in enumerate(said("trees")):
        assert fact["loss"]
        assert fact["gradients"]
        assert fact["none"][:2] == ["aside.weight", "aside.bias"] * (rank < 3)  # what nobody uses has no gradient
        assert fact["keys"] == ["0.linear.weight", "0.linear.bias"]


def test_tensors_of_every_type_travel(said):
    for (fact,) in said("kinds"):
        assert fact["gradients"] == [True, True]
        assert (fact["made"], fact["dtype"]) == ([True, True], "torch.float8_e4m3fn")


def test_what_is_before_a_stage_that_cuts_its_input_off_has_no_gradient(said):
    facts = said("cut")
    assert [[fact["none"] for fact in facts[rank]] for rank in (0, 3)] == [
        [["0 bias", "0 weight"], ["0 bias", "0 weight", "4 bias", "4 weight"], ["0 bias", "0 weight"]],
        [[], ["3 bias", "3 weight"], []],
    ]
    for fact in (fact for each in facts for fact in each):
        assert fact["none"] == fact["expected"]
        assert fact["gradients"]


def test_a_micro_batch_that_is_cut_off_gives_no_gradient_and_wakes_no_hook(said):
    facts = [fact for each in said("cut one") for fact in each]
    assert all(all(fact["gradients"]) for fact in facts)
    assert facts[1]["none"] == [False, False, True, True]
    assert facts[0]["steps"] == [3, 3]


def test_values_lie_in_memory_as_in_the_threads_engine_so_that_sums_are_the_same_bit_for_bit(said):
    assert [fact["same"] for (fact,) in said("layout")] == [True] * 4


def test_the_backwards_of_a_frozen_stage_wait_for_their_turn_as_in_the_threads_engine(said):
    for (fact,) in said("layout"):
        assert fact["frozen"]
        assert fact["early"] == []


def test_buffers_of_any_type_that_come_late_or_share_memory_and_extra_state_are_gathered(said):
    for (fact,) in said("state"):
        assert fact["small"] == [[4, 4]] * 4  # learning the shapes left no trace
        assert fact["phases"] == [4] * 4
        assert fact["own"]
        assert fact["calls"] == [6, 6, 6, 4]  # but here: nobody can know
        assert fact["exact"]


def test_replicas_train_as_one_model_on_the_whole_batch_as_in_the_threads_engine(said):
    for (fact,) in said("replicas"):
        assert fact["losses"] == pytest.approx(fact["expected"], rel=1e-6)
        assert fact["parameters"]
        assert fact["gradients"] < 1e-6  # of two steps, added up
        assert fact["largest_difference"] < 1e-6
        assert fact["forward"]
        assert fact["refused"].startswith("stage 0 is on ranks 0, 2, and its BatchNorm1d '' tracks running statistics")
        assert fact["reduces"] == ["0R", "1R", "0R", "1R"]


def test_the_script_of_the_documentation_runs_as_it_says(tmp_path):
    command = [sys.executable, "-m", "pipelab", "launch", str(processes.ROOT / "docs" / "train.py"), "--ranks", "4"]
    env = {key: value for key, value in processes.environment().items() if key != "OMP_NUM_THREADS"}
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    line, result = processes.without_gloo(found.stdout).splitlines()
    assert line.startswith(
        "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 -m pipelab.engine.torchrun.launch /"
    )
    assert re.match(
        r"loss 1\.\d+; All 16 gradients match plain training with the same 8 micro-batches bit for bit", result
    )
    assert (tmp_path / "1f1b.html").exists()
    assert (tmp_path / "model.pt").exists()
