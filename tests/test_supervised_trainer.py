"""Updates of supervised training: the right tokens, one mean over them, whatever the split."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny_models import byte_tokenizer, tiny_model
from torch import Tensor
from trl import SFTConfig, SFTTrainer

from nbtrain.rollout.ranks import Ranks
from nbtrain.training.adapted import AdaptedModel, attach_adapter
from nbtrain.training.supervised.model import only_adapter_dropout
from nbtrain.training.supervised.order import Order
from nbtrain.training.supervised.packing import pack, unpacked
from nbtrain.training.supervised.rows import RowWriter, TokenizedRows
from nbtrain.training.supervised.trainer import (
    NotFiniteError,
    SupervisedTrainer,
    TrainerSettings,
    UpdateDone,
)

SEED = 7


def adapted(family: str = "llama", *, dropout: float = 0.0, **changes: Any) -> AdaptedModel:
    base = tiny_model(family)
    for name, value in changes.items():
        setattr(base.config, name, value)
    model = attach_adapter(
        base, lora_rank=4, lora_alpha=8, target_modules="default", seed=3, lora_dropout=dropout
    )
    only_adapter_dropout(model)
    return AdaptedModel(model, torch.device("cpu"))


def some_rows(folder: Path, count: int = 10) -> TokenizedRows:
    draws = random.Random(1)
    with RowWriter(folder / "rows") as writer:
        for _ in range(count):
            length = draws.randint(6, 20)
            ids = [draws.randrange(200) for _ in range(length)]
            writer.append(ids, [at > length // 2 for at in range(length)])
    return TokenizedRows(folder / "rows")


def made(
    folder: Path,
    *,
    model: AdaptedModel | None = None,
    packed: bool = False,
    per_pass: int = 2,
    passes: int = 2,
    shuffle: bool = True,
    start: int = 0,
    total: int = 6,
    rate: Callable[[int], float] = lambda step: 1e-2,
    cap: int | None = None,
    checkpointing: bool = False,
    lean: bool = False,
    after: Callable[[UpdateDone], bool | None] = lambda done: None,
    tick: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
) -> SupervisedTrainer:
    rows = some_rows(folder)
    order = Order(
        pack(rows.lengths.tolist(), 40) if packed else unpacked(len(rows)),
        seed=SEED,
        shuffle=shuffle,
        per_pass=per_pass,
        passes=passes,
    )
    settings = TrainerSettings(
        start_step=start,
        total_steps=total,
        seed=SEED,
        rate=rate,
        weight_decay=0.01,
        max_grad_norm=1.0,
        packed=packed,
        cap=cap,
        gradient_checkpointing=checkpointing,
        lean=lean,
    )
    return SupervisedTrainer(
        model or adapted(),
        rows,
        order,
        settings,
        tokenizer=byte_tokenizer(),
        folder=folder / "trainer",
        after=after,
        tick=tick,
        ranks=ranks,
    )


def trained(folder: Path, **options: Any) -> tuple[list[UpdateDone], dict[str, Tensor]]:
    """What the updates did, and the adapter behind them."""
    done: list[UpdateDone] = []
    model = options.pop("model", None) or adapted(dropout=options.pop("dropout", 0.0))
    made(folder, model=model, after=done.append, **options).train()
    return done, model.adapter_state()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[UpdateDone], dict[str, Tensor]]:
    """Updates of four sequences in one pass."""
    return trained(tmp_path_factory.mktemp("whole"), per_pass=4, passes=1, total=3)


@pytest.mark.parametrize(
    "split",
    [
        {"per_pass": 2, "passes": 2},
        {"per_pass": 1, "passes": 4},
        {"cap": 1},
        {"cap": 3},
        {"checkpointing": True},
        {"lean": True},
    ],
    ids=str,
)
def test_the_split_into_passes_does_not_change_the_update(
    split: dict[str, Any], tmp_path: Path, whole: tuple[list[UpdateDone], dict[str, Tensor]]
) -> None:
    done, adapter = whole
    again, other = trained(tmp_path, **{"per_pass": 4, "passes": 1, "total": 3} | split)
    for one, two in zip(done, again, strict=True):
        assert one.rows == two.rows
        assert one.trained_tokens == two.trained_tokens
        assert math.isclose(one.loss, two.loss, rel_tol=1e-5)
        assert math.isclose(one.grad_norm, two.grad_norm, rel_tol=1e-4)
    for name, tensor in adapter.items():
        torch.testing.assert_close(other[name], tensor, rtol=2e-3, atol=1e-4)


def test_the_last_update_of_an_epoch_is_an_update(tmp_path: Path) -> None:
    done, _ = trained(tmp_path, shuffle=False)
    assert [one.rows for one in done] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    assert [round(one.epoch, 6) for one in done] == [0.333333, 0.666667, 1, 1.333333, 1.666667, 2]
    assert [one.sequences for one in done] == [4, 4, 2] * 2


def test_the_first_update_is_the_one_of_the_stock_trainer(tmp_path: Path) -> None:
    """Same rows, labels and adapter: the stock trainer has the same loss and gradient."""
    rows = some_rows(tmp_path)
    table: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for row in range(4):
        ids, marks = rows.row(row)
        table["input_ids"].append(ids.tolist())
        table["labels"].append([i if m else -100 for i, m in zip(ids, marks, strict=True)])
    model = adapted()
    stock = SFTTrainer(
        model=model.model,
        args=SFTConfig(
            output_dir=str(tmp_path / "stock"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=1,
            learning_rate=1e-2,
            max_grad_norm=1.0,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(table),
        processing_class=byte_tokenizer(),
    )
    stock.train()
    logged = stock.state.log_history[0]
    done, adapter = trained(tmp_path / "ours", shuffle=False, total=1)
    assert math.isclose(done[0].loss, logged["loss"], rel_tol=1e-5)
    assert math.isclose(done[0].grad_norm, logged["grad_norm"], rel_tol=1e-4)
    for name, tensor in model.adapter_state().items():
        torch.testing.assert_close(adapter[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_model_receives_our_ids_and_labels_are_our_mask(tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []
    scored: list[dict[str, Tensor]] = []
    model = adapted()
    trainer = made(tmp_path, model=model, shuffle=False, total=3)
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: received.append(kwargs), with_kwargs=True
    )
    measure = trainer.scores.__call__

    class Watched:
        lean = staticmethod(trainer.scores.lean)

        def __call__(self, batch: dict[str, Tensor], model: Any = None) -> Any:
            scored.append(batch)
            found = measure(batch, model)
            assert len(found[0]) == int((batch["labels"] != -100).sum())
            return found

    trainer.scores = Watched()  # type: ignore[assignment]
    trainer.train()
    rows = some_rows(tmp_path)
    seen = 0
    for inputs, batch in zip(received, scored, strict=True):
        assert "labels" not in inputs
        for at, line in enumerate(batch["labels"]):
            ids, marks = rows.row(seen)
            length = len(ids)
            assert inputs["input_ids"][at, :length].tolist() == ids.tolist()
            assert (line[:length] != -100).tolist() == marks.tolist()
            assert (line[length:] == -100).all()
            seen += 1
    assert seen == 10


def test_rates_are_the_planned_ones_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    rates = [0.0, 0.1 / 3, 1e-3, 7e-5, 2e-2, 1e-9, 3e-4]
    trainer = made(tmp_path, rate=lambda step: rates[step], start=0, total=6)
    step = torch.optim.AdamW.step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    trainer.train()
    assert seen == rates[1:]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_going_on_is_the_straight_run_bit_for_bit(packed: bool, stop: int, tmp_path: Path) -> None:
    straight, adapter = trained(tmp_path / "straight", packed=packed, dropout=0.2)
    first: list[UpdateDone] = []
    model = adapted(dropout=0.2)

    def after(done: UpdateDone) -> bool:
        first.append(done)
        return done.step == stop

    halted = made(tmp_path / "first", model=model, packed=packed, after=after)
    halted.train()
    assert halted.step == stop
    rest: list[UpdateDone] = []
    second = adapted(dropout=0.2)
    second.load_adapter_state(model.adapter_state())
    torch.rand(13)  # whatever else has drawn meanwhile
    trainer = made(tmp_path / "rest", model=second, packed=packed, start=stop, after=rest.append)
    trainer.load_optimizer_state(halted.optimizer_state())
    trainer.train()
    facts = [(d.step, d.loss, d.grad_norm, d.rows) for d in straight]
    assert [(d.step, d.loss, d.grad_norm, d.rows) for d in first + rest] == facts
    for name, tensor in second.adapter_state().items():
        assert torch.equal(tensor, adapter[name]), name


def test_dropout_is_the_adapters_alone(tmp_path: Path) -> None:
    model = adapted("gpt2")
    assert model.model.config.resid_pdrop > 0  # what its configuration says of pretraining
    model.model.train()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(model.model(ids).logits, model.model(ids).logits)
    dropped, _ = trained(tmp_path / "dropped", dropout=0.3)
    kept, _ = trained(tmp_path / "kept")
    assert dropped[1].loss != kept[1].loss


def test_a_loss_that_is_no_number_fails_with_step_and_rows(tmp_path: Path) -> None:
    model = adapted()
    ticks = 0

    def poison() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 4:  # in the second update
            next(iter(model.trainable.values())).data.fill_(float("nan"))

    before = made(tmp_path, model=model, shuffle=False, tick=poison)
    with pytest.raises(NotFiniteError, match=r"loss of step 2 is nan \(rows at positions 4, 5, 6"):
        before.train()
    assert before.step == 1


def test_a_gradient_that_is_no_number_is_not_applied(tmp_path: Path) -> None:
    model = adapted()
    trainer = made(tmp_path, model=model, shuffle=False)
    parameter: Any = next(iter(model.trainable.values()))
    parameter.register_hook(lambda gradient: gradient * float("inf"))
    start = model.adapter_state()
    with pytest.raises(NotFiniteError, match="the gradient of step 1 is not finite"):
        trainer.train()
    assert all(torch.equal(start[name], now) for name, now in model.adapter_state().items())


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._board = barrier, board

    def gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(60)
        found = list(self._board)
        self._barrier.wait(60)
        return found

    def sum(self, tensors: Sequence[Tensor]) -> None:
        every = self.gather([tensor.detach().clone() for tensor in tensors])
        with torch.no_grad():
            for tensor, *parts in zip(tensors, *every, strict=True):
                tensor.copy_(torch.stack(parts).sum(0))


def test_two_ranks_make_the_updates_of_one(
    tmp_path: Path, whole: tuple[list[UpdateDone], dict[str, Tensor]]
) -> None:
    """The last update of the epoch has one pass: the other rank has nothing to run."""
    done, adapter = whole
    barrier, board = Barrier(2), [None, None]
    updates: list[list[UpdateDone]] = [[], []]
    models = [adapted(), adapted()]
    trainers = [
        made(
            tmp_path / str(rank),
            model=models[rank],
            total=3,
            after=updates[rank].append,
            ranks=Threads(rank, barrier, board),
        )
        for rank in (0, 1)
    ]
    threads = [Thread(target=trainer.train) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, two, three in zip(done, *updates, strict=True):
        assert one.rows == two.rows == three.rows
        assert two.loss == three.loss
        assert one.trained_tokens == two.trained_tokens == three.trained_tokens
        assert math.isclose(one.loss, two.loss, rel_tol=1e-5)
        assert math.isclose(one.grad_norm, two.grad_norm, rel_tol=1e-4)
    for name, tensor in adapter.items():
        torch.testing.assert_close(models[0].adapter_state()[name], tensor, rtol=2e-3, atol=1e-4)
        assert torch.equal(*(model.adapter_state()[name] for model in models))


def test_stops_between_passes(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks == 2:
            raise Stop

    trainer = made(tmp_path, tick=tick)
    with pytest.raises(Stop):
        trainer.train()
    assert trainer.step == 0


def test_the_trainer_says_and_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, total=2)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ""
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "ids.i32",
        "offsets.i64",
        "trained.u8",
    ]
