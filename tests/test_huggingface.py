"""transformers.Trainer and Accelerate: sharded, beside their own DDP on the same processes and data."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import autoshard
from autoshard import torch_internals
from autoshard.huggingface import Accelerator, Trainer
from tests.cluster import Cluster
from tests.launch import launch
from tests.models import llama
from tests.parity import Distance, whole
from tests.small import TOLERANCE, Net, config, in_full, inputs_of, same, what_is_said


class Sentences(Dataset[dict[str, Tensor]]):
    """Of different lengths: losses are means over tokens, of which processes have more or fewer."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 67, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[4 + index % 8 :] = -100
        return {"input_ids": ids, "labels": labels}


def _fresh_state() -> None:
    """Accelerate's settings are of the process; these processes run many tests."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _train(cls: type, folder: Path, steps: int, resume: bool = False, arguments: Any = None, **more: Any) -> Any:
    _fresh_state()
    torch.manual_seed(dist.get_rank() if more else 0)  # rank 0's parameters are everyone's
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.1, logging_steps=1, eval_strategy="steps",
        eval_steps=2, save_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, seed=0,
        adam_epsilon=1e-3, **(arguments or {}),
    )  # fmt: skip
    model = llama()
    trainer = cls(model, args, train_dataset=Sentences(), eval_dataset=Sentences(), **more)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def _compare(folder: str, zero: int, resumed_at: int) -> Distance:
    ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
    _train(Trainer, ours, 2, autoshard=config(zero))
    trainer = _train(Trainer, ours, 4, resume=True, autoshard=config(resumed_at))
    assert torch_internals.backend_of(trainer.model).config.accumulation == "no_sync"  # so budgets hold beside what waits
    reference = _train(transformers.Trainer, theirs, 4)
    distance = Distance()
    for line, expected in zip(trainer.state.log_history, reference.state.log_history, strict=True):
        for key, kind in (("loss", "loss"), ("grad_norm", "norm"), ("eval_loss", "loss")):
            if key in expected:
                distance.see(kind, torch.tensor(float(line[key])), torch.tensor(float(expected[key])))
    for p, q in zip(trainer.model.parameters(), reference.model.parameters()):
        distance.see("parameter", whole(p.detach()), q.detach())
    saved = transformers.AutoModelForCausalLM.from_pretrained(ours / "checkpoint-4")
    for p, q in zip(saved.parameters(), reference.model.parameters()):
        distance.see("parameter", p.detach(), q.detach())
    return distance


@pytest.mark.parametrize(("zero", "resumed_at"), [in_full(3, 1), in_full(0, 3), in_full(2, 2)])
def test_the_trainer_is_as_with_ddp(two: Cluster, tmp_path: Path, zero: int, resumed_at: int) -> None:
    """Accumulation, clipping, evaluation, checkpoints; resumed at another stage."""
    for distance in two.run(_compare, str(tmp_path), zero, resumed_at):
        assert distance.worst <= 10 * TOLERANCE, distance  # its log is rounded to four digits


@contextlib.contextmanager
def _a_node_each() -> Iterator[None]:
    """Inside, each process is the first and only one of its node, as far as the launcher's variables say."""
    with mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        yield
    _fresh_state()


def _state_on_each_node(folder: str, zero: int) -> list[torch.Tensor]:
    """What an optimizer's checkpoint has of first moments, of nodes that have a disk each."""
    own = Path(folder) / str(dist.get_rank())
    with _a_node_each():
        _train(Trainer, own, 2, arguments={"save_on_each_node": True}, autoshard=config(zero))
    state = torch.load(own / "checkpoint-2" / "optimizer.pt")["state"]
    return [state[i]["exp_avg"] for i in sorted(state)]


@pytest.mark.full
@pytest.mark.parametrize("zero", [3, 0])
def test_each_node_has_the_whole_state_of_the_optimizer(two: Cluster, tmp_path: Path, zero: int) -> None:
    """Of weights each has what transformers writes there (5.24: on rank 0 alone)."""
    first, second = two.run(_state_on_each_node, str(tmp_path), zero)
    assert same(first, second)
    assert sum(moment.numel() for moment in first) == sum(p.numel() for p in llama().parameters())


