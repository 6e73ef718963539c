//! The parts of a trace.dat, in the order of version 6 and of version 7
//! (`trace-cmd.dat.v6.5`, `trace-cmd.dat.v7.5`).

use std::io::{self, Write};

use super::pages::{PAGE, Pages};

/// What both versions begin with.
const MAGIC: &[u8] = b"\x17\x08\x44tracing";

const HEADER_PAGE: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
    \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
    \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
    \tfield: char data;\toffset:16;\tsize:4080;\tsigned:1;\n";

const HEADER_EVENT: &str = "# compressed entry header\n\ttype_len    :    5 bits\n\
    \ttime_delta  :   27 bits\n\tarray       :   32 bits\n\n\tpadding     : type == 29\n\
    \ttime_extend : type == 30\n\ttime_stamp : type == 31\n\tdata max type_len  == 28\n";

/// The fields that all events have.
pub(super) const COMMON: &str = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
    \tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n\
    \tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;\n\
    \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n";

/// Numbers of events, as the kernel has them.
pub(super) const FUNCTION: u16 = 1;
pub(super) const PRINT: u16 = 5;
pub(super) const GRAPH_EXIT: u16 = 10;
pub(super) const GRAPH_ENTRY: u16 = 11;

const EVENTS: [(&str, u16, &str, &str); 4] = [
    (
        "function",
        FUNCTION,
        "\tfield:unsigned long ip;\toffset:8;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long parent_ip;\toffset:16;\tsize:8;\tsigned:0;\n",
        r#"" %ps <-- %ps", (void *)REC->ip, (void *)REC->parent_ip"#,
    ),
    (
        "funcgraph_entry",
        GRAPH_ENTRY,
        "\tfield:unsigned long func;\toffset:8;\tsize:8;\tsigned:0;\n\
         \tfield:int depth;\toffset:16;\tsize:4;\tsigned:1;\n",
        r#""--> %ps (%d)", (void *)REC->func, REC->depth"#,
    ),
    (
        "funcgraph_exit",
        GRAPH_EXIT,
        "\tfield:unsigned long func;\toffset:8;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long long calltime;\toffset:16;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long long rettime;\toffset:24;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long overrun;\toffset:32;\tsize:8;\tsigned:0;\n\
         \tfield:int depth;\toffset:40;\tsize:4;\tsigned:1;\n",
        r#""<-- %ps (%d) (start: %llx  end: %llx) over: %d", (void *)REC->func, REC->depth, REC->calltime, REC->rettime, REC->depth"#,
    ),
    (
        "print",
        PRINT,
        "\tfield:unsigned long ip;\toffset:8;\tsize:8;\tsigned:0;\n\
         \tfield:char buf[];\toffset:16;\tsize:0;\tsigned:1;\n",
        r#""%s", REC->buf"#,
    ),
];

/// Options, by their numbers.
const CPUSTAT: u16 = 2;
const BUFFER: u16 = 3;
const TRACECLOCK: u16 = 4;
const UNAME: u16 = 5;
const CPUCOUNT: u16 = 8;
const VERSION: u16 = 9;
const TRACEID: u16 = 11;
const HEADER_INFO: u16 = 16;
const CMDLINES: u16 = 21;

/// What is in the file beside the pages.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) vcpus: u32,
    pub(super) kallsyms: String,
    pub(super) cmdlines: String,
    pub(super) uname: String,
    pub(super) version: String,
    /// A text for each vCPU.
    pub(super) stats: Vec<String>,
    /// Formats of events, by their systems.
    pub(super) systems: Vec<(Box<str>, Vec<String>)>,
    /// A number that tells this trace from others.
    pub(super) id: u64,
}

/// A file that is made in memory, but for the pages.
#[derive(Debug, Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    fn u16(&mut self, number: u16) -> &mut Self {
        self.raw(&number.to_le_bytes())
    }

    fn u32(&mut self, number: u32) -> &mut Self {
        self.raw(&number.to_le_bytes())
    }

    fn u64(&mut self, number: u64) -> &mut Self {
        self.raw(&number.to_le_bytes())
    }

    fn string(&mut self, text: &str) -> &mut Self {
        self.raw(text.as_bytes()).raw(&[0])
    }

    /// Text behind its length of 8 bytes.
    fn long(&mut self, text: &str) -> &mut Self {
        self.u64(text.len() as u64).raw(text.as_bytes())
    }

    /// Text behind its length of 4 bytes.
    fn short(&mut self, text: &str) -> io::Result<&mut Self> {
        let length = u32::try_from(text.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        Ok(self.u32(length).raw(text.as_bytes()))
    }

    fn option(&mut self, id: u16, data: &[u8]) -> &mut Self {
        self.u16(id).u32(u32::try_from(data.len()).unwrap_or(0)).raw(data)
    }

    /// A section of version 7; returns where it begins.
    fn section(&mut self, id: u16, data: &[u8]) -> u64 {
        let at = self.0.len() as u64;
        self.u16(id).u16(0).u32(0).u64(data.len() as u64).raw(data);
        at
    }

    fn align(&mut self) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(PAGE), 0);
        self.0.len() as u64
    }
}

