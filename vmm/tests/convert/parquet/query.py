"""What DuckDB and PyArrow make of Parquet: a line of JSON each.

query.py duckdb SQL...: the rows of each query. query.py pyarrow PLACE: schema, metadata, row groups and rows of a file,
or types and rows of a directory with partitions.
"""

import json
import sys


def duckdb(*queries):
    import duckdb

    for query in queries:
        yield duckdb.sql(query).fetchall()


def pyarrow(place):
    import os

    import pyarrow.dataset
    import pyarrow.parquet

    if os.path.isdir(place):
        table = pyarrow.dataset.dataset(place, partitioning="hive").to_table()
        yield {field.name: str(field.type) for field in table.schema}
    else:
        file = pyarrow.parquet.ParquetFile(place)
        table = file.read()
        yield {field.name: str(field.type) for field in table.schema}
        yield {key.decode(): value.decode() for key, value in file.metadata.metadata.items() if key[:7] == b"vmtrace"}
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        start = [group.column(1) for group in groups]
        assert all(column.path_in_schema == "start_ns" for column in start)
        yield [
            [group.num_rows, column.statistics.min, column.statistics.max, column.compression]
            for group, column in zip(groups, start)
        ]
        assert "RLE_DICTIONARY" in groups[0].column(0).encodings, groups[0].column(0).encodings
    yield table.to_pylist()


for line in {"duckdb": duckdb, "pyarrow": pyarrow}[sys.argv[1]](*sys.argv[2:]):
    print(json.dumps(line))
