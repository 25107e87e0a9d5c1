"""A text column of Parquet or Arrow files as JSON lines, for ``gka tokenize`` (needs pyarrow)::

python -m gka.data part-*.parquet --column text | gka tokenize - --field text --out data/corpus
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def _batches(path: Path, column: str) -> Iterator:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        mark = file.read(6)
    if mark.startswith(b"PAR1"):
        with pq.ParquetFile(path) as table:
            _check(path, column, table.schema_arrow)
            yield from table.iter_batches(columns=[column])
        return
    with pa.memory_map(str(path)) as source:  # Arrow's file, or its stream, which datasets' caches are
        reader = pa.ipc.open_file(source) if mark == b"ARROW1" else pa.ipc.open_stream(source)
        _check(path, column, reader.schema)
        if mark == b"ARROW1":
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            yield from reader


def _check(path: Path, column: str, schema) -> None:
    if column not in schema.names:
        raise ValueError(f"{path} has no column '{column}'; it has {', '.join(schema.names)}")
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise ValueError(f"column '{column}' of {path} holds {kind}, not text")


def texts(path: str | Path, column: str = "text") -> Iterator[str]:
    """The texts of a column, row by row. A row without a text (null) is an error that names the row."""
    row = 0
    for batch in _batches(Path(path), column):
        for text in batch.column(batch.schema.get_field_index(column)).to_pylist():
            if text is None:
                raise ValueError(f"row {row} of {path} has no '{column}' (it is null)")
            yield text
            row += 1


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m gka.data", description=__doc__.split("\n")[0])
    options.add_argument("files", nargs="+", metavar="FILE")
    options.add_argument("--column", default="text")
    arguments = options.parse_args()
    try:
        import pyarrow
    except ImportError:
        sys.exit("gka: Parquet and Arrow files are read by pyarrow; install it (pip install pyarrow)")
    try:
        for path in arguments.files:
            for text in texts(path, arguments.column):
                sys.stdout.write(json.dumps({arguments.column: text}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read has said what is wrong
        return 1
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        sys.exit(f"gka: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
