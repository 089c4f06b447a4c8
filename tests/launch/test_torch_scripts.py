"""Scripts that never heard of evenstep run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import hosts, needs_hosts
from tests.launch.launching import command, launched, run, write_script

DDP = """
    import os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    def main():
        dist.init_process_group("gloo", init_method="env://")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        assert (rank, world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.full((2, 3), float(rank + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        total = torch.cat([p.detach().flatten() for p in model.parameters()])
        parts = [torch.empty_like(total) for _ in range(world_size)]
        dist.all_gather(parts, total)
        print("equal" if all(torch.equal(part, total) for part in parts) else "different", world_size, flush=True)
        del model
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""

ACCELERATE = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(16, 1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    for (batch,) in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    seen = accelerator.gather(torch.tensor([len(loader) * 4]))
    accelerator.print(accelerator.num_processes, seen.tolist())
    accelerator.end_training()
"""


def test_plain_ddp(tmp_path: Path) -> None:
    result = run(tmp_path, "--processes", 2, write_script(tmp_path, DDP))
    assert (result.code, result.out) == (0, "equal 2\n"), result.err
    assert result.err.count("\n") == 1  # one word of ours, and nothing from torch


def test_plain_ddp_on_a_second_start_in_the_same_directory(tmp_path: Path) -> None:
    script = write_script(tmp_path, DDP)
    for spelling in ("--nproc_per_node", "--nproc-per-node"):
        result = run(tmp_path, "--standalone", "--nnodes=1", f"{spelling}=3", script)
        assert (result.code, result.out) == (0, "equal 3\n"), result.err


def test_accelerate(tmp_path: Path) -> None:
    result = run(tmp_path, "--processes", 2, write_script(tmp_path, ACCELERATE))
    assert (result.code, result.out) == (0, "2 [8, 8]\n"), result.err


def test_kill_of_a_rank_in_a_collective_names_it_and_not_its_peers(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, signal
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(1000):
            if step == 20 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1000))
        """,
    )
    result = run(tmp_path, "--processes", 3, script)
    assert result.code == 1
    assert "rank 1 was killed by SIGKILL" in result.err
    assert "Traceback" not in result.err


def test_nothing_of_torch_was_used_before_the_script(tmp_path: Path) -> None:
    """The preloaded torch is as new: a seed of its own, no threads, usable loader processes."""
    script = write_script(
        tmp_path,
        """
        import os, sys
        import torch
        assert len(os.listdir("/proc/self/task")) == 1
        print("seed", torch.initial_seed(), file=sys.stderr)
        assert not torch.cuda.is_initialized()
        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=4, num_workers=2)
        print([batch.tolist() for batch in loader], torch.get_num_threads())
        """,
    )
    with launched(tmp_path, "--processes", 2, script) as launch:
        result = launch.wait()
    assert (result.code, result.out) == (0, "[[0, 1, 2, 3], [4, 5, 6, 7]] 1\n"), result.err
    seeds = {launch.log(rank).splitlines()[0] for rank in range(2)}
    assert len(seeds) == 2
    assert all(seed.startswith("seed ") for seed in seeds)


@pytest.mark.parametrize("processes", [1, 2])
def test_backend_that_this_torch_lacks_is_refused_before_start(tmp_path: Path, processes: int) -> None:
    import torch.distributed as dist

    script = write_script(tmp_path, "open('ran', 'w')")
    for backend, available in [
        ("nccl", dist.is_nccl_available()),
        ("mpi", dist.is_mpi_available()),
        ("ucc", dist.is_ucc_available()),
    ]:
        if available:
            continue
        result = run(tmp_path, "--processes", processes, "--backend", backend, script)
        assert result.code == 2
        assert f"--backend {backend}: torch" in result.err
        assert "built without it" in result.err
        assert "what to do: " in result.err
    assert not (tmp_path / "ran").exists()
    assert run(tmp_path, "--processes", processes, "--backend", "gloo", script).code == 0
    assert (tmp_path / "ran").exists()


TRAINER = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def main():
        config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
        data = [{"input_ids": (torch.arange(8) + i) % 16, "labels": (torch.arange(8) + i) % 16} for i in range(16)]
        arguments = TrainingArguments(
            "out", per_device_train_batch_size=2, max_steps=3, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_strategy="no",
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
        trainer.train()
        own = sum(p.detach().double().sum() for p in trainer.model.parameters()).reshape(1)
        every = trainer.accelerator.gather(own)
        if trainer.is_world_process_zero():
            print("equal" if len(set(every.tolist())) == 1 else "different", len(every), flush=True)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
def test_on_two_hosts(tmp_path: Path) -> None:
    needs_hosts()
    expected = {
        "ddp.py": (DDP, "equal 2"),
        "accelerated.py": (ACCELERATE, "2 [8, 8]"),
        "trainer.py": (TRAINER, "equal 2"),
    }
    with hosts(2) as two:
        for name, (text, printed) in expected.items():
            write_script(tmp_path, text, name)
            words = ["--nodes", 2, "--master-addr", two.address(1), "--master-port", 1234, "--run"]
            commands = [
                two.start(
                    node + 1, *command("run", "--node-rank", node, *words, f"{name}-{node}", name),
                    folder=tmp_path, env={"EVENSTEP_TOKEN": "a secret"},
                )
                for node in (1, 0)
            ]  # fmt: skip
            other, first = (one.wait() for one in commands)
            assert (first.code, other.code) == (0, 0), (first, other)
            assert first.out.splitlines()[-1] == printed, first