class Nowhere:
    """A trainer that pushes as transformers' does, and sends nothing. pushed: what it would have, each time."""

    args: Any
    save_model: Any

    def init_hf_repo(self, *_: Any, **__: Any) -> None:
        self.pushed: list[list[str]] = []

    def push_to_hub(self, *_: Any, **__: Any) -> None:
        self.save_model(_internal_call=True)
        self.pushed.append(sorted(file.name for file in Path(self.args.output_dir).iterdir()))


class Pushing(Nowhere, Trainer):
    pass


class PushingTheirs(Nowhere, transformers.Trainer):
    pass


def _push(folder: str, zero: int) -> tuple[Distance, bool]:
    """(how far what was saved and what was pushed is from DDP's, whether it is as many files)"""
    ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
    arguments = {"push_to_hub": True, "save_strategy": "no"}
    trainers = [
        _train(Pushing, ours, 2, arguments=arguments, autoshard=config(zero)),
        _train(PushingTheirs, theirs, 2, arguments=arguments),
    ]
    for trainer, place in zip(trainers, (ours, theirs)):
        trainer.save_model(str(place / "saved"))
    dist.barrier()  # for rank 0 to have written
    distance = Distance()
    for place in ("saved", "."):
        models = [transformers.AutoModelForCausalLM.from_pretrained(folder / place) for folder in (ours, theirs)]
        for p, q in zip(*(model.parameters() for model in models)):
            distance.see("parameter", p.detach(), q.detach())
    return distance, trainers[0].pushed[-1:] == trainers[1].pushed[-1:] or dist.get_rank() > 0


@pytest.mark.full
@pytest.mark.parametrize("zero", [3, 0])
def test_a_push_saves_once_more(two: Cluster, tmp_path: Path, zero: int) -> None:
    for distance, alike in two.run(_push, str(tmp_path), zero):
        assert distance.worst <= TOLERANCE and alike, distance


def _loop(accelerator: Any, batches: Tensor, folder: Path) -> tuple[Any, list[Tensor]]:
    """Accumulation over two batches and a checkpoint that is loaded again after one more step."""
    torch.manual_seed(dist.get_rank() if isinstance(accelerator, Accelerator) else 0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    data = DataLoader(batches.flatten(0, 1), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(net, optimizer, data)
    seen: list[Tensor] = []
    for i, x in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather(loss.detach()))
        if i == 3:
            accelerator.save_state(str(folder))
        if i == 5:
            accelerator.load_state(str(folder))
    return net, seen


def _accelerate(folder: str, zero: int, **more: Any) -> Distance:
    batches, distance = inputs_of(8), Distance()
    _fresh_state()
    plain = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **more)
    reference, expected = _loop(plain, batches, Path(folder) / "theirs")
    _fresh_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, autoshard=config(zero), **more)
    net, seen = _loop(accelerator, batches, Path(folder) / "ours")
    for ours, theirs in zip(seen, expected, strict=True):
        distance.see("loss", ours.detach(), theirs.detach())
    for p, q in zip(net.parameters(), reference.parameters()):
        distance.see("parameter", whole(p.detach()), q.detach())
    assert accelerator.unwrap_model(net) is net
    assert torch_internals.backend_of(net).config.accumulation == ("reduced" if "gradient_accumulation_plugin" in more else "no_sync")
    return distance


@pytest.mark.parametrize("zero", [3, in_full(0), in_full(1)])
def test_accelerate_is_as_with_ddp(two: Cluster, tmp_path: Path, zero: int) -> None:
    for distance in two.run(_accelerate, str(tmp_path), zero):
        assert distance.worst <= TOLERANCE, distance