fn header_info() -> Bytes {
    let mut part = Bytes::default();
    part.string("header_page").long(HEADER_PAGE).string("header_event").long(HEADER_EVENT);
    part
}

fn event_formats() -> Bytes {
    let mut part = Bytes::default();
    part.u32(u32::try_from(EVENTS.len()).unwrap_or(0));
    for (name, id, fields, print) in EVENTS {
        part.long(&format!(
            "name: {name}\nID: {id}\nformat:\n{COMMON}\n{fields}\nprint fmt: {print}\n"
        ));
    }
    part
}

/// Events that are not ftrace's own, by their systems.
fn systems(contents: &Contents) -> Bytes {
    let mut part = Bytes::default();
    part.u32(u32::try_from(contents.systems.len()).unwrap_or(0));
    for (system, formats) in &contents.systems {
        part.string(system).u32(u32::try_from(formats.len()).unwrap_or(0));
        for format in formats {
            part.long(format);
        }
    }
    part
}

/// Options that both versions have.
fn options(contents: &Contents) -> Bytes {
    let mut part = Bytes::default();
    for stat in &contents.stats {
        part.option(CPUSTAT, format!("{stat}\0").as_bytes());
    }
    part.option(TRACECLOCK, b"[local]\0");
    part.option(UNAME, format!("{}\0", contents.uname).as_bytes());
    part.option(CPUCOUNT, &contents.vcpus.to_le_bytes());
    part.option(VERSION, format!("{}\0", contents.version).as_bytes());
    part.option(TRACEID, &contents.id.to_le_bytes());
    part
}

/// What a file begins with: its version, and that it is little-endian, of 64 bits, with pages.
fn beginning(version: &str) -> io::Result<Bytes> {
    let mut file = Bytes::default();
    let page = u32::try_from(PAGE).map_err(io::Error::other)?;
    file.raw(MAGIC).string(version).raw(&[0, 8]).u32(page);
    Ok(file)
}

/// Writes version 6.
pub(super) fn version_6(
    out: &mut impl Write,
    contents: &Contents,
    pages: &Pages,
) -> io::Result<()> {
    let mut file = beginning("6")?;
    file.raw(&header_info().0).raw(&event_formats().0);
    file.raw(&systems(contents).0);
    file.short(&contents.kallsyms)?.short("")?.long(&contents.cmdlines);
    file.u32(contents.vcpus);
    file.string("options  ").raw(&options(contents).0).u16(0);
    file.string("flyrecord");
    // Behind the offsets and sizes that come now, and the length of the clock's name (an option has that), which readers
    // look for there.
    let mut at =
        (file.0.len() as u64 + 16 * u64::from(contents.vcpus) + 8).next_multiple_of(PAGE as u64);
    for size in pages.sizes() {
        file.u64(at).u64(size);
        at += size;
    }
    file.u64(0);
    file.align();
    out.write_all(&file.0)?;
    pages.copy(out)
}

/// Writes version 7, without compression.
pub(super) fn version_7(
    out: &mut impl Write,
    contents: &Contents,
    pages: &Pages,
) -> io::Result<()> {
    let mut file = beginning("7")?;
    file.string("none").string("");
    let first = file.0.len();
    file.u64(0);
    let (mut kallsyms, mut printk, mut cmdlines) = <(Bytes, Bytes, Bytes)>::default();
    kallsyms.short(&contents.kallsyms)?;
    printk.short("")?;
    cmdlines.long(&contents.cmdlines);
    // In the order of their numbers, from that of the header's on.
    let systems = systems(contents);
    let sections = [header_info(), event_formats(), systems, kallsyms, printk, cmdlines];
    let mut options = options(contents);
    for (id, data) in (HEADER_INFO..=CMDLINES).zip(sections) {
        let at = file.section(id, &data.0);
        options.option(id, &at.to_le_bytes());
    }
    // Options come before the pages; they say where those are. The sizes do not depend on that.
    let buffer = |section: u64, data: u64| {
        let mut part = Bytes::default();
        let page = u32::try_from(PAGE).unwrap_or(0);
        part.u64(section).string("").string("local").u32(page).u32(contents.vcpus);
        let mut at = data;
        for (vcpu, size) in (0..).zip(pages.sizes()) {
            part.u32(vcpu).u64(at).u64(size);
            at += size;
        }
        part
    };
    let done = [0; 8];
    let head = 16;
    let length = options.0.len() + 6 + buffer(0, 0).0.len() + 6 + done.len();
    let section = file.0.len() as u64 + head + length as u64;
    let data = (section + head).next_multiple_of(PAGE as u64);
    options.option(BUFFER, &buffer(section, data).0);
    options.option(0, &done);
    let at = file.section(0, &options.0);
    file.0[first..first + 8].copy_from_slice(&at.to_le_bytes());
    let all: u64 = pages.sizes().sum();
    file.u16(BUFFER).u16(0).u32(0).u64(data - section - head + all);
    file.align();
    out.write_all(&file.0)?;
    pages.copy(out)
}
