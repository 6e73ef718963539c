//! BPF programs: at the entry or the return of a function of the kernel, which the kernel calls directly
//! (fentry and fexit), where each counts its calls in a map; at a tracepoint, where one writes records; and one that
//! only takes its time.
//!
//! It uses the system call directly: libraries need an object file from a compiler for BPF.
//! Structures and numbers: `include/uapi/linux/bpf.h`.

use anyhow::{Context, Result, bail};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use vmtrace::kernel::Btf;

const MAP_CREATE: u32 = 0;
const MAP_LOOKUP_ELEM: u32 = 1;
const PROG_LOAD: u32 = 5;
const PROG_TEST_RUN: u32 = 10;
const RAW_TRACEPOINT_OPEN: u32 = 17;
const MAP_TYPE_ARRAY: u32 = 2;
const MAP_TYPE_RINGBUF: u32 = 27;
const PROG_TYPE_RAW_TRACEPOINT: u32 = 17;
const PROG_TYPE_TRACING: u32 = 26;
const TEST_RUN_ON_CPU: u32 = 1;
/// Opcode, registers (source, destination), offset, value.
type Instruction = (u8, u8, i16, i32);
/// Bytes of the verifier's words.
const LOG: usize = 4096;

/// Where a program is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attach {
    Entry = 24,
    Return = 25,
}

/// A program that is attached, until this is dropped.
#[derive(Debug)]
pub(super) struct Attached {
    /// First: it is detached before it goes.
    _link: OwnedFd,
    _program: OwnedFd,
    map: OwnedFd,
}

impl Attached {
    /// Attaches to a function: to that one of its names which the type information has.
    pub(super) fn new(attach: Attach, function: &str) -> Result<Self> {
        let map = map(&[MAP_TYPE_ARRAY, 4, 8, 1])?;
        let mut refused = None;
        for number in numbers(function)? {
            let done =
                load(&map, attach, number).and_then(|program| Ok((open(&program)?, program)));
            match done {
                Ok((link, program)) => return Ok(Self { _link: link, _program: program, map }),
                Err(error) => refused = Some(error),
            }
        }
        let refused = refused.with_context(|| format!("no BTF function {function}"))?;
        Err(refused.context(format!("BPF program at {function}")))
    }

    /// Calls of the program.
    pub(super) fn calls(&self) -> Result<u64> {
        let (key, mut value) = (0_u32, 0_u64);
        let mut attributes = words(&[self.map.as_raw_fd().cast_unsigned(), 0]);
        attributes.extend((&raw const key as u64).to_le_bytes());
        attributes.extend((&raw mut value as u64).to_le_bytes());
        command(MAP_LOOKUP_ELEM, &mut attributes)?;
        Ok(value)
    }
}

/// The kernel's type information.
fn btf() -> Result<&'static Btf> {
    static BTF: OnceLock<Btf> = OnceLock::new();
    if let Some(btf) = BTF.get() {
        return Ok(btf);
    }
    let btf = Btf::parse(fs::read("/sys/kernel/btf/vmlinux")?)?;
    Ok(BTF.get_or_init(|| btf))
}

/// The numbers of functions of this name in the kernel's type information. A system call has several
/// names at one address, of which it has one.
fn numbers(function: &str) -> Result<Vec<u32>> {
    let btf = btf()?;
    let call = function.split_once("_sys_").map(|(_, call)| format!("_sys_{call}"));
    let is_meant = |name: &str| match &call {
        Some(call) => name.starts_with("__") && name.ends_with(call.as_str()),
        None => name == function,
    };
    let all = 1..u32::try_from(btf.len())?;
    Ok(all.filter(|&number| btf.type_name(number).is_some_and(is_meant)).collect())
}

/// A program that writes a record for each switch of tasks: the time, and the fields of `sched_switch`. It is a raw
/// tracepoint's whose arguments have types (BPF_TRACE_RAW_TP), with a ring buffer of which nobody is notified: what a
/// tool for BPF does that wants to be fast.
#[derive(Debug)]
pub(super) struct Switches {
    /// First: it is detached before it goes.
    _link: OwnedFd,
    _program: OwnedFd,
    _ring: OwnedFd,
    /// Where the consumer is in the ring, in bytes, and how far the program has written.
    read: &'static AtomicU64,
    written: &'static AtomicU64,
}

impl Switches {
    /// Bytes of a record, and of what the ring has in front of it.
    const RECORD: i32 = 64;
    const HEAD: u64 = 8;
    /// Records that fit into the ring.
    pub(super) const MOST: u64 = Self::RING as u64 / (Self::RECORD as u64 + Self::HEAD);
    const RING: u32 = 64 << 10;

