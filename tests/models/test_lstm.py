"""Claims about the tagger."""

import torch
from torch.nn.functional import cross_entropy

from halp.data import IGNORED
from halp.models import LSTMTagger


def tagger() -> LSTMTagger:
    torch.manual_seed(0)
    return LSTMTagger(n_words=50, n_tags=5, embedding=8, hidden=6).double()


def test_it_has_the_parameters_of_its_three_layers():
    n = sum(p.numel() for p in LSTMTagger(1000, 12, embedding=32, hidden=64).parameters())
    assert n == 1000 * 32 + 4 * 64 * (32 + 64 + 2) + 12 * (64 + 1)


def test_logits_are_laid_out_as_cross_entropy_takes_them():
    words = torch.randint(0, 50, (3, 7))
    logits = tagger()(words)
    assert logits.shape == (3, 5, 7)
    assert cross_entropy(logits, torch.zeros(3, 7, dtype=torch.int64)).isfinite()


def test_a_word_is_tagged_from_it_and_the_words_before_it():
    model = tagger()
    words = torch.randint(0, 50, (1, 6))
    h, c = torch.zeros(2, 6, dtype=torch.float64)
    lstm = model.lstm
    for t in range(6):
        x = model.embedding.weight[words[0, t]]
        gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        expected = model.linear.weight @ h + model.linear.bias
        torch.testing.assert_close(model(words)[0, :, t], expected)


def test_padding_changes_neither_logits_nor_loss_nor_gradient():
    words, tags = torch.randint(1, 50, (2, 4)), torch.randint(0, 5, (2, 4))
    padded = torch.cat([words, torch.tensor([[0, 0, 0], [7, 49, 3]])], 1)
    padded_tags = torch.cat([tags, torch.full((2, 3), IGNORED)], 1)
    model = tagger()
    torch.testing.assert_close(model(padded)[:, :, :4], model(words))
    results = []
    for inputs, labels in ((words, tags), (padded, padded_tags)):
        loss = cross_entropy(model(inputs), labels)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(results[0], results[1])
