//! Streams of packets: a header, the packet context, and the events. All numbers are little-endian,
//! and nothing is aligned.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use super::super::ground::task_name;
use super::{StreamId, Value};

/// What a packet begins with (CTF 1.8.3, 5.1).
const MAGIC: u32 = 0xc1fc_1fc1;
/// A packet with more bytes of events than this is closed.
const FULL: usize = 1 << 18;

/// Which task an event is of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who<'a> {
    pub(super) vcpu: u32,
    pub(super) pid: u32,
    pub(super) tgid: Option<u32>,
    pub(super) comm: Option<&'a str>,
}

/// A stream.
#[derive(Debug)]
pub(super) struct Packets {
    file: File,
    stream: StreamId,
    vcpu: u32,
    events: Vec<u8>,
    /// Times of the first and the last event of this packet.
    times: [u64; 2],
    /// Closed packets.
    packets: u64,
    lost: u64,
}

impl Packets {
    pub(super) fn new(file: &Path, stream: StreamId, vcpu: u32) -> io::Result<Self> {
        let (file, events) = (File::create(file)?, Vec::with_capacity(FULL + (FULL >> 2)));
        Ok(Self { file, stream, vcpu, events, times: [0; 2], packets: 0, lost: 0 })
    }

    /// Appends an event of a class; `who` where events of this stream have tasks.
    pub(super) fn event(
        &mut self,
        at: u64,
        class: u32,
        who: Option<&Who<'_>>,
        fields: &[(impl AsRef<str>, Value<'_>)],
    ) -> io::Result<()> {
        if self.events.len() > FULL {
            self.close()?;
        }
        if self.events.is_empty() {
            self.times[0] = at;
        }
        self.times[1] = at;
        let out = &mut self.events;
        out.extend(class.to_le_bytes());
        out.extend(at.to_le_bytes());
        if let Some(who) = who {
            out.extend(who.pid.to_le_bytes());
            out.extend(who.tgid.unwrap_or(who.pid).to_le_bytes());
            text(out, &task_name(who.vcpu, who.pid, who.comm));
        }
        for (_, value) in fields {
            match value {
                Value::Unsigned(number) | Value::Address(number) => {
                    out.extend(number.to_le_bytes());
                }
                Value::Signed(number) => out.extend(number.to_le_bytes()),
                Value::Text(value) => text(out, value),
            }
        }
        Ok(())
    }

    /// So many records of this vCPU are not there; the next packet says it. What is before is in
    /// packets of its own: readers tell losses by the difference of two packets.
    pub(super) fn lose(&mut self, at: u64, count: u64) -> io::Result<()> {
        if !self.events.is_empty() {
            self.close()?;
        } else if self.packets == 0 {
            self.times = [at; 2];
            self.close()?;
        }
        self.lost = self.lost.saturating_add(count);
        Ok(())
    }

    /// Ends a packet, even one without events.
    pub(super) fn close(&mut self) -> io::Result<()> {
        let mut front = Vec::with_capacity(64);
        front.extend(MAGIC.to_le_bytes());
        front.extend((self.stream as u32).to_le_bytes());
        self.times.iter().for_each(|time| front.extend(time.to_le_bytes()));
        let context = if self.stream == StreamId::Vcpu { 4 * 8 + 4 } else { 4 * 8 };
        let bits = 8 * u64::try_from(front.len() + context + self.events.len()).unwrap_or(u64::MAX);
        for number in [bits, bits, self.packets, self.lost] {
            front.extend(number.to_le_bytes());
        }
        if self.stream == StreamId::Vcpu {
            front.extend(self.vcpu.to_le_bytes());
        }
        self.file.write_all(&front)?;
        self.file.write_all(&self.events)?;
        self.events.clear();
        self.times[0] = self.times[1];
        self.packets += 1;
        Ok(())
    }

    /// Ends the stream.
    pub(super) fn end(&mut self) -> io::Result<()> {
        if self.events.is_empty() { Ok(()) } else { self.close() }
    }
}

/// A zero ends a text.
fn text(out: &mut Vec<u8>, text: &str) {
    out.extend(text.bytes().map(|byte| if byte == 0 { b'?' } else { byte }));
    out.push(0);
}
