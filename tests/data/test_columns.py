"""Parquet and Arrow files on their way into a token file."""

import subprocess
import sys

import pytest
from token_files import PROGRAM, read

from gka.data import texts as texts_of

pa = pytest.importorskip("pyarrow")


def write_parquet(path, table):
    import pyarrow.parquet as pq

    pq.write_table(table, path, row_group_size=2)


def write_arrow(path, table, make):
    with make(str(path), table.schema) as writer:
        writer.write_table(table, 2)


def column(*words):
    return subprocess.run([sys.executable, "-m", "gka.data", *map(str, words)], capture_output=True)


@pytest.mark.parametrize(
    "write",
    [
        write_parquet,
        lambda path, table: write_arrow(path, table, pa.ipc.new_file),
        lambda path, table: write_arrow(path, table, pa.ipc.new_stream),
    ],
    ids=["parquet", "arrow", "stream"],
)
def test_every_row_of_a_text_column_becomes_a_document(tmp_path, write):
    texts = ["one", "", "zwei\nZeilen", "三 \U0001f600", 'with "quotes"']
    write(tmp_path / "a.x", pa.table({"number": list(range(5)), "body": texts}))
    done = column(tmp_path / "a.x", "--column", "body")
    assert (done.returncode, done.stderr) == (0, b"")
    words = ["tokenize", "-", "--field", "body", "--out", tmp_path / "out"]
    subprocess.run([PROGRAM, *map(str, words)], input=done.stdout, check=True, capture_output=True)
    assert [bytes(d[:-1]).decode() for d in read(tmp_path / "out.tokens").documents] == texts

    with pytest.raises(ValueError, match="it has number, body"):
        list(texts_of(tmp_path / "a.x", "text"))
    with pytest.raises(ValueError, match="holds int64, not text"):
        list(texts_of(tmp_path / "a.x", "number"))
    write(tmp_path / "b.x", pa.table({"text": ["a", None]}))
    with pytest.raises(ValueError, match="row 1 of"):
        list(texts_of(tmp_path / "b.x"))