    /// Attaches.
    pub(super) fn new() -> Result<Self> {
        const PAGE: libc::off_t = 4096;
        // BPF_TRACE_RAW_TP.
        const RAW_TP: u32 = 23;
        let ring = map(&[MAP_TYPE_RINGBUF, 0, 0, Self::RING])?;
        let at = |member: &str| -> Result<i16> {
            let found = btf()?.member_offset("task_struct", member);
            Ok(found.with_context(|| format!("no task_struct.{member}"))?.try_into()?)
        };
        let (comm, pid, prio) = (at("comm")?, at("pid")?, at("prio")?);
        let name = |task: u8, to: i32| -> [Instruction; 6] {
            [
                (0xbf, 0x91, 0, 0),               // r1 = r9
                (0x07, 0x01, 0, to),              // r1 += to
                (0xb7, 0x02, 0, 16),              // r2 = 16
                (0xbf, task << 4 | 3, 0, 0),      // r3 = task
                (0x07, 0x03, 0, i32::from(comm)), // r3 += offset of comm
                (0x85, 0x00, 0, 113),             // bpf_probe_read_kernel(r1, r2, r3)
            ]
        };
        let word = |task: u8, from: i16, to: i16| -> [Instruction; 2] {
            // r1 = *(u32 *)(task + from); *(u32 *)(r9 + to) = r1
            [(0x61, task << 4 | 1, from, 0), (0x63, 0x19, to, 0)]
        };
        let mut code: Vec<Instruction> = vec![
            (0xbf, 0x16, 0, 0),                // r6 = r1
            (0x79, 0x67, 8, 0),                // r7 = *(u64 *)(r6 + 8): prev
            (0x79, 0x68, 16, 0),               // r8 = *(u64 *)(r6 + 16): next
            (0x18, 0x11, 0, ring.as_raw_fd()), // r1 = ring
            (0x00, 0x00, 0, 0),
            (0xb7, 0x02, 0, Self::RECORD), // r2 = RECORD
            (0xb7, 0x03, 0, 0),            // r3 = 0
            (0x85, 0x00, 0, 131),          // r0 = bpf_ringbuf_reserve(r1, r2, r3)
            (0x55, 0x00, 2, 0),            // if r0 != 0, over the next two
            (0xb7, 0x00, 0, 0),            // r0 = 0
            (0x95, 0x00, 0, 0),            // exit
            (0xbf, 0x09, 0, 0),            // r9 = r0
            (0x85, 0x00, 0, 5),            // r0 = bpf_ktime_get_ns()
            (0x7b, 0x09, 0, 0),            // *(u64 *)r9 = r0
            (0x79, 0x61, 24, 0),           // r1 = *(u64 *)(r6 + 24): prev_state
            (0x7b, 0x19, 8, 0),            // *(u64 *)(r9 + 8) = r1
        ];
        for (task, to) in [(7, 16), (8, 24)] {
            code.extend(word(task, pid, to));
            code.extend(word(task, prio, to + 4));
            code.extend(name(task, 2 * i32::from(to)));
        }
        code.extend([
            (0xbf, 0x91, 0, 0),   // r1 = r9
            (0xb7, 0x02, 0, 1),   // r2 = BPF_RB_NO_WAKEUP
            (0x85, 0x00, 0, 132), // bpf_ringbuf_submit(r1, r2)
            (0xb7, 0x00, 0, 0),   // r0 = 0
            (0x95, 0x00, 0, 0),   // exit
        ]);
        let numbers = numbers("btf_trace_sched_switch")?;
        let &[number] = &numbers[..] else { bail!("{} types of sched_switch", numbers.len()) };
        let program = program(PROG_TYPE_TRACING, &code, &[(68, RAW_TP), (108, number)])?;
        let position = |offset, protection| {
            let fd = ring.as_raw_fd();
            // SAFETY: a new mapping of a page that the ring has.
            let at =
                unsafe { libc::mmap(null_mut(), 4096, protection, libc::MAP_SHARED, fd, offset) };
            if at == libc::MAP_FAILED {
                bail!("ring buffer: {}", io::Error::last_os_error());
            }
            // SAFETY: it stays, and both sides use the word as one.
            Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
        };
        let read = position(0, libc::PROT_READ | libc::PROT_WRITE)?;
        let written = position(PAGE, libc::PROT_READ)?;
        Ok(Self { _link: open(&program)?, _program: program, _ring: ring, read, written })
    }

    /// How many records were written since this was called last; they are read by that.
    pub(super) fn take(&self) -> u64 {
        let written = self.written.load(Ordering::Acquire);
        let bytes = written - self.read.swap(written, Ordering::AcqRel);
        bytes / (u64::from(Self::RECORD.unsigned_abs()) + Self::HEAD)
    }
}

/// Where a program runs that takes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runs {
    /// On the CPU of the caller, which is not preempted (`bpf_prog_test_run_raw_tp`).
    Here,
    /// On that one, by an interrupt that the caller waits for: it is not preempted, and the other is not
    /// interrupted.
    On(u32),
}

/// A program that takes its time.
#[derive(Debug)]
pub(super) struct Taking(OwnedFd);

