#!/usr/bin/env python3
"""Reads a vmtrace stream from a file or a unix socket; needs nothing but Python (for compressed
ones 3.14, or the package zstandard).

Prints the records as `vmtrace report` does, with what was counted and sorted in the guest
at the end, or counts them per function (--counts). Everything that docs/stream.md lets a consumer verify is verified:
a stream that is torn, damaged or incomplete ends in an error and exit code 1.
"""

import argparse
import bisect
import collections
import heapq
import json
import os
import socket
import stat
import struct
import sys
import unicodedata
import zlib

MAGIC = b"\xf5vmtr\r\n\0"
MAX_PAYLOAD = 1 << 20
LOCAL, OPTIONAL = 1, 2
HEADER, SYMBOLS, TASKS, RECORDS, LOSS, MARK, WATERMARK, JOIN, END, TRACERS, VALUES = range(1, 12)
COUNTS, COMPRESSED = 13, 14
MAX_PLAIN, ZSTD = 1 << 20, 1
MARKS = ["attach", "pause", "resume", "filter", "detach", "exit", "agent", "note", "console", "events", "clock", "user"]
CONSUMER_SLOW = 3
ENTRY, RETURN, TAIL = 1, 2, 3
OF_ENTRY, OF_RETURN = 0, 1
MOST_COLUMNS = 32
MOST_HITS = (1 << 64) - 1
# What is sorted: the calls' durations, what they return, an argument. Words of a histogram behind its buckets.
OF_DURATIONS, OF_VALUES, OF_ARGUMENTS = 1, 2, 3
# Counts by caller, which is in the place of the bucket.
OF_CALLERS = 4
SUM, MISSED, NEGATIVE = 65, 66, 67
LOWEST = {0: 0, NEGATIVE: -(1 << 63), **{bucket: 1 << (bucket - 1) for bucket in range(1, 65)}}
BAR = 40
HAS_SP, HAS_VALUE, HAS_VALUES = 1, 2, 4


class StreamError(Exception):
    pass


def padded(length):
    return (length + 7) // 8 * 8


def text(raw):
    """Names come from the guest: nothing in them may reach a terminal's controls."""
    decoded = bytes(raw).decode("utf-8", "replace")
    return "".join("?" if unicodedata.category(c) == "Cc" else c for c in decoded)


def short(value):
    """A power of two, with a unit of 1024."""
    units = ["", "K", "M", "G", "T", "P", "E"]
    while value >= 1024 and len(units) > 1:
        value //= 1024
        units.pop(0)
    return f"{value}{units[0]}"


