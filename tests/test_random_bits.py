"""Counter-based random bits are uniform, independent, and the same wherever they are asked for."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
import torch

from halp.random_bits import random_bits, row_length, stream_key

N = 1 << 16
#: Chance deviations stay below this many standard errors in each of some thousand comparisons.
SIGMAS = 5.5
#: Streams that a good hash must tell apart: (seed, *counters), neighbouring, sparse and wide.
STREAMS = {
    "seed 0": (0,),
    "seed 1": (1,),
    "seed 2": (2,),
    "seed 2^31": (1 << 31,),
    "seed 2^32": (1 << 32,),
    "seed -1": (-1,),
    "seed 2^63-1": ((1 << 63) - 1,),
    "counter 0": (0, 0),
    "counter 1": (0, 1),
    "counter 2": (0, 2),
    "seed 1, counter 0": (1, 0),
    "counter 2^32": (0, 1 << 32),
    "counters 0, 1": (0, 0, 1),
    "counters 1, 0": (0, 1, 0),
}
NAMES = list(STREAMS)
PAIRS = list(itertools.combinations(NAMES, 2))


@lru_cache
def words(numbers: tuple, count: int = N) -> np.ndarray:
    """The first ``count`` 32-bit words of the stream with this seed and these counters."""
    return random_bits(torch.empty(count), stream_key(*numbers)).numpy().view(np.uint32)


@lru_cache
def stream_signs(name: str) -> np.ndarray:
    return signs(words(STREAMS[name]))


def signs(x: np.ndarray) -> np.ndarray:
    """The 32 bits of each word as ±1, float32, shape (words, 32)."""
    bits = (x[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return bits.astype(np.float32) * 2 - 1


def assert_independent(a: np.ndarray, b: np.ndarray) -> None:
    """No bit of ``a`` is correlated with any bit of ``b``, both given as signs."""
    correlation = a.T @ b / len(a)
    assert np.abs(correlation).max() < SIGMAS / np.sqrt(len(a))


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_is_one_half_of_the_time(name):
    assert np.abs(stream_signs(name).mean(0)).max() < SIGMAS / np.sqrt(N)


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_a_word_are_independent_of_each_other(name):
    b = stream_signs(name)
    correlation = b.T @ b / N - np.eye(32)
    assert np.abs(correlation).max() < SIGMAS / np.sqrt(N)


@pytest.mark.parametrize("name", NAMES)
def test_all_bytes_are_equally_frequent(name):
    x = words(STREAMS[name])
    for shift in (0, 8, 16, 24):
        counts = np.bincount((x >> shift) & 255, minlength=256)
        chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum()
        # 255 degrees of freedom: mean 255, standard deviation √510.
        assert abs(chi_square - 255) < 5 * np.sqrt(510)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 64, 256, 1024, 4096])
def test_neighbouring_elements_are_uncorrelated(lag):
    x = stream_signs("seed 0")
    assert_independent(x[:-lag], x[lag:])


@pytest.mark.parametrize("pair", PAIRS, ids=" | ".join)
def test_different_seeds_and_counters_give_uncorrelated_streams(pair):
    assert_independent(*map(stream_signs, pair))


@pytest.mark.parametrize("pair", PAIRS, ids=" | ".join)
def test_two_streams_are_not_permutations_of_each_other(pair):
    """Unrelated streams share about N²/2³² words, here one; permutations all N."""
    a, b = (words(STREAMS[name]) for name in pair)
    assert len(np.intersect1d(a, b)) < 100


def test_a_sum_over_a_large_stream_is_that_of_uniform_words():
    """Two related streams would show up as equal sums, one badly mixed stream as an outlier."""
    means = np.array([words((0, step)).mean(dtype=np.float64) for step in range(200)]) / 2**32
    deviation = (means - 0.5) * np.sqrt(12 * N)
    assert np.abs(deviation).max() < 5
    assert 0.8 < deviation.std() < 1.2
    assert len(set(means)) == len(means)


def test_one_element_is_uniform_over_seeds_and_over_counters():
    """What a scalar parameter draws from step to step, or from run to run."""
    count = 4096
    by_seed = np.concatenate([words((seed,), 2) for seed in range(count)]).reshape(count, 2)
    by_counter = np.concatenate([words((0, step), 2) for step in range(count)]).reshape(count, 2)
    columns = [signs(x[:, element]) for x in (by_seed, by_counter) for element in (0, 1)]
    for column in columns:
        assert np.abs(column.mean(0)).max() < SIGMAS / np.sqrt(count)
        assert_independent(column[:-1], column[1:])
    for a, b in itertools.combinations(columns, 2):
        assert_independent(a, b)


def test_the_same_key_gives_the_same_bits_without_moving_the_global_generator():
    state = torch.get_rng_state()
    again = (random_bits(torch.empty(1000), stream_key(3, 1)) for _ in range(2))
    assert torch.equal(*again)
    assert torch.equal(torch.get_rng_state(), state)


def triple32(index: np.ndarray, first: np.uint32, second: np.uint32) -> np.ndarray:
    """triple32 in NumPy, the second key word after the first multiplication."""
    x = index.astype(np.uint32) ^ first
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= second
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))


def test_the_bits_are_those_of_the_documented_hash():
    rng = np.random.default_rng(0)
    for first, second in rng.integers(0, 2**32, (20, 2), dtype=np.uint32):
        ours = random_bits(torch.empty(1000), (int(first), int(second)))
        expected = triple32(np.arange(1000), first, second)
        assert (ours.numpy().view(np.uint32) == expected).all()


@pytest.mark.parametrize("count, length", [(1025, 1024), (4096, 1024), (7840, 1120), (10**6, 8000)])
def test_those_of_large_tensors_are_products_of_rows_and_columns(count, length):
    """Rows of the largest length that divides the count and 2¹⁰·3²·5³·7, if that is at least 64."""
    assert row_length(count) == length
    rng, rows = np.random.default_rng(1), -(-count // length)
    for first, second in rng.integers(0, 2**32, (5, 2), dtype=np.uint32):
        hashes = triple32(np.arange(length + 2 * rows), first, second)
        b, a, c = np.split(hashes, [length, length + rows])
        expected = ((a[:, None] + b) * (c | np.uint32(1))[:, None]).ravel()[:count]
        expected ^= expected >> np.uint32(15)
        ours = random_bits(torch.empty(count), (int(first), int(second)))
        assert (ours.numpy().view(np.uint32) == expected).all()


@pytest.mark.parametrize("count", [65536, 65537, 7840 * 9])
def test_sums_over_rows_and_columns_are_those_of_independent_words(count):
    """What a rounding error that repeats along a dimension adds up to."""
    length = row_length(count)
    whole = count // length * length
    for axis in (0, 1):
        sums = np.concatenate(
            [
                (words((5, step), count)[:whole].reshape(-1, length) / 2**32 - 0.5).sum(axis)
                for step in range(20)
            ]
        )
        terms = (whole // length, length)[axis]
        ratio = sums.var() / (terms / 12)
        assert abs(ratio - 1) < 6 * np.sqrt(2 / len(sums))
        assert abs(sums.mean()) < 5 * np.sqrt(terms / 12 / len(sums))


@pytest.mark.parametrize("numbers", list(STREAMS.values()), ids=NAMES)
def test_a_tensor_seed_or_counter_gives_the_bits_of_the_int(numbers):
    tensors = tuple(torch.tensor(number, dtype=torch.int64) for number in numbers)
    assert (words(tensors) == words(numbers)).all()
    assert (words((numbers[0], *tensors[1:])) == words(numbers)).all()


def test_tensor_and_int_keys_agree_on_random_numbers():
    rng = np.random.default_rng(1)
    for seed, counter in rng.integers(-(2**63), 2**63 - 1, (200, 2)).tolist():
        as_ints = stream_key(seed, counter)
        as_tensors = stream_key(torch.tensor(seed), torch.tensor(counter))
        assert as_ints == tuple(word.item() for word in as_tensors)
        assert all(0 <= word < 2**32 for word in as_ints)


def test_each_bit_of_the_64_of_a_seed_counts():
    keys = {stream_key(0)} | {stream_key(1 << bit) for bit in range(64)}
    assert len(keys) == 65
    counted = {stream_key(0, 0)} | {stream_key(0, 1 << bit) for bit in range(64)}
    assert len(counted) == 65


def test_many_small_seeds_and_counters_have_distinct_keys():
    keys = {stream_key(seed, counter) for seed in range(200) for counter in range(200)}
    assert len(keys) == 200 * 200


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 0, 2), (2, 3, 4)])
def test_bits_have_the_shape_of_the_tensor_and_follow_its_row_major_order(shape):
    key = stream_key(0)
    bits = random_bits(torch.empty(shape), key)
    assert bits.shape == shape
    assert bits.dtype == torch.int32
    assert torch.equal(bits.reshape(-1), random_bits(torch.empty(bits.numel()), key))


def test_strides_and_dtype_do_not_matter():
    key = stream_key(0)
    expected = random_bits(torch.empty(6, 4), key)
    for other in (
        torch.empty(4, 6).t(),
        torch.empty(6, 8)[:, ::2],
        torch.empty(6, 1).expand(6, 4),
        torch.empty(6, 4, dtype=torch.float64),
    ):
        assert torch.equal(random_bits(other, key), expected)


def test_compiled_bits_are_the_eager_ones():
    def bits(x, seed, step):
        return random_bits(x, stream_key(seed, step))

    compiled = torch.compile(bits, fullgraph=True, backend="aot_eager")
    x = torch.empty(1000)
    for step in range(3):
        numbers = torch.tensor(5), torch.tensor(step)
        assert torch.equal(compiled(x, *numbers), bits(x, *numbers))
