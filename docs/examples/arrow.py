#!/usr/bin/env python3
"""Loads a trace into a PyArrow table; needs pyarrow and vmtrace (another path of it: VMTRACE=PATH).

`vmtrace convert` writes the trace as Parquet, which PyArrow reads with all CPUs. The columns are in docs/convert.md.
Prints the number of rows and how often each function was called, the most frequent first.
"""

import argparse
import os
import subprocess
import tempfile

import pyarrow.compute
import pyarrow.parquet


def load(trace, columns=None):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.parquet")
        subprocess.run([os.environ.get("VMTRACE", "vmtrace"), "convert", trace, "-o", file], check=True)
        return pyarrow.parquet.read_table(file, columns=columns)


def calls(table):
    is_call = pyarrow.compute.is_in(table["kind"].cast("string"), pyarrow.array(["call", "entry"]))
    counts = table.filter(is_call).group_by("function").aggregate([("function", "count")])
    return counts.sort_by([("function_count", "descending"), ("function", "ascending")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="file of vmtrace boot -o")
    table = load(parser.parse_args().trace)
    print(f"{table.num_rows} rows")
    for row in calls(table).to_pylist():
        print(f"{row['function_count']:>10}  {row['function']}")