def quoted(raw, quote):
    """Text of the guest in quotes, escaped as in C."""
    shown = quote
    for c in bytes(raw).decode("utf-8", "surrogateescape"):
        if c in f"\\{quote}":
            shown += f"\\{c}"
        elif c in "\n\r\t":
            shown += {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[c]
        elif unicodedata.category(c) in ("Cc", "Cs"):
            shown += "".join(f"\\x{byte:02x}" for byte in c.encode("utf-8", "surrogateescape"))
        else:
            shown += c
    return shown + quote


def words_of(field):
    """How many words of 8 bytes a value takes."""
    if field["type"] in ("bool", "char", "pointer", "bits"):
        return 1
    size = field.get("bytes")
    # A type of a later version may have no size, or mean something else by it.
    known = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    return max(1, (size + 7) // 8) if known else 1


def number(raw, bits, signed):
    raw &= (1 << bits) - 1
    return raw - (1 << bits) if signed and raw >> (bits - 1) else raw


def value(field, raw):
    """What the bytes of a value's words say, as text."""
    kind = field["type"]
    whole = int.from_bytes(raw[:8], "little")
    if kind in ("signed", "unsigned"):
        return str(number(whole, 8 * field["bytes"], kind == "signed"))
    if kind == "bool":
        return "true" if number(whole, 8 * field["bytes"], False) else "false"
    if kind == "char":
        return quoted(raw[:1], "'")
    if kind == "enum":
        found = number(whole, 8 * field["bytes"], field.get("signed", False))
        names = (name for known, name in field["names"] if known == found)
        return text(next(names, str(found)).encode())
    if kind == "pointer":
        return f"{whole:#x}"
    if kind == "text":
        return quoted(raw[: field["bytes"]].split(b"\0")[0], '"')
    if kind == "bits":
        return str(number(whole >> field["shift"], field["width"], field.get("signed", False)))
    if kind == "words":
        words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
        return "[" + ", ".join(f"{word:#x}" for word in words) + "]"
    if kind == "raw":
        raw = raw[: field["bytes"]]
    # Also what only a later version knows.
    return f"{int.from_bytes(raw, 'little'):#x}" if len(raw) <= 8 else raw.hex()


def arguments(fields, failed, raw):
    """Values of arguments as `a=1, b=?`."""
    shown, used, at = [], set(), 0
    for index, field in enumerate(fields):
        name = plain = text(field["name"].encode())
        repeated = 2
        while name in used:
            name, repeated = f"{plain}#{repeated}", repeated + 1
        used.add(name)
        end = at + 8 * words_of(field)
        # What could not be read, or is not there.
        missing = failed >> index & 1 or end > len(raw)
        shown.append(f"{name}={'?' if missing else value(field, raw[at:end])}")
        at = end
    return ", ".join(shown)


def verify(start, head, payload):
    if zlib.crc32(payload, zlib.crc32(head[:12])) != struct.unpack_from("<I", head, 12)[0]:
        raise StreamError(f"frame at byte {start}: wrong check value")


def decompress(data, length):
    """At most one byte more than that length, whatever the data say."""
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            import zstandard as zstd
        except ImportError:
            raise StreamError("compressed stream: install the package zstandard, or use Python 3.14")
    try:
        if hasattr(zstd.ZstdDecompressor, "stream_reader"):
            return zstd.ZstdDecompressor().stream_reader(data).read(length + 1)
        return zstd.ZstdDecompressor().decompress(data, length + 1)
    except zstd.ZstdError as error:
        raise StreamError(f"a compressed frame: {error}")


def expanded(payload):
    """The frames inside of a compressed one, as (head, payload)."""
    length, size, frames, method = struct.unpack_from("<IIIB", payload)
    if method != ZSTD or length > MAX_PLAIN or 16 + size > len(payload):
        raise StreamError("a compressed frame that cannot be")
    plain = decompress(payload[16 : 16 + size], length)
    if len(plain) != length:
        raise StreamError("a compressed frame is not as long as it says")
    at = 0
    for _ in range(frames):
        if at + 16 > length:
            raise StreamError("a compressed frame has fewer frames than it says")
        end = at + 16 + struct.unpack_from("<I", plain, at + 4)[0]
        if end > length or plain[at] in (HEADER, END, COMPRESSED):
            raise StreamError("a compressed frame has one inside that cannot be there")
        yield plain[at : at + 16], plain[at + 16 : end]
        at = end
    if at != length:
        raise StreamError("a compressed frame has more inside than it says")


class Frames:
    """Frames of a stream, as (type, flags, payload), verified one by one."""

    def __init__(self, source):
        self.source = source
        self.offset = 0

    def take(self, length, place):
        data = b""
        while len(data) < length:
            more = self.source.read(length - len(data))
            if not more:
                where = self.offset + len(data)
                raise StreamError(f"torn stream: it stops at byte {where}, {place}")
            data += more
        self.offset += length
        return data

    def __iter__(self):
        prologue = self.take(16, "inside the first 16 bytes")
        magic, major, _minor, check = struct.unpack("<8sHHI", prologue)
        if magic != MAGIC:
            raise StreamError("not a vmtrace stream")
        if zlib.crc32(prologue[:12]) != check:
            raise StreamError("the version is damaged")
        if major not in (1, 2):
            raise StreamError(f"stream format {major} is not known, only 1 and 2 (compressed)")
        expected = None
        for start, head, payload in self.frames(compressed=major == 2):
            verify(start, head, payload)
            frame_type, flags, _, sequence = struct.unpack_from("<HHII", head)
            local = flags & LOCAL
            if expected is None and frame_type != HEADER:
                raise StreamError("the first frame is not a header")
            if expected is None or (local and frame_type == LOSS):
                expected = sequence
            if sequence != expected:
                raise StreamError(f"frame at byte {start}: number {sequence}, not {expected}")
            if not local:
                expected = (expected + 1) & 0xFFFFFFFF
            yield frame_type, flags, payload

    def frames(self, compressed):
        """All frames, those that were compressed as well, with the places where they begin."""
        frame_type = None
        while frame_type != END:
            start = self.offset
            head = self.take(16, "before the end frame")
            frame_type, _, length = struct.unpack_from("<HHI", head)
            if length > MAX_PAYLOAD or length % 8:
                raise StreamError(f"frame at byte {start}: impossible length {length}")
            payload = self.take(length, "inside a frame")
            if compressed and frame_type == COMPRESSED:
                verify(start, head, payload)
                for inside in expanded(payload):
                    yield start, *inside
            else:
                yield start, head, payload


class Merger:
    """Events of all vCPUs in one order; nothing is dropped, no vCPU is reordered."""

    def __init__(self, queues):
        self.queues = [collections.deque() for _ in range(queues)]
        self.last = [0] * queues

    def push(self, queue, ticks, event):
        self.last[queue] = max(self.last[queue], ticks)
        self.queues[queue].append((self.last[queue], event))

    def drain(self, until=float("inf")):
        heads = [(queue[0][0], number) for number, queue in enumerate(self.queues) if queue]
        heapq.heapify(heads)
        while heads and heads[0][0] <= until:
            number = heads[0][1]
            yield self.queues[number].popleft()[1]
            if self.queues[number]:
                heapq.heapreplace(heads, (self.queues[number][0][0], number))
            else:
                heapq.heappop(heads)


class Trace:
    """What a consumer knows of a trace while it reads."""

    def __init__(self):
        self.symbols = {}  # address: (size, name)
        self.starts = None  # their addresses in order, made when needed
        self.tasks = {}  # pid: name
        self.found = {}  # address: name, the answers of symbol()
        self.tracers = {}  # number: name
        self.formats = {}  # (function, tracer, of): what the values of records are
        self.sorted = {}  # (name, address, of, argument, tracer): {bucket: hits}
        self.counted = {}  # (name, tracer, address): {vCPU: hits}
        self.called = {}  # (name, tracer, address): {caller's name: hits}
        self.unknown = 0  # records of kinds of later versions
        self.returns = False  # whether returns and tail jumps are shown
        self.said = False

    def header(self, payload):
        fixed = struct.unpack_from("<QQQQII", payload)
        self.clock_hz, self.clock_start, self.base, self.slide, self.vcpus, pairs = fixed
        self.about, at = {}, 40
        for _ in range(pairs):
            key, value = struct.unpack_from("<HH", payload, at)
            texts = payload[at + 4 : at + 4 + key + value]
            self.about[text(texts[:key])] = text(texts[key:])
            at += padded(4 + key + value)
        self.records = [0] * self.vcpus
        self.lost = [0] * self.vcpus
        self.missed = [0] * self.vcpus
        self.merger = Merger(self.vcpus + 1)  # the last queue is for marks

    def add_symbols(self, payload):
        count, at = struct.unpack_from("<I", payload)[0], 8
        for _ in range(count):
            address, size, name, module = struct.unpack_from("<QIHH", payload, at)
            texts = payload[at + 16 : at + 16 + name + module]
            shown = text(texts[:name])
            if module:
                shown += f" [{text(texts[name:])}]"
            self.symbols[address] = (size, shown)
            at += 16 + padded(name + module)
        self.starts, self.found = None, {}

    def add_tasks(self, payload):
        count = struct.unpack_from("<I", payload)[0]
        for pid, _tgid, comm in struct.iter_unpack("<II16s", payload[8 : 8 + 24 * count]):
            self.tasks[pid] = text(comm.split(b"\0")[0])

    def add_tracers(self, payload):
        count, at = struct.unpack_from("<I", payload)[0], 8
        for _ in range(count):
            number, name, description = struct.unpack_from("<IHH", payload, at)
            self.tracers[number] = text(payload[at + 8 : at + 8 + name])
            at += 8 + padded(name + description)

    def add_values(self, payload):
        count, at = struct.unpack_from("<I", payload)[0], 8
        for _ in range(count):
            function, tracer, of, _, length, _ = struct.unpack_from("<IBBHII", payload, at)
            if of in (OF_ENTRY, OF_RETURN):
                known = json.loads(payload[at + 16 : at + 16 + length])
                self.formats[function, tracer, of] = known["values"]
            at += 16 + padded(length)

    def symbol(self, address):
        """The name of the symbol that an address is in."""
        if address not in self.found:
            if self.starts is None:
                self.starts = sorted(self.symbols)
            index = bisect.bisect_right(self.starts, address) - 1
            name = f"{address:#x}"
            if index >= 0:
                size, known = self.symbols[self.starts[index]]
                if address - self.starts[index] < max(size, 1):
                    name = known
            self.found[address] = name
        return self.found[address]

    def add_records(self, payload):
        vcpu, count, first = struct.unpack_from("<IIQ", payload)
        if first != self.records[vcpu]:
            raise StreamError(f"vCPU {vcpu}: record {first} follows {self.records[vcpu]}")
        self.records[vcpu] += count
        at = 16
        for _ in range(count):
            ticks, kind, words, tracer, flags, pid = struct.unpack_from("<QBBBBI", payload, at)
            if kind in (ENTRY, RETURN, TAIL):
                function, other = struct.unpack_from("<II", payload, at + 16)
                task = "<idle>" if pid == 0 else self.tasks.get(pid, "<...>")
                more, args = "", ""
                if kind == RETURN and flags & HAS_VALUE:
                    # Behind the stack pointer, which returns always have.
                    raw = payload[at + 32 : at + 40]
                    known = self.formats.get((function, tracer, OF_RETURN))
                    shown = value(known[0], raw) if known else f"{int.from_bytes(raw, 'little'):#x}"
                    more = f", {shown}"
                fields = self.formats.get((function, tracer, OF_ENTRY))
                if kind == ENTRY and flags & HAS_VALUES and fields is not None:
                    start = at + (32 if flags & HAS_SP else 24)
                    failed = struct.unpack_from("<Q", payload, start)[0]
                    args = f"({arguments(fields, failed, payload[start + 8 : at + 8 * words])})"
                if tracer:
                    more += f" [{self.tracers.get(tracer, f'tracer{tracer}')}]"
                name = {ENTRY: "entry", RETURN: "return", TAIL: "tail"}[kind]
                event = (name, vcpu, ticks, task, pid, function, other, args, more)
                self.merger.push(vcpu, ticks, event)
            else:
                self.unknown += 1
            at += 8 * words  # other kinds are of later versions: skipped
        if at != len(payload):
            raise StreamError(f"vCPU {vcpu}: a batch of {len(payload)} bytes ends at {at}")

    def add_loss(self, payload):
        vcpu, reason, count, total = struct.unpack_from("<IIQQ", payload)
        if reason == CONSUMER_SLOW:
            self.records[vcpu] += count
            totals = self.missed
        else:
            totals = self.lost
        totals[vcpu] += count
        if totals[vcpu] != total:
            raise StreamError(f"vCPU {vcpu}: {totals[vcpu]} lost, but the frame says {total}")
        self.merger.push(vcpu, 0, ("loss", vcpu, count))

    def add_counts(self, payload):
        vcpu, tracer, of, named, count, _ = struct.unpack_from("<IBBHII", payload)
        if vcpu >= self.vcpus:
            raise StreamError(f"counts of vCPU {vcpu}, but there are {self.vcpus}")
        if of not in (OF_ENTRY, OF_DURATIONS, OF_VALUES, OF_ARGUMENTS, OF_CALLERS):
            return
        end = 16 + 16 * count
        if len(payload) < end:
            raise StreamError(f"{count} counts in {len(payload)} bytes")
        by = self.tracers.get(tracer, f"tracer{tracer}")
        argument = text(payload[end : end + named])
        for function, bucket, hits in struct.iter_unpack("<IIQ", payload[16:end]):
            address = self.base + function
            if of == OF_CALLERS:
                if hits:
                    callers = self.called.setdefault((self.symbol(address), by, address), {})
                    caller = self.symbol(self.base + bucket) if bucket else "?"
                    callers[caller] = min(callers.get(caller, 0) + hits, MOST_HITS)
                continue
            if of != OF_ENTRY:
                key = (self.symbol(address), address, of, argument, by)
                self.sort(self.sorted.setdefault(key, {}), bucket & 0xFF, hits)
                continue
            row = self.counted.setdefault((self.symbol(address), by, address), {})
            row[vcpu] = min(row.get(vcpu, 0) + hits, MOST_HITS)

    @staticmethod
    def sort(words, bucket, hits):
        total = words.get(bucket, 0) + hits
        words[bucket] = total & MOST_HITS if bucket == SUM else min(total, MOST_HITS)

    def callers(self):
        """What was counted by caller, in lines, the functions of most calls first."""
        every = [(-min(sum(callers.values()), MOST_HITS), key, callers) for key, callers in self.called.items()]
        several = len({key[1] for key in self.called}) > 1
        for calls, (name, tracer, _), callers in sorted(every, key=lambda it: it[:2]):
            title = f"{name} ({tracer})" if several else name
            one = ["s", ""]
            number = f"{-calls} call{one[calls == -1]} by {len(callers)} caller{one[len(callers) == 1]}"
            yield f"# callers of {title}: {number}"
            for caller, hits in sorted(callers.items(), key=lambda item: (-item[1], item[0])):
                permille = (hits * 1000 + -calls // 2) // -calls
                yield f"#{hits:>12} {permille // 10:>4}.{permille % 10}%  {caller}"

    def histograms(self):
        """What was sorted in the guest, in lines, those of most calls first."""
        every = []
        for key, words in self.sorted.items():
            rows = sorted((LOWEST[bucket], hits) for bucket, hits in words.items() if bucket in LOWEST and hits)
            every.append((-min(sum(hits for _, hits in rows), MOST_HITS), key, rows, words))
        several = len({key[4] for key in self.sorted}) > 1
        for calls, (name, _, of, argument, tracer), rows, words in sorted(every, key=lambda it: it[:2]):
            calls = -calls
            label = {OF_DURATIONS: "duration_ns", OF_VALUES: "retval"}.get(of, argument)
            title = f"{name} ({tracer})" if several else name
            line = f"# histogram: {title}, {label}: {calls} call{'' if calls == 1 else 's'}"
            if calls and of != OF_VALUES and not words.get(NEGATIVE):
                total = words.get(SUM, 0)
                line += f", average {total // calls}, total {total}"
            if words.get(MISSED):
                line += f", {words[MISSED]} more without a value"
            yield line
            most = max((hits for _, hits in rows), default=1)
            for low, hits in rows:
                shown = "below 0" if low < 0 else f"{low}" if low < 2 else f"{short(low)} ... {short(2 * low)}"
                yield f"#{shown:>16} {hits:>12} |{'@' * (hits * BAR // most):<{BAR}}|"

    def table(self):
        """What was counted, in lines: columns that say nothing are left out."""
        rows = [(min(sum(row.values()), MOST_HITS), *key, row) for key, row in self.counted.items()]
        rows = sorted((row for row in rows if row[0]), key=lambda row: (-row[0], *row[1:4]))
        if not rows:
            return
        functions = len({(name, address) for _, name, _, address, _ in rows})
        calls = min(sum(row[0] for row in rows), MOST_HITS)
        one = ["s", ""]
        yield f"# counted: {functions} function{one[functions == 1]}, {calls} call{one[calls == 1]}"
        vcpus = sorted({vcpu for *_, row in rows for vcpu, hits in row.items() if hits})
        vcpus = vcpus if 2 <= len(vcpus) <= MOST_COLUMNS else []
        tracers = {row[2] for row in rows}
        width = max(6, min(24, max(map(len, tracers))))

        def line(hits, cells, tracer, name):
            shown = f"#{hits:>12}" + "".join(f"  {cell:>10}" for cell in cells)
            return shown + (f"  {tracer:<{width}}" if len(tracers) > 1 else "") + f"  {name}"

        yield line("hits", [f"[{vcpu:03}]" for vcpu in vcpus], "tracer", "function")
        for total, name, tracer, _, row in rows:
            yield line(total, [row.get(vcpu, 0) for vcpu in vcpus], tracer, name)

    def add_mark(self, payload):
        ticks, duration, kind, length = struct.unpack_from("<QQII", payload)
        name = MARKS[kind - 1] if 1 <= kind <= len(MARKS) else f"unknown-{kind}"
        self.merger.push(self.vcpus, ticks, ("mark", ticks, duration, name, payload[24 : 24 + length]))

    def totals(self, payload):
        """Totals per vCPU, and the text after them."""
        vcpus, length = struct.unpack_from("<II", payload)
        if vcpus != self.vcpus:
            raise StreamError(f"totals of {vcpus} vCPUs, but there are {self.vcpus}")
        end = 8 + 16 * vcpus
        pairs = list(struct.iter_unpack("<QQ", payload[8:end]))
        return [list(column) for column in zip(*pairs)], payload[end : end + length]

    def verify(self, payload):
        (records, lost), summary = self.totals(payload)
        if (records, lost) != (self.records, self.lost):
            raise StreamError(
                f"seen {self.records} records and {self.lost} lost, "
                f"the totals say {records} and {lost}"
            )
        return json.loads(summary)

    def seconds(self, ticks):
        since = abs(ticks - self.clock_start)
        micros = (since * 1_000_000 + self.clock_hz // 2) // self.clock_hz
        whole = f"{'-' if ticks < self.clock_start else ''}{micros // 1_000_000}"
        return f"{whole:>5}.{micros % 1_000_000:06}"

    def line(self, event):
        """One event as ftrace prints it."""
        if event[0] == "loss":
            return f"CPU:{event[1]} [LOST {event[2]} EVENTS]"
        if event[0] == "mark":
            _, ticks, duration, kind, details = event
            line = f"#{'':32}{self.seconds(ticks)}: {kind}"
            if duration:
                micros = (duration + 500) // 1000
                line += f" {micros // 1000}.{micros % 1000:03} ms"
            return line + (f": {text(details)}" if details else "")
        name, vcpu, ticks, task, pid, function, caller, args, more = event
        if name != "entry" and not self.returns:
            said, self.said = self.said, True
            return None if said else "# returns are not printed in this form: see --format graph"
        line = " " * (16 - len(task.encode())) + f"{task}-{pid:<7} [{vcpu:03}]  {self.seconds(ticks)}: "
        if name == "return":
            return f"{line}return of {self.symbol(self.base + function)}{more}"
        line += self.symbol(self.base + function)
        if name == "tail":
            return f"{line} jumps to {self.symbol(self.base + caller) if caller else '?'}{more}"
        line += args
        return line + (f" <-{self.symbol(self.base + caller)}" if caller else "")


def open_source(path):
    if stat.S_ISSOCK(os.stat(path).st_mode):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(b"raw\n")
        return connection.makefile("rb")
    return open(path, "rb")


def consume(source, show, finish, returns=False):
    """Reads a stream to its end; returns the trace and its summary."""
    trace = Trace()
    trace.returns = returns
    add = {
        SYMBOLS: trace.add_symbols,
        TASKS: trace.add_tasks,
        RECORDS: trace.add_records,
        LOSS: trace.add_loss,
        MARK: trace.add_mark,
        TRACERS: trace.add_tracers,
        VALUES: trace.add_values,
        COUNTS: trace.add_counts,
    }
    summary = None
    try:
        for frame_type, flags, payload in Frames(source):
            if frame_type == HEADER:
                trace.header(payload)
            elif frame_type == JOIN:
                trace.records, trace.lost = trace.totals(payload)[0]
            elif frame_type == WATERMARK:
                for event in trace.merger.drain(struct.unpack_from("<Q", payload)[0]):
                    show(trace, event)
            elif frame_type == END:
                summary = trace.verify(payload)
            elif frame_type in add:
                add[frame_type](payload)
            elif not flags & OPTIONAL:
                raise StreamError(f"frame type {frame_type} needs a newer consumer")
    finally:
        # Also of a torn stream: what is whole is shown.
        if hasattr(trace, "merger"):
            for event in trace.merger.drain():
                show(trace, event)
            finish(trace)
    return trace, summary


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="file or unix socket")
    parser.add_argument("--counts", action="store_true", help="count entries per function")
    parser.add_argument("--returns", action="store_true", help="show returns and tail jumps, too")
    options = parser.parse_args()
    counts = collections.Counter()

    def count(trace, event):
        if event[0] == "entry":
            counts[trace.symbol(trace.base + event[5])] += 1

    def show(trace, event):
        line = trace.line(event)
        if line is not None:
            print(line)

    def finish(trace):
        if not options.counts:
            for line in [*trace.table(), *trace.callers(), *trace.histograms()]:
                print(line)
            return
        for (name, *_), row in [*trace.counted.items(), *trace.called.items()]:
            counts[name] += sum(row.values())

    try:
        with open_source(options.source) as source:
            shown = count if options.counts else show
            trace, summary = consume(source, shown, finish, options.returns)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (StreamError, OSError) as error:
        sys.stdout.flush()
        print(f"{options.source}: {error}", file=sys.stderr)
        return 1
    finally:
        for name, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            print(f"{number:>10} {name}")
    if trace.unknown:
        print(f"{trace.unknown} records of unknown kinds were skipped", file=sys.stderr)
    print(
        f"{sum(trace.records)} records, {sum(trace.lost)} lost, "
        f"{sum(trace.missed)} missed; guest: {summary['exit']}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
