"""The quickstart's text exists, is the same every time, and is split by name alone."""

from pathlib import Path

import pytest

from megatron_fp8.prepare.quickstart import CorpusError, Document, read_corpus


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return read_corpus()


def test_it_is_enough_text_in_a_fixed_order(corpus: list[Document]) -> None:
    assert sum(len(document.text) for document in corpus) > 4e6
    names = [document.name for document in corpus]
    assert len(set(names)) == len(names)
    assert read_corpus() == corpus


def test_tests_packages_and_tables_are_excluded(corpus: list[Document]) -> None:
    for document in corpus:
        parts = document.name.split("/")
        assert not {"test", "tests", "site-packages", "encodings"}.intersection(parts), document.name
        assert document.text


def test_documentation_is_prose_not_source(corpus: list[Document]) -> None:
    topics = {document.name: document.text for document in corpus if document.name.startswith("pydoc_data/")}
    if not topics:
        pytest.skip("this Python comes without pydoc's topics")
    assert topics["pydoc_data/topics/with"].lstrip().startswith("The")


def test_the_split_depends_on_the_name_alone(corpus: list[Document]) -> None:
    share = sum(len(document.text) for document in corpus if document.is_validation) / sum(
        len(document.text) for document in corpus
    )
    assert 0.01 < share < 0.12
    assert [Document(document.name, "").is_validation for document in corpus] == [
        document.is_validation for document in corpus
    ]


def test_the_limit_is_kept(corpus: list[Document]) -> None:
    limited = read_corpus(limit_bytes=2_000_000)
    assert limited == corpus[: len(limited)]
    assert 1_500_000 < sum(len(document.text.encode()) for document in limited) <= 2_000_000


@pytest.mark.parametrize("kind", ["compiled", "zipped"])
def test_a_library_without_sources_is_refused(kind: str, tmp_path: Path) -> None:
    library = tmp_path / ("python311.zip" if kind == "zipped" else "python3.11")
    if kind == "compiled":
        library.mkdir()
        (library / "os.pyc").write_bytes(b"\x00")
    else:
        library.write_bytes(b"PK")
    with pytest.raises(CorpusError, match="stripped, compiled or inside a zip file") as caught:
        read_corpus(library)
    assert str(library) in str(caught.value)
    assert "preprocess_data.py" in str(caught.value)


def test_files_in_other_encodings_are_excluded(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 'é'\n" * 200_000, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("x = 'é'\n".encode("latin-1"))
    assert [document.name for document in read_corpus(tmp_path)] == ["good.py"]
