import contextlib

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.torch.checks import assert_close

ROWS, COLUMNS = 7, 3


def entries(rank, dtype=torch.float64, count=4):
    """Return a rank's input: some places twice, and small whole numbers, which add up exactly."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(ROWS, (1, count), generator=generator)
    indices[:, -1:] = indices[:, :1]
    values = torch.randint(1, 9, (count, COLUMNS), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (ROWS, COLUMNS), check_invariants=True)


def dense_sum(size, **options):
    return sum(entries(rank, **options).to_dense().double() for rank in range(size))


@ranks(3)
def test_sums_and_averages(size):
    hvd.init()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        mine = entries(hvd.rank(), dtype)
        for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
            reduced = hvd.sparse_allreduce_async(mine, name="table", op=op)()
            assert reduced.is_coalesced()
            assert reduced.dtype == dtype
            expected = (dense_sum(size) / divisor).to(dtype)
            assert_close(reduced.to_dense(), expected)
            assert len(set(map(str, hvd.allgather_object(reduced.values().tolist())))) == 1
            assert reduced._nnz() == (dense_sum(size).sum(1) != 0).sum()


@ranks(2)
def test_whole_numbers_are_cut_towards_zero(size):
    hvd.init()
    mine = torch.tensor([0, 0, -1 - hvd.rank()], dtype=torch.int32).to_sparse()
    average = hvd.sparse_allreduce_async(mine, None, hvd.Average)().to_dense()
    assert average.tolist() == [0, 0, -((size * (size + 1) // 2) // size)]
    for dtype in (torch.int8, torch.int64):  # the sum does not fit, the mean does
        largest = torch.full((2,), torch.iinfo(dtype).max, dtype=dtype).to_sparse()
        average = hvd.sparse_allreduce_async(largest, None, hvd.Average)()
        assert torch.equal(average.to_dense(), largest.to_dense())


@ranks(3)
def test_numbers_of_entries_differ_and_axes_are_many(size):
    hvd.init()
    dense = torch.zeros(3, 4, 5)
    dense[hvd.rank() % 3, : hvd.rank(), 1] = 1.0  # rank 0 has none
    for sparse_axes in (1, 2, 3):
        total = hvd.sparse_allreduce_async(dense.to_sparse(sparse_axes), None, hvd.Sum)()
        assert total.sparse_dim() == sparse_axes
        assert torch.equal(total.to_dense(), hvd.allreduce(dense, op=hvd.Sum))


@ranks(2)
def test_several_are_on_their_way_at_once():
    hvd.init()
    order = range(5) if hvd.rank() == 0 else reversed(range(5))
    waits = {
        n: hvd.sparse_allreduce_async(entries(hvd.rank() + 10 * n), f"t{n}", hvd.Sum) for n in order
    }
    for n, wait in waits.items():
        expected = entries(10 * n).to_dense() + entries(10 * n + 1).to_dense()
        assert torch.equal(wait().to_dense(), expected)


@ranks(2)
def test_what_cannot_be_reduced_is_refused_at_once():
    hvd.init()
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(NotImplementedError, match=f"not {op.name.capitalize()}"):
            hvd.sparse_allreduce_async(entries(0), "table", op)
    for found in (torch.zeros(3), [1.0]):
        with pytest.raises(ValueError, match="expected a sparse tensor"):
            hvd.sparse_allreduce_async(found, "table", hvd.Sum)
    with pytest.raises(ValueError, match="Average is not defined for dtype bool"):
        hvd.sparse_allreduce_async(torch.ones(2, dtype=torch.bool).to_sparse(), "b", hvd.Average)
    # The refusals have not shifted the names of what follows.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@ranks(2)
def test_ranks_that_disagree_get_an_error_on_all(size):
    hvd.init()
    last = hvd.rank() == size - 1
    differing = (
        (torch.eye(4 + last).to_sparse(), hvd.Sum, r"\[4, 4\].* on ranks? 0.*\[5, 5\]"),
        (torch.eye(4).to_sparse(1 + last), hvd.Sum, "1 of its axes sparse.*2 of its axes sparse"),
        (torch.eye(4).to_sparse(), hvd.Sum if last else hvd.Average, "Average of shape.*; Sum"),
        (torch.eye(4, dtype=torch.float64 if last else None).to_sparse(), hvd.Sum, "dtype"),
    )
    for tensor, op, said in differing:
        wait = hvd.sparse_allreduce_async(tensor, "table", op)
        with pytest.raises(hvd.HorovodInternalError, match=said):
            wait()
        found = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "table", hvd.Sum)()
        assert torch.equal(found.to_dense(), size * torch.eye(2))


@ranks(3)
def test_an_error_names_the_ranks_of_a_process_set_as_the_job_does():
    hvd.init()
    pair = hvd.add_process_set([1, 2])
    if hvd.rank():
        wait = hvd.sparse_allreduce_async(torch.eye(hvd.rank()).to_sparse(), "t", hvd.Sum, pair)
        with pytest.raises(hvd.HorovodInternalError, match=r"\[1, 1\].* rank 1; .* on rank 2"):
            wait()
    hvd.remove_process_set(pair)


def rows_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, (3 + rank,), generator=generator)


def dense_and_sparse():
    """A table that can be read in both ways."""
    table = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), [("table", table)])

    def step(sparse):
        optimizer.zero_grad()
        rows = torch.tensor([hvd.rank()])
        torch.nn.functional.embedding(rows, table, sparse=sparse).sum().backward()
        gradient = table.grad
        optimizer.step()
        assert table.grad is gradient, "another tensor"

    return table, step


@ranks(2)
@pytest.mark.parametrize("steps_before", [0, 1, 4])
def test_sparse_here_and_dense_there_is_an_error_on_all_ranks(size, steps_before):
    hvd.init()
    table, step = dense_and_sparse()
    for _ in range(steps_before):
        step(sparse=True)
    with pytest.raises(
        hvd.HorovodInternalError, match=r"'table' is dense on ranks? 0.* and sparse"
    ):
        step(sparse=hvd.rank() > 0)
    step(sparse=True)
    done = torch.zeros(ROWS)
    done[:size] = -(steps_before + 1) / size
    assert_close(table, done.unsqueeze(1).expand(ROWS, COLUMNS), 1e-6)


@ranks(2)
def test_dense_on_all_ranks_after_sparse_ones(size):
    hvd.init()
    table, step = dense_and_sparse()
    kinds = [True, False, True, True, False, False, True]
    for sparse in kinds:
        step(sparse)
        assert table.grad.is_sparse == sparse
    done = torch.zeros(ROWS)
    done[:size] = -len(kinds) / size
    assert_close(table, done.unsqueeze(1).expand(ROWS, COLUMNS), 1e-6)


@ranks(2)
def test_a_dense_gradient_after_a_sparse_one_is_laid_out_as_its_parameter_on_all_ranks(size):
    hvd.init()
    table = torch.nn.Parameter(torch.zeros(COLUMNS, ROWS).t())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0))
    for sparse in (True, False):
        optimizer.zero_grad()
        if hvd.rank() != 1:
            rows = torch.tensor([hvd.rank(), 1])
            torch.nn.functional.embedding(rows, table, sparse=sparse).sum().backward()
        optimizer.synchronize()
        expected = torch.zeros(ROWS, COLUMNS)
        for rank in {0, 2} & {*range(size)}:
            expected[[rank, 1]] += 1 / size
        assert_close(table.grad.to_dense(), expected, 1e-6)
    assert table.grad.stride() == table.stride() == (1, ROWS)


@ranks(2)
def test_a_sparse_gradient_that_is_changed_too_early_is_an_error():
    hvd.init()
    table = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(rows_of(hvd.rank(), 0)).sum().backward()
        table.weight.grad.mul_(2)
        with pytest.raises(RuntimeError, match=r"'weight' was changed after backward"):
            optimizer.step()
    with contextlib.suppress(RuntimeError):
        optimizer.zero_grad()
    optimizer.step()


@ranks(2)
def test_of_no_samples_it_counts_for_nothing_whatever_it_is():
    hvd.init()
    table = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        factor = float("nan") if hvd.rank() else 1.0
        (table(torch.tensor([hvd.rank()])).sum() * factor).backward()
        optimizer.synchronize(batch_size=0 if hvd.rank() else 5)
        expected = torch.zeros(ROWS, COLUMNS)
        expected[0] = 1.0
        assert_close(table.weight.grad.to_dense(), expected)
        with optimizer.skip_synchronize():
            optimizer.step()


@ranks(2)
def test_a_sparse_gradient_beside_a_rank_that_has_joined():
    hvd.init()
    layer = torch.nn.Embedding(10, 4, sparse=True)
    for sparse_as_dense in (False, True):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1), sparse_as_dense=sparse_as_dense
        )

        def step(optimizer=optimizer):
            optimizer.zero_grad()
            layer(torch.tensor([hvd.rank(), 3])).sum().backward()
            optimizer.step()

        step()
        if hvd.rank() == 1 and sparse_as_dense:
            step()
        elif hvd.rank() == 1:
            with pytest.raises(
                hvd.HorovodInternalError,
                match=r"rank 0.*join.*sparse_as_dense=True|sparse_as_dense=True.*join",
            ):
                step()
        hvd.join()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # in Adagrad
@ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD])
def test_as_a_dense_one_it_has_the_same_form_on_all_ranks_afterwards(size, kind):
    """Optimizers round sparse averages otherwise, and some take one form only."""
    hvd.init()
    torch.manual_seed(0)
    table = torch.nn.Parameter(torch.randn(ROWS, COLUMNS))
    optimizer = hvd.DistributedOptimizer(kind([table], lr=0.3), sparse_as_dense=True)
    # For each step, what the ranks have: a sparse gradient, a dense one, or none.
    for step, forms in enumerate(["s--", "ds-", "--s", "d-d", "-sd", "sss", "-d-", "d--"] * 2):
        optimizer.zero_grad()
        form = forms[hvd.rank()]
        if form != "-":
            rows = rows_of(hvd.rank(), step)
            found = torch.nn.functional.embedding(rows, table, sparse=form == "s")
            (found.square().sum() / 7).backward()
        optimizer.step()
        used = forms[:size].strip("-")
        assert (table.grad is None) == (not used)
        assert not used or table.grad.is_sparse == ("s" in used)
        assert len({*hvd.allgather_object(table.detach().numpy().tobytes())}) == 1
