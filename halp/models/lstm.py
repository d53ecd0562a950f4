"""A tagger that reads a sentence word by word."""

from torch import Tensor, nn


class LSTMTagger(nn.Module):
    """Tags every word of a sentence: an embedding, an LSTM and a linear layer.

    The LSTM runs forward, so that what follows a word does not change its logits: sentences may be
    padded at their end with any word index.

    Args:
        n_words: size of the vocabulary.
        n_tags: number of logits of a word.
        embedding: numbers that stand for a word.
        hidden: width of the LSTM's state.
    """

    def __init__(self, n_words: int, n_tags: int, embedding: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_words, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, n_tags)

    def forward(self, words: Tensor) -> Tensor:
        """Map int64 word indices of shape (N, T) to logits of shape (N, n_tags, T)."""
        states, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.linear(states)
        return logits.transpose(1, 2)
