"""Claims about images for convolutional nets, and about their augmentation."""

import re

import numpy
import pytest
import torch

from halp.data import DataError, Dataset, as_images, crop_and_flip, load_digits


def dataset(inputs: torch.Tensor, **changes) -> Dataset:
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    return Dataset("toy", inputs, labels, inputs + 0, labels, n_classes=10, **changes)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# One shape.


def test_digits_become_images_whose_pixels_are_repeated():
    data = load_digits()
    images = as_images(data)
    assert images.train_inputs.shape == (1437, 1, 32, 32)
    assert images.test_inputs.shape == (360, 1, 32, 32)
    for image, flat in zip(images.test_inputs, data.test_inputs, strict=True):
        expected = numpy.kron(flat.view(8, 8).numpy(), numpy.ones((4, 4)))
        numpy.testing.assert_array_equal(image[0], expected)
    assert torch.equal(images.train_labels, data.train_labels)
    assert images.n_classes == 10


def test_images_of_28_pixels_get_two_zeros_on_every_side():
    inputs = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    images = as_images(dataset(inputs)).train_inputs
    numpy.testing.assert_array_equal(
        images, numpy.pad(inputs.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)))
    )
    assert images.dtype == torch.float64


@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_32_pixels_stay_as_they_are(channels):
    data = dataset(torch.rand(2, channels, 32, 32))
    assert as_images(data).train_inputs is data.train_inputs


@pytest.mark.parametrize("shape", [(65,), (3, 28, 28), (1, 28, 29), (32, 32), (3, 32, 33), ()])
def test_other_shapes_are_refused(shape):
    with pytest.raises(DataError, match=re.escape(f"toy has inputs of shape {shape}")):
        as_images(dataset(torch.rand(2, *shape)))


def test_words_are_refused():
    words = torch.zeros(2, 64, dtype=torch.int64)
    with pytest.raises(DataError, match="toy has words, of which no images"):
        as_images(dataset(words, n_words=5))


# Augmentation.


def crops_of(image: numpy.ndarray) -> dict[tuple[int, int, bool], numpy.ndarray]:
    """Every outcome, by slicing: (rows down, columns right, mirrored) to the image."""
    _, height, width = image.shape
    padded = numpy.pad(image, ((0, 0), (4, 4), (4, 4)))
    crops = {}
    for down in range(9):
        for right in range(9):
            crop = padded[:, down : down + height, right : right + width]
            crops[down, right, False], crops[down, right, True] = crop, crop[:, :, ::-1]
    return crops


def outcomes(inputs: torch.Tensor, augmented: torch.Tensor) -> list[tuple[int, int, bool]]:
    """Which crop each image became; there must be exactly one."""
    found = []
    for image, result in zip(inputs, augmented, strict=True):
        same = [k for k, crop in crops_of(image.numpy()).items() if (crop == result.numpy()).all()]
        assert len(same) == 1
        found.append(same[0])
    return found


def test_each_image_becomes_a_crop_of_itself_padded_possibly_mirrored():
    inputs = torch.rand(40, 3, 12, 10)
    before, labels = inputs.clone(), torch.arange(40)
    augmented, same_labels = crop_and_flip(inputs, labels, generator())
    assert augmented.shape == inputs.shape
    assert len(set(outcomes(inputs, augmented))) > 30  # each image has its own
    assert torch.equal(inputs, before)
    assert same_labels is labels


def test_every_shift_and_both_sides_are_equally_likely():
    n = 16200
    inputs = torch.rand(1, 1, 9, 9).expand(n, 1, 9, 9)
    augmented, _ = crop_and_flip(inputs, torch.zeros(n), generator())
    keys = {crop.tobytes(): key for key, crop in crops_of(inputs[0].numpy()).items()}
    counts = dict.fromkeys(keys.values(), 0)
    for result in augmented:
        counts[keys[result.numpy().tobytes()]] += 1
    # 162 outcomes, 100 each expected: chi-squared of 161 degrees of freedom is 161 +- 18.
    chi_squared = sum((count - 100) ** 2 / 100 for count in counts.values())
    assert 90 < chi_squared < 250


def test_the_generator_decides():
    inputs, labels = torch.rand(20, 3, 32, 32), torch.zeros(20)

    def augmented(seed):
        return crop_and_flip(inputs, labels, generator(seed))[0]

    assert torch.equal(augmented(1), augmented(1))
    assert not torch.equal(augmented(1), augmented(2))


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    crop_and_flip(torch.rand(2, 3, 8, 8, generator=generator()), torch.zeros(2), generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_that_are_no_images_are_refused():
    with pytest.raises(DataError, match=r"not inputs of shape \(5, 64\)"):
        crop_and_flip(torch.zeros(5, 64), torch.zeros(5), generator())
