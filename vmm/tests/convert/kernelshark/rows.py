"""What KernelShark's own library makes of a trace.dat: a line of JSON for each row, as KernelShark lists them.

rows.py FILE: [time in ns, vCPU, pid, task, latency, event, info] of each, in order of time.
"""

import ctypes
import json
import sys


class Entry(ctypes.Structure):
    """A row: struct kshark_entry of libkshark.h."""

    _fields_ = [
        ("next", ctypes.c_void_p),
        ("visible", ctypes.c_uint16),
        ("stream_id", ctypes.c_int16),
        ("event_id", ctypes.c_int16),
        ("cpu", ctypes.c_int16),
        ("pid", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("ts", ctypes.c_int64),
    ]


def function(name, result, *arguments):
    function = getattr(shark, name)
    function.restype, function.argtypes = result, arguments
    return function


shark = ctypes.CDLL("libkshark.so.2")
row = ctypes.POINTER(Entry)
context, rows = ctypes.c_void_p(), ctypes.POINTER(row)()
instance = function("kshark_instance", ctypes.c_bool, ctypes.c_void_p)
start = function("kshark_open", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
load = function("kshark_load_entries", ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
texts = [
    function(f"kshark_get_{name}", ctypes.c_char_p, row) for name in ("task", "aux_info", "event_name", "info")
]

assert instance(ctypes.byref(context))
stream = start(context, sys.argv[1].encode())
assert stream >= 0, f"not opened: {stream}"
count = load(context, stream, ctypes.byref(rows))
assert count >= 0, f"not loaded: {count}"
for entry in rows[:count]:
    shown = [text(entry) for text in texts]
    shown = [(text or b"").decode() for text in shown]
    it = entry.contents
    print(json.dumps([it.ts, it.cpu, it.pid, *shown]))
