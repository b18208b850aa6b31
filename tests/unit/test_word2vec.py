"""The example of word2vec: its dictionary, its n-grams, the tutorial's files, and what its optimizer does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.paths import EXAMPLES

EXAMPLE = EXAMPLES / "word2vec"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports one of the example's modules as its scripts do."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_frequent_words_have_ids_by_their_frequency(module: Callable[[str], ModuleType]) -> None:
    """The alphabet decides between equals; no more than asked for. Each sentence has a start and an end."""
    corpus = module("corpus")
    sentences = [["a", "b", "a"], ["c", "a"], ["b", "d"]]
    word_dict = corpus.build_dict(sentences, cutoff=1)
    assert list(word_dict) == ["<e>", "<s>", "a", "b", "<unk>"]
    assert list(word_dict.values()) == [0, 1, 2, 3, 4]
    assert list(corpus.build_dict(sentences, cutoff=1, most=3)) == ["<e>", "<s>", "<unk>"]


def test_n_grams_lie_within_a_sentence(module: Callable[[str], ModuleType]) -> None:
    """With its start and its end; a short sentence has none."""
    corpus = module("corpus")
    word_dict = {"<s>": 0, "<e>": 1, "a": 2, "b": 3, "<unk>": 4}
    found = list(corpus.n_grams([["a", "b"], ["a", "b", "x", "a"]], word_dict))
    assert found == [(0, 2, 3, 4, 2), (2, 3, 4, 2, 1)]


TABLE = np.array([[0.1, -1e-30], [2.0, 3.0], [1 / 3, 7e20]], np.float32)


def test_the_tutorial_reads_our_files(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """As its own loader does: `word id` lines, and numpy's text; each number is the one that was saved."""
    module("embeddings").save_embeddings(tmp_path, ["<s>", "the", "Ä"], TABLE)
    word_dict = {}
    with (tmp_path / "word_dict").open(encoding="utf-8") as lines:
        for line in lines:
            key, value = line.strip().split(" ")
            word_dict[key] = int(value)
    assert word_dict == {"<s>": 0, "the": 1, "Ä": 2}
    loaded = np.loadtxt(tmp_path / "embedding_table", delimiter=",")
    assert np.array_equal(loaded.astype(np.float32), TABLE)


@pytest.mark.parametrize("order", [("<s>", "the", "Ä"), ("Ä", "<s>", "the")])
def test_the_tutorial_s_files_are_read(
    module: Callable[[str], ModuleType], tmp_path: Path, order: tuple[str, ...]
) -> None:
    """As its own `save_dict_and_embedding` writes them, the words in any order."""
    word_dict = {"<s>": 0, "the": 1, "Ä": 2}
    with (tmp_path / "word_dict").open("w", encoding="utf-8") as file:
        file.writelines(f"{key} {word_dict[key]}\n" for key in order)
    with (tmp_path / "embedding_table").open("w", encoding="utf-8") as file:
        np.savetxt(file, TABLE, delimiter=",", newline="\n")
    words, table = module("embeddings").load_embeddings(tmp_path)
    assert words == ["<s>", "the", "Ä"]
    assert table.dtype == np.float32
    assert np.array_equal(table, TABLE)


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"a\nb\n", b"a 0\nb 0\n", b"a 0\nb 2\n", b"a x\n", b"a b 0\n"])
def test_a_dictionary_without_each_id_is_refused(
    module: Callable[[str], ModuleType], tmp_path: Path, content: bytes
) -> None:
    """Nor is one that is a list of words, or no text."""
    embeddings = module("embeddings")
    (tmp_path / "word_dict").write_bytes(content)
    with pytest.raises(embeddings.EmbeddingError, match=r"no dictionary|each id from 0 on once"):
        embeddings.load_words(tmp_path)


@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
@pytest.mark.parametrize(
    "content", [b"", b"1,2\n", b"1,2\n3\n", b"1,2\n3,x\n", b"1,2\n3,4\n5,6\n", b"\0\0\0\0\4\0\0\0"]
)
def test_files_that_do_not_belong_together_are_refused(
    module: Callable[[str], ModuleType], tmp_path: Path, content: bytes
) -> None:
    """Torn, of another format, or of another number of words."""
    embeddings = module("embeddings")
    with pytest.raises(embeddings.EmbeddingError, match="no dictionary"):
        embeddings.load_embeddings(tmp_path)
    embeddings.save_words(tmp_path, ["a", "b"])
    with pytest.raises(embeddings.EmbeddingError, match="no embeddings"):
        embeddings.load_embeddings(tmp_path)
    (tmp_path / "embedding_table").write_bytes(content)
    with pytest.raises(embeddings.EmbeddingError, match=r"no embeddings|do not belong to 2 words"):
        embeddings.load_embeddings(tmp_path)


def test_the_nearest_words_have_the_smallest_angles(module: Callable[[str], ModuleType]) -> None:
    """However long the embeddings are; the word itself is not among them."""
    embeddings = module("embeddings")
    table = np.array([[1, 0], [9, 1], [0, 1], [-1, 0]], np.float32)
    found = embeddings.nearest(["east", "easter", "north", "west"], table, "east", 2)
    assert [word for word, _ in found] == ["easter", "north"]
    assert found[0][1] == pytest.approx(9 / 82**0.5)
    with pytest.raises(embeddings.EmbeddingError, match="'south' is not among the 4 words"):
        embeddings.nearest(["east", "easter", "north", "west"], table, "south")


@pytest.mark.slow
def test_the_optimizer_is_that_of_the_tutorial(module: Callable[[str], ModuleType]) -> None:
    """AdaGrad moves biases twice as far, and weights decay, but not embeddings."""
    pytest.importorskip("paddle")
    network = module("network")
    import paddle

    def step(gradient: float) -> dict[str, np.ndarray]:
        model = network.NGram(7)
        optimizer = network.adagrad(model)
        before = {name: value.numpy().copy() for name, value in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = paddle.full_like(parameter, gradient)
        optimizer.step()
        return {name: value.numpy() - before[name] for name, value in model.named_parameters()}

    moved = step(1.0)
    assert moved["embedding.weight"] == pytest.approx(-3e-3, rel=1e-3)
    assert moved["hidden.weight"] == pytest.approx(-3e-3, rel=1e-3)
    assert moved["hidden.bias"] == pytest.approx(-6e-3, rel=1e-3)
    assert moved["output.bias"] == pytest.approx(-6e-3, rel=1e-3)
    decayed = step(0.0)
    assert np.abs(decayed["embedding.weight"]).max() == 0
    assert np.abs(decayed["hidden.weight"]).max() > 1e-4
    assert np.abs(decayed["output.weight"]).max() > 1e-4