def _of_torch(zero: int) -> Distance:
    """A model whose forward is torch.nn's, into which Dynamo does not look where it is compiled in place."""
    models, distance = [], Distance()
    for kind, said in ((accelerate.Accelerator, {}), (Accelerator, {"autoshard": config(zero)})):
        _fresh_state()
        accelerator = kind(cpu=True, **said)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
        model, optimizer = accelerator.prepare(net, optimizer)
        for x in inputs_of(3)[:, dist.get_rank()]:
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        models.append(net)
    for theirs, ours in zip(*(model.parameters() for model in models)):
        distance.see("parameter", whole(ours.detach()), theirs.detach())
    return distance


@pytest.mark.parametrize("zero", [0, 3])
def test_accelerate_takes_a_model_of_torch_nn(two: Cluster, zero: int) -> None:
    for distance in two.run(_of_torch, zero):
        assert distance.worst <= TOLERANCE, distance


def _reduced_late(zero: int) -> str:
    _fresh_state()
    accelerator = Accelerator(cpu=True, autoshard=config(zero))
    model, optimizer = accelerator.prepare(Net(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with accelerator.no_sync(model):
        accelerator.backward(model(torch.ones(2, 8)))
        loss = model(torch.ones(2, 8))

    def reduce() -> None:
        with Accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)

    return what_is_said(reduce)


@pytest.mark.parametrize("zero", [0, in_full(1), 3])
def test_what_waits_is_not_reduced_by_a_late_word(two: Cluster, zero: int) -> None:
    for said in two.run(_reduced_late, zero):
        assert said.startswith("UnsupportedError: trigger_sync_in_backward: " if zero < 2 else "nothing"), said


def _generate(zero: int) -> tuple[list[int], list[int]]:
    """Texts of other lengths on each process, before the first call and behind it."""
    _fresh_state()
    torch.manual_seed(0)
    net = llama()
    plain = copy.deepcopy(net)
    model = Accelerator(cpu=True, autoshard=config(zero)).prepare(net)
    prompt = torch.tensor([[1, 2, 3]])
    options: dict[str, Any] = {"max_new_tokens": 3 + 4 * dist.get_rank(), "do_sample": False, "pad_token_id": 0}
    texts = [pickle.loads(pickle.dumps(model.generate))(prompt, **options)]
    model(input_ids=prompt, labels=prompt).loss.backward()
    texts.append(model.generate(prompt, **options))
    expected = plain.generate(prompt, **options)[0].tolist()
    return [*texts[0][0].tolist(), *texts[1][0].tolist()], expected * 2


@pytest.mark.parametrize("zero", [3, in_full(0)])
def test_a_prepared_model_generates_as_long_as_each_process_wants(two: Cluster, zero: int) -> None:
    for texts, expected in two.run(_generate, zero):
        assert texts == expected


def _accelerate_nodes(folder: str, zero: int) -> Distance:
    with _a_node_each():
        each = ProjectConfiguration(save_on_each_node=True)
        return _accelerate(f"{folder}/{dist.get_rank()}", zero, project_config=each)


@pytest.mark.parametrize("zero", [3, in_full(0)])
def test_accelerate_has_a_checkpoint_on_each_node(two: Cluster, tmp_path: Path, zero: int) -> None:
    for distance in two.run(_accelerate_nodes, str(tmp_path), zero):
        assert distance.worst <= TOLERANCE, distance


def test_accelerate_s_own_sharding_is_refused() -> None:
    _fresh_state()
    with pytest.raises(autoshard.AutoshardError, match="compiles with EAGER; autoshard shards and compiles itself"):
        Accelerator(cpu=True, dynamo_backend="eager")
    _fresh_state()


@pytest.mark.full
def test_the_example_runs(tmp_path: Path) -> None:
    arguments = ["--steps=2", "--batch=1", "--seq=16", "--width=64", "--layers=2", f"--output={tmp_path}"]
    body = f"""
    import runpy
    sys.path.insert(0, "examples")
    sys.argv = ["train_trainer.py", *{[*arguments, "--memory-budget=2.2MiB"]}]
    runpy.run_path("examples/train_trainer.py", run_name="__main__")
    """
    for ended in launch(2, body):
        assert ended.code == 0, ended.output
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