impl Taking {
    /// It runs for about so many nanoseconds.
    pub(super) fn new(ns: i32) -> Result<Self> {
        // The verifier goes through all rounds one by one; a look at the clock is some 100 ns.
        const ROUNDS: i32 = 500;
        const LOOK: Instruction = (0x85, 0x00, 0, 5); // r0 = bpf_ktime_get_ns()
        let mut code = vec![
            LOOK,
            (0xbf, 0x06, 0, 0), // r6 = r0
            (0xb7, 0x07, 0, 0), // r7 = 0
        ];
        code.extend([LOOK; 100]);
        // Returns how long it has run by its own looks.
        code.extend([
            (0x1f, 0x60, 0, 0),         // r0 -= r6
            (0x25, 0x00, 2, ns),        // if r0 > ns, over the next two
            (0x07, 0x07, 0, 1),         // r7 += 1
            (0xa5, 0x07, -104, ROUNDS), // if r7 < ROUNDS, back to the first look
            (0x95, 0x00, 0, 0),         // exit
        ]);
        Ok(Self(program(PROG_TYPE_RAW_TRACEPOINT, &code, &[])?))
    }

    /// Runs it; for how long it says that it has.
    pub(super) fn run(&self, runs: Runs) -> Result<u64> {
        let (flags, cpu) = match runs {
            Runs::Here => (0, 0),
            Runs::On(cpu) => (TEST_RUN_ON_CPU, cpu),
        };
        let mut attributes = words(&[self.0.as_raw_fd().cast_unsigned()]);
        attributes.resize(64, 0);
        attributes.extend(words(&[flags, cpu, 0, 0]));
        command(PROG_TEST_RUN, &mut attributes)?;
        let result = attributes.get(4..8).and_then(|bytes| bytes.try_into().ok());
        Ok(u32::from_le_bytes(result.context("no result")?).into())
    }
}

/// A map: its type, the bytes of keys and of values, and how many there can be (of a ring buffer bytes).
fn map(attributes: &[u32; 4]) -> Result<OwnedFd> {
    let map = command(MAP_CREATE, &mut words(attributes))?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(map) })
}

/// Attaches a program where it is for; to whom that belongs.
fn open(program: &OwnedFd) -> Result<OwnedFd> {
    let mut attributes = words(&[0, 0, program.as_raw_fd().cast_unsigned(), 0]);
    let link = command(RAW_TRACEPOINT_OPEN, &mut attributes)?;
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

/// `map[0] += 1; return 0`.
fn load(map: &OwnedFd, attach: Attach, function: u32) -> Result<OwnedFd> {
    let code: [Instruction; 11] = [
        (0x62, 0x0a, -4, 0),              // *(u32 *)(r10 - 4) = 0
        (0xbf, 0xa2, 0, 0),               // r2 = r10
        (0x07, 0x02, 0, -4),              // r2 -= 4
        (0x18, 0x11, 0, map.as_raw_fd()), // r1 = map
        (0x00, 0x00, 0, 0),
        (0x85, 0x00, 0, 1), // r0 = bpf_map_lookup_elem(r1, r2)
        (0x15, 0x00, 2, 0), // if r0 == 0, over the next two
        (0xb7, 0x01, 0, 1), // r1 = 1
        (0xdb, 0x10, 0, 0), // lock *(u64 *)r0 += r1
        (0xb7, 0x00, 0, 0), // r0 = 0
        (0x95, 0x00, 0, 0), // exit
    ];
    // expected_attach_type and attach_btf_id.
    program(PROG_TYPE_TRACING, &code, &[(68, attach as u32), (108, function)])
}

/// Loads a program of that type, with more attributes at their places.
fn program(kind: u32, instructions: &[Instruction], more: &[(usize, u32)]) -> Result<OwnedFd> {
    let mut code = Vec::with_capacity(8 * instructions.len());
    for (opcode, registers, offset, value) in instructions {
        code.extend([opcode, registers]);
        code.extend(offset.to_le_bytes());
        code.extend(value.to_le_bytes());
    }
    let mut attributes = words(&[kind, instructions.len().try_into()?]);
    attributes.extend((code.as_ptr() as u64).to_le_bytes());
    attributes.extend((c"GPL".as_ptr() as u64).to_le_bytes());
    // The log of the verifier: its level, its size and where it is.
    let at = attributes.len();
    attributes.resize(at + 16, 0);
    for &(place, value) in more {
        attributes.resize(place, 0);
        attributes.extend(value.to_le_bytes());
    }
    attributes.resize(120, 0);
    let program = command(PROG_LOAD, &mut attributes).or_else(|_| {
        // Again, for its words: a program that is good may have more of them than there is room for.
        let mut log = vec![0_u8; LOG];
        let mut asked = words(&[1, LOG.try_into()?]);
        asked.extend((log.as_mut_ptr() as u64).to_le_bytes());
        attributes[at..at + 16].copy_from_slice(&asked);
        command(PROG_LOAD, &mut attributes).with_context(|| {
            let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
            format!("the verifier says {:?}", String::from_utf8_lossy(&log[..end]))
        })
    })?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(program) })
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// bpf(2); its result.
fn command(number: u32, attributes: &mut [u8]) -> Result<RawFd> {
    // SAFETY: the attributes are as long as is said, and what they point to is alive in the callers.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, number, attributes.as_mut_ptr(), attributes.len()) };
    if done < 0 {
        bail!("bpf command {number}: {}", io::Error::last_os_error());
    }
    Ok(done.try_into()?)
}
